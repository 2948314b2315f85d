"""Benchmarks: workloads, traces, offline runs and an open-loop client. The commands are in `octavo.commands`."""
