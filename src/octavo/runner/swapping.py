"""Moving blocks between the device and a tier, and how long that takes beside computing them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo.kvcache.block import BlockId
from octavo.kvcache.host_pool import BlockSwap, HostBlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import ScheduledSequence, StepPlan
from octavo.scheduler.preemption import RestoreSpeed
from octavo.storage.arena import KVArena
from octavo.tiers.base import BlockTier

if TYPE_CHECKING:
    from octavo.runner.runner import ModelRunner

# Blocks on their way are in memory twice: so many bytes at a time.
_PIECE_BYTES = 64 << 20
_MEASURED_BYTES = 4 << 20
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


def measure_restore_speed(runner: ModelRunner, tier: BlockTier, *, max_tokens: int) -> RestoreSpeed:
    """Time a few blocks' way out and back, and a short prefill, on an engine that has not begun to serve.

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
    (seq,) = Request(RequestId("measuring"), [0] * num_tokens, SamplingParams()).sequences
    ids = itertools.count(1)
    tables = [[BlockId(next(ids)) for _ in range(spec.blocks_for_tokens(num_tokens))] for _ in spec.groups]
    return StepPlan([ScheduledSequence(seq, 0, num_tokens, tables, fresh=True)], num_tokens=num_tokens)


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
