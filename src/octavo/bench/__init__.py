"""Measuring: workloads, traces, an offline run and an open-loop client. The commands are in `octavo.commands`."""
