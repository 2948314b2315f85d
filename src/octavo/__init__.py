"""Octavo: an LLM inference server around one data structure, the paged KV cache.

from octavo import LLM, SamplingParams
LLM("smollm2").generate(["Once upon a time"], SamplingParams(max_tokens=64))
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, ModelError, OctavoError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.llm import LLM

try:
    __version__ = version("octavo")
except PackageNotFoundError:  # run from a checkout, with PYTHONPATH=src
    __version__ = "0.1.0+checkout"

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

_LAZY = {
    "LLM": "octavo.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "CompletionOutput": "octavo.engine.outputs",
    "RequestOutput": "octavo.engine.outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `octavo --help` and the calculator do not wait for torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
