"""Connections: accepting them, reading bodies from them, writing answers to them, and the log of requests."""
