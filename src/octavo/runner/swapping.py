"""Move blocks between the device and a tier, and measure how long that takes compared with recomputing them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo.kvcache.block import BlockId
from octavo.kvcache.host_pool import BlockSwap, HostBlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import RequestId, SequenceId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import NewSequence, SamplingSnapshot, StepPlan
from octavo.scheduler.preemption import RestoreSpeed
from octavo.storage.arena import KVArena
from octavo.tiers.base import BlockTier

if TYPE_CHECKING:
    from octavo.runner.runner import ModelRunner

# Blocks on their way are in memory twice: two pieces of so many bytes at a time.
_PIECE_BYTES = 32 << 20
_MEASURED_BYTES = 4 << 20
# Less than this is stored before a thread would have begun to.
_WORTH_A_THREAD = 1 << 20
# A short prefill twice, for the first of its kind is slow; where that is over soon, a longer one, which says more.
_SHORT_PREFILL = 16
_LONG_PREFILL = 64
_SOON = 0.010


def swap_out(arena: KVArena, tier: BlockTier, swaps: Sequence[BlockSwap]) -> None:
    """Device to tier; each device block may be written again once this returns."""
    for piece in _pieces(arena, swaps):
        tier.write([swap.host for swap in piece], arena.read_blocks([swap.device for swap in piece]))


def swap_in(arena: KVArena, tier: BlockTier, swaps: Sequence[BlockSwap]) -> None:
    """Tier to device."""
    for piece in _pieces(arena, swaps):
        arena.write_blocks([swap.device for swap in piece], tier.read([swap.host for swap in piece]))


class BlockMover:
    """Executes a plan's transfers; on a CPU, storing in the tier overlaps with the step's computation.

        step      copy aside │ copies │ blocks from the tier │ model ……………… │ finish
        beside               └──> store in the tier ………………………………………┘

    A device block may be written again as soon as it is copied aside. What a step brings back is needed by its own
    computation, and may be what it has just moved out: it waits for all that is being stored. On a GPU all happens in
    its turn: a second thread would wait for the very stream that computes.

    Args:
        tier: None where no plan swaps.
    """

    def __init__(self, arena: KVArena, tier: BlockTier | None, device: torch.device) -> None:
        self._arena = arena
        self._tier = tier
        self._overlaps = device.type == "cpu"
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-swap")  # starts with its first use
        self._stores: list[Future[None]] = []

    def begin(self, plan: StepPlan) -> None:
        """Do the transfers that must precede the computation. `finish` must follow, even if this raises."""
        arena, tier = self._arena, self._tier
        if tier is not None and plan.swap_out:
            if self._overlaps and len(plan.swap_out) * arena.spec.block_bytes >= _WORTH_A_THREAD:
                self._swap_out_beside(tier, plan.swap_out)
            else:
                swap_out(arena, tier, plan.swap_out)
        arena.copy_blocks(plan.copies)
        if tier is not None and plan.swap_in:
            self.finish()
            swap_in(arena, tier, plan.swap_in)

    def finish(self) -> None:
        """Wait until everything is stored; re-raises errors of the transfers."""
        stores, self._stores = self._stores, []
        wait(stores)
        for store in stores:
            store.result()

    def _swap_out_beside(self, tier: BlockTier, swaps: Sequence[BlockSwap]) -> None:
        for piece in _pieces(self._arena, swaps):
            # One is copied aside while another is stored, no more.
            if len(self._stores) > 1:
                self._stores.pop(0).result()
            rows = self._arena.read_blocks([swap.device for swap in piece])
            self._stores.append(self._beside.submit(_store, tier, [swap.host for swap in piece], rows))


def _store(tier: BlockTier, ids: Sequence[int], rows: torch.Tensor) -> None:
    # A thread has a mode of its own, and the rows come from one that infers.
    with torch.inference_mode():
        tier.write(ids, rows)


def measure_restore_speed(runner: ModelRunner, tier: BlockTier, *, max_tokens: int) -> RestoreSpeed:
    """Time swapping a few blocks out and in, and a short prefill, before the engine serves.

    Takes a few milliseconds for a small model, and three decode steps' time for a large one. What it writes into the
    arena nobody reads.

    Args:
        max_tokens: most that one step, and one sequence, may have.
    """
    arena = runner.arena
    device = runner.model.device
    count = max(1, min(tier.num_blocks, arena.num_blocks - 1, _MEASURED_BYTES // arena.spec.block_bytes))
    swaps = [BlockSwap(BlockId(i + 1), HostBlockId(i)) for i in range(count)]

    def out_and_back() -> None:
        swap_out(arena, tier, swaps)
        swap_in(arena, tier, swaps)

    # The first time also pays for touching the memory, which happens once in a block's life.
    per_block = min(_seconds(out_and_back, device) for _ in range(3)) / count / 2

    spec = arena.spec
    room = min(max_tokens, (arena.num_blocks - 1) // len(spec.groups) * spec.block_size)
    per_token = float("inf")
    for num_tokens in (_SHORT_PREFILL, _SHORT_PREFILL, _LONG_PREFILL):
        if num_tokens == _LONG_PREFILL and per_token * _SHORT_PREFILL > _SOON:
            break
        plan = _prefill(min(num_tokens, room), spec)
        per_token = min(per_token, _seconds(partial(runner.execute, plan), device) / plan.num_tokens)
    return RestoreSpeed(per_token, per_block)


def _prefill(num_tokens: int, spec: KVCacheSpec) -> StepPlan:
    """Of a sequence that the next plan makes the runner forget: a scheduler's first plan is a `reset`."""
    ids = itertools.count(1)
    tables = tuple(tuple(BlockId(next(ids)) for _ in range(spec.blocks_for_tokens(num_tokens))) for _ in spec.groups)
    seq_id = SequenceId(0)
    sampling = SamplingSnapshot(RequestId("measuring"), SamplingParams(), seed=0, num_prompt_tokens=num_tokens)
    return StepPlan(
        seq_ids=(seq_id,),
        starts=(0,),
        lengths=(num_tokens,),
        draws=(0,),
        token_ids=(0,) * num_tokens,
        reset=True,
        new=(NewSequence(seq_id, sampling, tables),),
    )


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _pieces(arena: KVArena, swaps: Sequence[BlockSwap]) -> Iterator[Sequence[BlockSwap]]:
    size = max(1, _PIECE_BYTES // arena.spec.block_bytes)
    for start in range(0, len(swaps), size):
        yield swaps[start : start + size]
