"""A quicker import of torch, for a process that only serves."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# Describes operators to torch's compiler and to tensors without memory: a fifth of torch's import. A model that Octavo
# computes itself on a CPU needs none of it.
_META_KERNELS = "torch._meta_registrations"


@cache
def _cpu_library() -> Path | None:
    """Return the library that pulls in all others of a torch for CPUs; None for other builds."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    libraries = Path(torch.origin).parent / "lib"
    library = libraries / "libtorch_python.so"
    return library if library.exists() and not (libraries / "libtorch_cuda.so").exists() else None


def load_torch_libraries() -> None:
    """Load torch's shared libraries in a thread, while the caller imports other modules.

    Relocating them takes two tenths of a second, for which `import torch` would hold the interpreter's lock; a foreign
    function does not. A torch with CUDA chooses its libraries itself.
    """
    if (library := _cpu_library()) is None:
        return
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    threading.Thread(target=load, args=(os.fsencode(library), os.RTLD_NOW), daemon=True).start()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage while modules are imported, and exclude what they made from later collections."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def import_torch_to_serve() -> None:
    """Import torch for models that Octavo computes itself: without its meta kernels, unless it was built for a GPU.

    A later import of them works as usual.
    """
    if _cpu_library() is None or "torch" in sys.modules:
        return
    sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)
    try:
        import torch
    finally:
        del sys.modules[_META_KERNELS]
    vars(torch).pop(_META_KERNELS.rpartition(".")[2], None)
