"""Moves blocks between the device and a tier."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from octavo.kvcache.block import BlockTransfer
from octavo.runner.ranks import RankGroup
from octavo.scheduler.plan import StepPlan
from octavo.storage.arena import KVArena
from octavo.storage.host import HostTier

# Blocks on their way to other memory are copied aside before, at most two pieces of this size at a time.
_PIECE_BYTES = 32 << 20


class HostLink:
    """Copies rows of bytes between device and host; on a CPU, where both are the same memory, it copies nothing.

    Attributes:
        is_apart: whether the device has its own memory.
    """

    is_apart = False

    def ready(self, rows: torch.Tensor) -> Any:
        """Return a mark in the device's work queue, after which `to_host` can read the newly computed `rows`."""
        return None

    def to_host(self, rows: torch.Tensor, ready: Any) -> torch.Tensor:
        """Copy `rows` to host memory; complete when this returns. It may be called from another thread."""
        return rows

    def to_device(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | torch.Tensor:
        """Copy `rows`, all of one size, to the device, for the work queued there next."""
        return rows


SAME_MEMORY = HostLink()


class CudaLink(HostLink):
    """Copies through pinned memory, on its own stream."""

    is_apart = True

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


class BlockMover:
    """Executes a plan's transfers before its computation; a GPU's blocks are stored while the model computes.

        step      copy aside │ copies │ blocks from the tier │ model ……………… │ finish
        thread               └──> store in the tier ………………………………………┘

    A GPU's block may be overwritten as soon as it is copied aside on the device; a thread transfers the copy on its own
    stream. Loads are needed by the step's own computation, and may include blocks that it has just stored, so they wait
    for all stores. On a CPU, a thread would take the time that it needs, and that of a second copy, from the model,
    which uses every core: blocks are copied once, to their places.

    Args:
        tier: the tier to move blocks to and from; None if no plan swaps.
        link: link between the memory of the arena and that of the tier.
        ranks: the others of several ranks, which move their shares of the blocks first.

    Attributes:
        load_seconds, store_seconds: how long the transfers took that `begin` and `finish` were last called for.
    """

    def __init__(
        self, arena: KVArena, tier: HostTier | None, link: HostLink = SAME_MEMORY, ranks: RankGroup | None = None
    ) -> None:
        self._ranks = ranks
        self._arena = arena
        self._tier = tier
        self._link = link
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-swap")  # starts with its first use
        self.load_seconds = 0.0
        self.store_seconds = 0.0
        self._stores: list[Future[float]] = []

    def begin(self, plan: StepPlan) -> None:
        """Do the transfers that must precede the computation. `finish` must follow, even if this raises."""
        tier = self._tier
        self.load_seconds = self.store_seconds = 0.0
        if self._ranks is not None:
            self._ranks.copy_blocks(plan)
        if tier is not None:
            self._store(tier, plan.stores)
        self._arena.copy_blocks(plan.copies)
        if tier is not None and plan.loads:
            self.finish()
            began = time.perf_counter()
            for piece in self._pieces(plan.loads):
                rows = self._link.to_device(tier.rows([swap.host for swap in piece]))
                self._arena.write_blocks([swap.device for swap in piece], rows)
            self.load_seconds = time.perf_counter() - began

    def finish(self) -> None:
        """Wait until everything is stored; re-raises errors of the transfers."""
        if not self._stores:
            return
        stores, self._stores = self._stores, []
        wait(stores)
        for store in stores:
            self.store_seconds += store.result()

    def _store(self, tier: HostTier, swaps: Sequence[BlockTransfer]) -> None:
        link, stores = self._link, self._stores
        for piece in self._pieces(swaps):
            on_device, on_host = [swap.device for swap in piece], [swap.host for swap in piece]
            if not link.is_apart:
                self.store_seconds += _write(tier, on_host, self._arena.rows(on_device), link, None)
                continue
            # At most one piece is copied aside while another is being stored.
            if len(stores) > 1:
                self.store_seconds += stores.pop(0).result()
            rows = self._arena.read_blocks(on_device)
            stores.append(self._thread.submit(_write, tier, on_host, rows, link, link.ready(rows)))

    def _pieces(self, swaps: Sequence[BlockTransfer]) -> Iterator[Sequence[BlockTransfer]]:
        size = max(1, _PIECE_BYTES // self._arena.spec.block_bytes)
        return (swaps[start : start + size] for start in range(0, len(swaps), size))


def _write(tier: HostTier, ids: Sequence[int], rows: Any, link: HostLink, ready: Any) -> float:
    began = time.perf_counter()
    # Inference mode is per thread, and the rows were created in it.
    with torch.inference_mode():
        tier.write(ids, link.to_host(rows, ready))
    return time.perf_counter() - began
