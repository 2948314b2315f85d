"""The instruction-set levels at which the C++ kernels are tested."""

from __future__ import annotations

import os

from octavo import kernels

# All that this machine can run, the slowest first; with `KERNEL_TEST_LEVELS=best` (`make quick`) only the fastest.
LEVELS = kernels.supported_isas() if kernels.available() else []
if os.environ.get("KERNEL_TEST_LEVELS") == "best":
    LEVELS = LEVELS[-1:]
