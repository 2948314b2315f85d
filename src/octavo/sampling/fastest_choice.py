"""Chooses what chooses tokens on a device."""

from __future__ import annotations

import importlib.util

import torch

from octavo import kernels
from octavo.sampling.choice import Choice, TorchChoice
from octavo.sampling.native_choice import NativeChoice


def make_choice(device: torch.device) -> Choice:
    """The fastest that runs there."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.sampling.triton_choice import TritonChoice

        return TritonChoice()
    return NativeChoice() if device.type == "cpu" and kernels.available() else TorchChoice()
