"""Numbers brought to the device, and back, without waiting for what it is computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host array on the device; on a CPU the very memory.

    A GPU copies it when it has done all that was launched before, out of pinned memory, which is not given to others
    until then: the array may be written again at once.
    """
    return _staged(array, device).to(device, non_blocking=True)


def write_to_device(array: npt.NDArray[Any], out: torch.Tensor) -> None:
    """The same into a tensor of the device."""
    out.copy_(_staged(array, out.device), non_blocking=True)


def _staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def begin_copy_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to bring to the host what the device computes; the function that is returned waits until it is there."""
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
