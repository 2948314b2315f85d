"""Python's interpreter in a process that serves: nothing in it shall keep a thread waiting for long.

What lives as long as the server is not looked at again by the garbage collector, and the event loop and the engine's
thread hand each other the interpreter's lock within a fraction of a millisecond.
"""

from __future__ import annotations

import gc
import sys

# Objects made before the youngest are looked at, how often that happens before the survivors are looked at, and how
# often that before all are: some thousand objects take well under a millisecond, twenty thousand of a crowd's requests
# up to ten, all of them tens of milliseconds where there are many blocks. So all are looked at when the engine has been
# idle for a while (`engine/async_engine.py`), and otherwise after some 200 million objects; by then nearly everything
# has been freed by its reference count.
_YOUNG = 2_000
_MIDDLE = 3
_OLD = 33_000

# How long a thread that wants the interpreter's lock waits before it asks for it. With Python's 5 ms, the event loop
# may wait that long after every system call while the engine's thread plans a step; and the engine's thread, which lets
# go of the lock in each of a step's hundred calls into torch and the kernels, so long for each of them while the loop
# is busy with a crowd of requests.
SWITCH_SECONDS = 0.0002


def settle_interpreter() -> None:
    """To be called once a model is loaded, by a process that does nothing but serve."""
    settle_garbage_collection()
    sys.setswitchinterval(SWITCH_SECONDS)


def settle_garbage_collection() -> None:
    """Modules, weights and tables are set apart from all later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
