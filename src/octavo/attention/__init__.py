"""Attention over block tables: the interface and its backends."""

from __future__ import annotations

import importlib.util
import logging

import torch

from octavo.attention.base import AttentionBackend
from octavo.errors import ConfigError

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "triton", "reference")


def make_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """Return the backend called `name`; "auto" is the fastest that runs on `device`.

    Raises:
        ConfigError: there is no such backend, or it cannot run here.
    """
    from octavo import kernels
    from octavo.attention.native import NativeAttention
    from octavo.attention.reference import ReferenceAttention

    if name not in BACKENDS:
        raise ConfigError(f"attention_backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    kind = torch.device(device).type
    if name == "triton" or (name == "auto" and kind == "cuda"):
        if importlib.util.find_spec("triton") is not None:
            from octavo.attention.triton.backend import TritonAttention

            return TritonAttention(device)
        missing = "the package triton is not installed: pip install triton"
        if name == "triton":
            raise ConfigError(f"attention_backend 'triton' cannot run: {missing}")
        logger.warning("attention runs in plain torch, one sequence after the other, because %s", missing)
    runs_natively = kind == "cpu" and kernels.available()
    if name == "native" and not runs_natively:
        raise ConfigError("attention_backend 'native' needs the compiled C++ kernels and device 'cpu'; use 'auto'")
    return NativeAttention() if runs_natively and name != "reference" else ReferenceAttention()
