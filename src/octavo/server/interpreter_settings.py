"""Settings of Python's interpreter for a serving process that keep threads from waiting for long, and free memory.

Objects that live as long as the server are excluded from garbage collection, and the event loop and the engine's thread
hand each other the interpreter's lock within a fraction of a millisecond.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from functools import cache

# Thresholds of the garbage collector's generations: objects made before the youngest generation is collected, such
# collections before the middle one is, and collections of the middle one before the oldest is. A few thousand objects
# take well under a millisecond, twenty thousand objects of many requests up to ten, and all objects tens of
# milliseconds if there are many blocks. A full collection therefore runs when the engine has been idle for a while
# (`engine/async_engine.py`), and otherwise only after some 200 million objects; reference counting frees nearly
# everything anyway.
_YOUNG = 2_000
_MIDDLE = 3
_OLD = 33_000

# How long a thread waits for the interpreter's lock before it asks the holder to release it. With Python's default of
# 5 ms, the event loop may wait that long after every system call while the engine's thread plans a step. The engine's
# thread releases the lock in each of a step's hundred calls into torch and the kernels, and may wait that long after
# each of them while the loop is busy with many requests.
SWITCH_SECONDS = 0.0002


def settle_interpreter() -> None:
    """Apply the settings; for a process that only serves, once its model is loaded."""
    settle_garbage_collection()
    sys.setswitchinterval(SWITCH_SECONDS)


def settle_garbage_collection() -> None:
    """Exclude modules, weights and tables from all later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def return_free_memory() -> None:
    """Return to the operating system what malloc keeps of freed memory; does nothing without glibc.

    Free memory below a block in use is kept: 112 MiB after 60 bodies of 8 MB, in a server at work. Returning that took
    6 ms, without the interpreter's lock.
    """
    if (trim := getattr(_c_library(), "malloc_trim", None)) is not None:
        trim(0)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
