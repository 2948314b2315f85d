"""Octavo: an LLM inference server around one data structure, the paged KV cache.

from octavo import LLM, SamplingParams
LLM("smollm2").generate(["Once upon a time"], SamplingParams(max_tokens=64))
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.errors import ConfigError, EngineDeadError, ModelError, OctavoError, RequestError
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams
    from octavo.structured_outputs import StructuredOutputsParams

    __version__: str

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "ModelError",
    "OctavoError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_MODULES = {
    "octavo.config": ("EngineConfig",),
    "octavo.engine.async_engine": ("AsyncEngine",),
    "octavo.engine.outputs": ("CompletionOutput", "RequestOutput"),
    "octavo.errors": ("ConfigError", "EngineDeadError", "ModelError", "OctavoError", "RequestError"),
    "octavo.llm": ("LLM",),
    "octavo.sampling_params": ("SamplingParams",),
    "octavo.structured_outputs": ("StructuredOutputsParams",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import names on first use: `octavo --help` does not wait for torch, and the entry point for nothing at all."""
    if name == "__version__":
        return _version()
    if name not in _LAZY:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


@cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("octavo")
    except PackageNotFoundError:  # running from a checkout with PYTHONPATH=src
        return "0+checkout"
