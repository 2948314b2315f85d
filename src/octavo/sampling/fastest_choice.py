"""Selects the `Choice` for a device, and prepares it."""

from __future__ import annotations

import importlib.util

import torch

from octavo import kernels
from octavo.sampling.choice import Choice, TorchChoice
from octavo.sampling.native_choice import NativeChoice


def make_choice(device: torch.device) -> Choice:
    """Return the fastest `Choice` that runs on the device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.sampling.triton_choice import TritonChoice

        return TritonChoice()
    return NativeChoice() if device.type == "cpu" and kernels.available() else TorchChoice()


def warm_up_choice(vocab_size: int, device: torch.device) -> None:
    """Compile the kernel that draws under masks, which is launched for structured outputs only."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.sampling.triton_choice import draw_masked_row

        draw_masked_row(vocab_size, device)
