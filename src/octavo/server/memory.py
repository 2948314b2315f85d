"""Python's garbage collector in a process that serves: what lives as long as the server is not looked at again."""

from __future__ import annotations

import gc

# Objects made before the youngest are looked at, how often that happens before the survivors are looked at, and how
# often that before all are: some thousand objects take well under a millisecond, all of them tens of milliseconds where
# there are many blocks. So all are looked at when the engine has been idle for a while (`engine/async_engine.py`), and
# otherwise after some 200 million objects; by then nearly everything has been freed by its reference count.
_YOUNG = 2_000
_MIDDLE = 10
_OLD = 10_000


def settle_garbage_collection() -> None:
    """To be called once a model is loaded: modules, weights and tables are set apart from all later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
