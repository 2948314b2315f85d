"""What a step means for the statistics: who was admitted, whose token came when, who finished."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from octavo.observe.stats import EngineStats
from octavo.request import FinishReason, Request, RequestId, SequenceId
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.scheduler import Scheduler


class _Queues(TypedDict):
    num_running: int
    num_waiting: int
    num_swapped: int
    kv_usage: float


class StatsRecorder:
    """Feeds `EngineStats` from the step loop."""

    def __init__(self, stats: EngineStats, scheduler: Scheduler) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._last_token: dict[SequenceId, float] = {}
        self._preemptions = 0
        stats.on_blocks(scheduler.kv.bytes_by_state())

    def on_planned(self, plan: StepPlan) -> None:
        """Before a step is computed: who was admitted in it."""
        now = time.monotonic()
        for item in plan.scheduled:
            if item.fresh and item.seq.index == 0 and item.seq.num_preemptions == 0:
                request = item.seq.request
                self._stats.on_admitted(
                    queue_time=now - request.arrival_time,
                    queried_tokens=len(request.prompt_token_ids),
                    hit_tokens=request.num_cached_tokens or 0,
                )
                if request.cache_report is not None:
                    # As its tenant may know it: anybody may read the metrics.
                    self._stats.on_cache_report(request.cache_report.as_told_to(request.tenant))

    def on_step(self, updates: Iterable[SequenceUpdate]) -> None:
        """After a step, once stop strings have ended what they end."""
        now = time.monotonic()
        prompt_tokens = generation_tokens = 0
        # Most sequences had their last token in the same step: one observation serves them all.
        last_tokens: Counter[float] = Counter()
        finished: dict[RequestId, tuple[Request, FinishReason]] = {}
        for update in updates:
            seq, request = update.seq, update.seq.request
            generation_tokens += len(update.token_ids)
            last = self._last_token.get(seq.seq_id)
            if last is not None:
                last_tokens[last] += 1
            elif seq.index == 0:
                prompt_tokens += len(request.prompt_token_ids)
                self._stats.on_first_token(now - request.arrival_time)
            if not seq.finished:
                self._last_token[seq.seq_id] = now
            elif request.finished:
                finished[request.request_id] = (request, seq.finish_reason or FinishReason.STOP)
            else:
                self._last_token.pop(seq.seq_id, None)
        for request, reason in finished.values():
            self._on_finished(request, reason, now)
        for last, times in last_tokens.items():
            self._stats.on_tokens(now - last, times)
        self._stats.on_blocks(self._scheduler.kv.bytes_by_state())
        preemptions = self._scheduler.counters.num_preemptions - self._preemptions
        self._preemptions += preemptions
        swap, block_bytes = self._scheduler.kv.swap.counters, self._scheduler.kv.spec.block_bytes
        self._stats.on_swapped(bytes_out=swap.blocks_out * block_bytes, bytes_in=swap.blocks_in * block_bytes)
        self._stats.on_step(
            **self._queues(),
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            preemptions=preemptions,
        )

    def on_ended(self, request: Request, reason: FinishReason) -> None:
        """A request was ended from outside, between two steps."""
        self._on_finished(request, reason, time.monotonic())
        self._stats.on_queues(**self._queues())
        self._stats.on_blocks(self._scheduler.kv.bytes_by_state())

    def _on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        for seq in request.sequences:
            self._last_token.pop(seq.seq_id, None)
        self._stats.on_finished(
            reason,
            e2e_latency=now - request.arrival_time,
            prompt_tokens=len(request.prompt_token_ids),
            generation_tokens=sum(seq.num_output_tokens for seq in request.sequences),
        )

    def _queues(self) -> _Queues:
        scheduler = self._scheduler
        return {
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_swapped": scheduler.num_swapped,
            "kv_usage": scheduler.kv.usage,
        }
