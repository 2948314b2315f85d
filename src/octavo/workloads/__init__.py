"""What benchmarks, calibration and the simulator send and measure. The commands are in `octavo.commands.bench`."""
