"""The compiled library: its availability, instruction-set level and threads."""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from octavo.config import ALLOWED_CPUS
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo import _native as native

__all__ = [
    "MAX_HEAD_DIM",
    "available",
    "force_isa",
    "isa",
    "native",
    "num_threads",
    "set_num_threads",
    "supported_isas",
]

MAX_HEAD_DIM = 576
"""The most dimensions of a head that the library computes; csrc/attend_task.h has the same."""

logger = logging.getLogger(__name__)

# They make OpenMP, which torch brings, bind the thread that imports torch to one CPU.
_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _undo_binding() -> None:
    """Let this thread use all CPUs again if OpenMP has bound it: every thread that it starts would share that one."""
    if not hasattr(os, "sched_setaffinity") or not any(os.environ.get(name) for name in _BINDING_VARIABLES):
        return
    if os.sched_getaffinity(0) < ALLOWED_CPUS:
        with suppress(OSError):  # those CPUs may have been taken away since
            os.sched_setaffinity(0, ALLOWED_CPUS)


@cache
def _load() -> ModuleType | None:
    importlib.import_module("torch")
    _undo_binding()
    try:
        library = importlib.import_module("octavo._native")
    except ImportError as error:
        logger.warning(
            "the C++ kernels are not compiled (%s): using the reference path, which is many times slower; "
            "install a C++20 compiler and reinstall octavo",
            error,
        )
        return None
    if level := os.environ.get("OCTAVO_ISA"):
        try:
            library.force_isa(level)
        except ValueError as error:
            raise ConfigError(f"OCTAVO_ISA: {error}") from None
    return library


class _Missing:
    """A placeholder for the library where it is not compiled."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"{name}: the C++ kernels are not compiled; ask kernels.available() first")


if not TYPE_CHECKING:
    native = _load() or _Missing()


def available() -> bool:
    """Whether the library is compiled. If not, a warning was logged when this module was imported."""
    return _load() is not None


def isa() -> str:
    """The instruction-set level in use, one of `supported_isas`."""
    return native.isa()


def supported_isas() -> list[str]:
    """The levels that this CPU supports, slowest first; "amx_emulated" is there for tests, on any machine."""
    return native.supported_isas()


def force_isa(name: str) -> None:
    """Use another level from now on, in every thread. ValueError where it is unknown or the CPU lacks it."""
    native.force_isa(name)


def num_threads() -> int:
    """Threads that a kernel is spread over, the calling one included; at first the cores this process may use."""
    return native.num_threads()


def set_num_threads(count: int) -> None:
    """Spread kernels over `count` threads (1 to 1024) of their own, which sleep while there is nothing to do."""
    native.set_num_threads(count)
