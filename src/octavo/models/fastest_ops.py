"""Chooses the row-wise operations that a decoder uses."""

from __future__ import annotations

import importlib.util

import torch

from octavo import kernels
from octavo.models.ops import LayerOps, NativeLayerOps


def make_layer_ops(dtype: torch.dtype, device: torch.device) -> LayerOps:
    """Return the fastest row-wise operations for this dtype and device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.models.triton_ops import TritonLayerOps

        return TritonLayerOps()
    native = kernels.available() and device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)
    return NativeLayerOps() if native else LayerOps()
