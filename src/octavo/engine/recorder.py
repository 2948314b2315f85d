"""Records the statistics of each step: admissions, token times, finished requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypedDict

from octavo.observe.stats import EngineStats
from octavo.request import FinishReason, Request, RequestId, SequenceId
from octavo.scheduler.plan import SequenceUpdate
from octavo.scheduler.scheduler import Scheduler

GAUGE_SECONDS = 0.05
"""How old gauges may be while steps only add tokens to streams. Reading them takes as long as all else in a step's
statistics."""


class _Queues(TypedDict):
    num_running: int
    num_waiting: int
    num_swapped: int
    kv_usage: float
    preemptions: int
    deferred_tokens: int


class StatsRecorder:
    """Updates `EngineStats` from the step loop."""

    def __init__(self, stats: EngineStats, scheduler: Scheduler) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._last_token: dict[SequenceId, float] = {}
        self._preemptions = self._deferred = 0
        self._seen: tuple[int, ...] = ()
        self._gauges_due = 0.0
        self._usage = 0.0
        self._on_cache()

    def on_admitted(self, request: Request) -> None:
        """Record a request's first admission, before it is computed."""
        now = time.monotonic()
        self._gauges_due = now
        request.admitted_time = now
        self._stats.waiting.leave(request.request_id)
        if self._stats.tracer is not None:
            self._stats.tracer.on_admitted(request, now)
        self._stats.on_admitted(
            queue_time=now - request.arrival_time,
            queried_tokens=len(request.prompt_token_ids),
            hit_tokens=request.num_cached_tokens or 0,
        )
        if request.cache_report is not None:
            # Only what its tenant may know, because the metrics are open to everyone.
            self._stats.on_cache_report(request.cache_report.as_told_to(request.tenant))

    def on_step(self, updates: Iterable[SequenceUpdate]) -> None:
        """Record a step, after stop strings have been applied."""
        now = time.monotonic()
        prompt_tokens = generation_tokens = 0
        last_token = self._last_token
        # Most sequences got their previous token in the same step, so they share one observation.
        last_tokens: dict[float, int] = {}
        finished: dict[RequestId, tuple[Request, FinishReason]] = {}
        for update in updates:
            seq = update.seq
            generation_tokens += len(update.token_ids)
            last = last_token.get(seq.seq_id)
            if last is not None:
                last_tokens[last] = last_tokens.get(last, 0) + 1
            elif seq.index == 0:
                prompt_tokens += len(seq.request.prompt_token_ids)
                seq.request.first_token_time = now
                self._stats.on_first_token(now - seq.request.arrival_time)
                if self._stats.tracer is not None:
                    self._stats.tracer.on_first_token(seq.request, now)
            if update.finish_reason is None:
                last_token[seq.seq_id] = now
            elif seq.request.finished:
                finished[seq.request.request_id] = (seq.request, update.finish_reason)
            else:
                last_token.pop(seq.seq_id, None)
        for request, reason in finished.values():
            self._on_finished(request, reason, now)
        for last, times in last_tokens.items():
            self._stats.on_tokens(now - last, times)
        self._stats.on_step(prompt_tokens, generation_tokens)
        if finished or now >= self._gauges_due or self._scheduler.counters.num_preemptions != self._preemptions:
            self.on_changed()
            self._gauges_due = now + GAUGE_SECONDS

    def on_ended(self, request: Request, reason: FinishReason) -> None:
        """Record a request that ended between two steps."""
        self._on_finished(request, reason, time.monotonic())
        self.on_changed()

    def on_changed(self) -> None:
        """Refresh the gauges after a change to the cache or the queues."""
        self._on_cache()
        self._stats.on_queues(**self._queues())

    def _on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        self._stats.waiting.leave(request.request_id)
        if self._stats.tracer is not None:
            self._stats.tracer.on_finished(request, reason, now)
        for seq in request.sequences:
            self._last_token.pop(seq.seq_id, None)
        self._stats.on_finished(
            reason,
            e2e_latency=now - request.arrival_time,
            prompt_tokens=len(request.prompt_token_ids),
            generation_tokens=sum(seq.num_output_tokens for seq in request.sequences),
        )
        if request.admitted_time is not None and request.first_token_time is not None:
            self._stats.on_served(
                n=request.params.n,
                max_tokens=request.most_output_tokens,
                longest=max((seq.num_output_tokens for seq in request.sequences), default=0),
                prefill_time=request.first_token_time - request.admitted_time,
                decode_time=now - request.first_token_time,
            )

    def _on_cache(self) -> None:
        kv = self._scheduler.kv
        pool, host = kv.pool, kv.hierarchy.host
        moved = host.swapped
        in_host = (moved.blocks_out, moved.blocks_in, host.num_kept)
        seen = (pool.num_free, pool.num_cached, pool.num_pinned, kv.num_evicted, *in_host)
        if seen == self._seen:
            return  # the usual case: a stream takes a block only every `block_size` tokens
        self._seen, self._usage, size = seen, kv.usage, kv.spec.block_bytes
        self._stats.on_blocks(kv.bytes_by_state(), kv.num_evicted)
        self._stats.on_swapped(
            bytes_out=moved.blocks_out * size,
            bytes_in=moved.blocks_in * size,
            bytes_held=host.num_kept * size,
        )

    def _queues(self) -> _Queues:
        scheduler = self._scheduler
        counters = scheduler.counters
        preemptions = counters.num_preemptions - self._preemptions
        deferred = counters.num_deferred_tokens - self._deferred
        self._preemptions += preemptions
        self._deferred += deferred
        return {
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_swapped": scheduler.num_swapped,
            "kv_usage": self._usage,
            "preemptions": preemptions,
            "deferred_tokens": deferred,
        }
