"""A quicker import of torch, for a process that only serves."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# Describe operators to torch's compiler and to tensors without memory, or replace some on GPUs: a fifth of torch's
# import. A model that Octavo computes itself on a CPU needs none of it.
_REGISTRATIONS = ("torch._meta_registrations", "torch.distributed._meta_registrations", "torch._native")
# Modules that `import torch` imports but does not use, in the version that this was tried with: a quarter of its
# import, and twice as many modules with those that these import.
_UNUSED_IN = "2.13."
_UNUSED = frozenset(
    f"torch.{name}"
    for name in (
        *("ao", "compiler", "distributions", "export", "fx.passes", "masked", "mps", "nn.intrinsic", "nn.qat"),
        *("nn.quantizable", "nn.quantized", "nn.utils", "optim", "profiler", "quantization", "testing", "utils.data"),
    )
) | {"torchgen", "torchgen.model"}

# The compiled modules that the server needs, or packages that bring some.
_COMPILED = ("_pickle", "_queue", "_multiprocessing", "resource", "numpy", "tokenizers", "markupsafe")


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
    function does not. But it holds the dynamic linker's lock, for which the import of any other compiled module would
    wait: so those of the server are imported first. A torch with CUDA chooses its libraries itself.
    """
    if (library := _cpu_library()) is None:
        return
    with collection_paused():
        for name in _COMPILED:
            importlib.import_module(name)
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    # Not a daemon: a process that exits while the libraries are loaded, such as after an error, would crash.
    threading.Thread(target=load, args=(os.fsencode(library), os.RTLD_NOW)).start()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage while modules are imported, and exclude what they made from later collections."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


class _ImportedWhenUsed(MetaPathFinder, Loader):
    """Puts a module in the place of each unused one, which imports it when one of its attributes is asked for."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in self._names else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def attribute(wanted: str) -> Any:
            if wanted.startswith("__"):  # the import system asks for these
                raise AttributeError(wanted)
            self._names -= {name}
            if sys.modules.get(name) is module:
                del sys.modules[name]
            for each in (*_REGISTRATIONS, name):  # in torch's order: some modules import each other in a circle
                used = importlib.import_module(each)
            return getattr(used, wanted)

        vars(module)["__getattr__"] = attribute


def import_torch_to_serve() -> None:
    """Import torch for models that Octavo computes itself: without what these do not use, unless it is built for a GPU.

    A later import, or use, of what was left out works as usual.
    """
    if _cpu_library() is None or "torch" in sys.modules:
        return
    sys.modules.update((name, ModuleType(name)) for name in _REGISTRATIONS)
    finder = _ImportedWhenUsed(_UNUSED if version("torch").startswith(_UNUSED_IN) else frozenset())
    sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
        for name in _REGISTRATIONS:
            del sys.modules[name]
    for name in _REGISTRATIONS:
        parent, _, last = name.rpartition(".")
        vars(sys.modules[parent]).pop(last, None)
