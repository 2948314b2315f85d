"""Simulate a service before it exists: the real scheduler and cache, on a virtual clock."""
