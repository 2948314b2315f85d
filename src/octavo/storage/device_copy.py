"""Copies data to the device and back without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a host array as a tensor on the device, sharing its memory on a CPU.

    For a GPU, the array is first copied to pinned memory, which is not reused before the transfer has happened, so the
    array may be overwritten at once.
    """
    return _staged(array, device).to(device, non_blocking=True)


def write_to_device(array: npt.NDArray[Any], out: torch.Tensor) -> None:
    """Write a host array into a tensor on the device."""
    out.copy_(_staged(array, out.device), non_blocking=True)


def _staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def begin_copy_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the host; the returned function waits for the copy and returns it."""
    if not tensor.is_cuda:
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return host

    return wait
