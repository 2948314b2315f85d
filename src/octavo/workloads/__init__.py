"""Requests of benchmarks, calibration and the simulator, and their measurement. Commands: `octavo.commands.bench`."""
