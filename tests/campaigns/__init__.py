"""Correctness that takes minutes or hours to show: attacks, fuzzing, faults, isolation, soaks."""
