"""Moves blocks between the memory of the device and that of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class HostLink(ABC):
    """Copies rows of bytes between the device and the host. `to_host` may be called from another thread.

    Attributes:
        is_apart: whether the device has a memory of its own.
    """

    is_apart = True

    @abstractmethod
    def ready(self, rows: torch.Tensor) -> Any:
        """Return a mark in the device's work queue, after which `to_host` can read the newly computed `rows`."""

    @abstractmethod
    def to_host(self, rows: torch.Tensor, ready: Any) -> torch.Tensor:
        """Copy `rows` to host memory; the copy is complete when this returns."""

    @abstractmethod
    def to_device(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | torch.Tensor:
        """Copy `rows`, all of one size, to the device, for the work queued there next."""


class SameMemory(HostLink):
    """The link for a CPU, where nothing needs to be copied."""

    is_apart = False

    def ready(self, rows: torch.Tensor) -> Any:
        return None

    def to_host(self, rows: torch.Tensor, ready: Any) -> torch.Tensor:
        return rows

    def to_device(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return rows


SAME_MEMORY = SameMemory()


class CudaLink(HostLink):
    """Copies through pinned memory, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ready(self, rows: torch.Tensor) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        # Keeps the memory from being reused before this link's stream has read it.
        rows.record_stream(self._stream)
        return event

    def to_host(self, rows: torch.Tensor, ready: torch.cuda.Event) -> torch.Tensor:
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host.copy_(rows, non_blocking=True)
        self._stream.synchronize()
        return host

    def to_device(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = torch.stack(list(rows)).pin_memory().to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        there.record_stream(computing)
        return there


def make_link(device: torch.device) -> HostLink:
    return CudaLink(device) if device.type == "cuda" else SAME_MEMORY
