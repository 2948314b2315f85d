"""Random numbers as a pure function of (seed, position): no state to store or to lose at a preemption."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], *, again: bool = False
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position): float64 [rows], multiples of 2^-53.

    Args:
        again: whether to return a second number for each position, independent of the first.

    The number is output `position` of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
    generators"), started from the mixed seed. Sequences have consecutive integers as seeds, whose raw streams would be
    the same stream shifted by one step.
    """
    with np.errstate(over="ignore"):
        start = _mix(seeds + _GOLDEN)
        if again:
            start = _mix(start ^ _SECOND)
        drawn = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
