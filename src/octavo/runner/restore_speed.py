"""Measures how long swapping a block takes, compared with recomputing its tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import torch

from octavo.kvcache.block import BlockId
from octavo.kvcache.host_memory import HostBlockId
from octavo.kvcache.host_transfers import BlockTransfer
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import RequestId, SequenceId
from octavo.runner.host_link import make_link
from octavo.runner.runner import ModelRunner
from octavo.runner.swapping import swap_in, swap_out
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import NewSequence, SamplingSnapshot, StepPlan
from octavo.scheduler.preemption import RestoreSpeed
from octavo.tiers.host import BlockTier

_MEASURED_BYTES = 4 << 20
# A short prefill is run twice, because the first is slow. If it is fast enough, a longer and more accurate one follows.
_SHORT_PREFILL = 16
_LONG_PREFILL = 64
_SOON = 0.010


def measure_restore_speed(runner: ModelRunner, tier: BlockTier, *, max_tokens: int) -> RestoreSpeed:
    """Time swapping a few blocks out and in, and a short prefill, before the engine serves.

    This takes a few milliseconds for a small model, and as long as three decode steps for a large one. What it writes
    to the arena is never read.

    Args:
        max_tokens: maximum number of tokens in a step, and in a sequence.
    """
    arena = runner.arena
    device = runner.model.device
    count = max(1, min(tier.num_blocks, arena.num_blocks - 1, _MEASURED_BYTES // arena.spec.block_bytes))
    link = make_link(device)
    swaps = [BlockTransfer(BlockId(i + 1), HostBlockId(i)) for i in range(count)]

    def out_and_back() -> None:
        swap_out(arena, tier, swaps, link)
        swap_in(arena, tier, swaps, link)

    # The first run also touches the memory for the first time, so take the fastest.
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
    """Return a plan that prefills a dummy sequence; a scheduler's first plan is a `reset`, so the runner forgets it."""
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
