"""The instruction-set levels at which the C++ kernels are tested."""

from __future__ import annotations

import os

from octavo import kernels

# All that this machine can run, the slowest first; with `KERNEL_TEST_LEVELS=best` (`make quick`) only the fastest.
ALL_LEVELS = kernels.supported_isas() if kernels.available() else []
if os.environ.get("KERNEL_TEST_LEVELS") == "best":
    ALL_LEVELS = ALL_LEVELS[-1:]
# A processor with AMX does not need its slow emulation, which has the same bits (`test_emulated_tiles_…`).
HAS_BOTH_TILES = {"amx", "amx_emulated"} <= set(ALL_LEVELS)
LEVELS = [level for level in ALL_LEVELS if level != "amx_emulated" or not HAS_BOTH_TILES]
