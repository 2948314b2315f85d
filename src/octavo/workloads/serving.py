"""An open-loop client: requests are sent at their scheduled times, whether or not earlier ones have finished.

    scheduled ── late ──> started ── queued ──> sent ── TTFT ──> first token … last token
    (due)       (client    (task      (--max-             (ITL between chunks,
                 busy)      runs)      concurrency)        TPOT over the answer)

A client that starts its clock when it actually sends hides the delay that it caused itself. So TTFT and end-to-end
latency are reported twice, from `sent` (the server's part) and from `scheduled` (what a user would have experienced),
and the client's lateness is reported too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from octavo.workloads.http import EventLines, PostUrl, ProtocolError, post_json
from octavo.workloads.report import summarise
from octavo.workloads.workload import BenchRequest


@dataclass(frozen=True, slots=True)
class Target:
    """The server to measure.

    Attributes:
        base_url: URL of the server, without '/v1'.
        return_token_ids: whether to request each chunk's token ids. Turn it off for a server that refuses unknown
            fields; tokens are then counted by its `usage`.
        timeout_s: time limit for one request, from sending it to its last token.
    """

    base_url: str
    model: str
    api_key: str | None = None
    return_token_ids: bool = True
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """Return the body for a greedy streaming completion of exactly `max_tokens` tokens."""
        body = {
            "model": self.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "repetition_penalty": 1.0,  # whatever the model recommends
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {**body, "return_token_ids": True} if self.return_token_ids else body


@dataclass(slots=True)
class RequestRecord:
    """The result of one request; times are in seconds since the start of the run.

    Attributes:
        chunk_times: arrival times of the chunks that hold tokens.
        error: kind of error, such as 'http 503' or 'timeout'; None if the answer was complete.
    """

    scheduled_s: float
    started_s: float = 0.0
    sent_s: float = 0.0
    finished_s: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class _Answer:
    """Reads one streamed completion as it arrives, and counts its tokens by their ids or, without ids, by usage.

    Chunks are not counted, because a chunk may hold several tokens or none.
    """

    def __init__(self, zero: float) -> None:
        self.chunk_times: list[float] = []
        self.num_token_ids = 0
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._zero = zero
        self._events = EventLines()

    def on_body(self, piece: bytes, now: float) -> None:
        for payload in self._events.feed(piece):
            if payload != b"[DONE]":
                self._on_event(json.loads(payload), now - self._zero)

    def _on_event(self, event: dict[str, Any], at: float) -> None:
        if event.get("error") is not None:
            self.error = "error event"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            token_ids = choice.get("token_ids") or ()
            self.num_token_ids += len(token_ids)
            if token_ids or choice.get("text"):
                self.chunk_times.append(at)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def fill(self, record: RequestRecord) -> None:
        """Record what arrived; a truncated answer, or one whose tokens cannot be counted, is an error."""
        usage = self.usage or {}
        record.chunk_times = self.chunk_times
        record.output_tokens = self.num_token_ids or int(usage.get("completion_tokens") or 0)
        record.prompt_tokens = int(usage.get("prompt_tokens") or record.prompt_tokens)
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if record.error is None:
            record.error = self.error
        if record.error is None and self.finish_reason is None:
            record.error = "stream cut off"
        if record.error is None and not (self.chunk_times and record.output_tokens):
            record.error = "no token count" if self.chunk_times else "no token"


async def run_load(
    target: Target, requests: Sequence[BenchRequest], arrivals: Sequence[float], max_concurrency: int | None = None
) -> list[RequestRecord]:
    """Send each request at its time (ascending, seconds from now), await all, and return records in the same order.

    Failures of requests are not raised, but recorded. With `max_concurrency`, a request that is due waits until fewer
    are in flight.
    """
    endpoint = PostUrl.parse(target.base_url.rstrip("/") + "/v1/completions")
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    zero = time.perf_counter()
    records = [
        RequestRecord(due, prompt_tokens=len(r.prompt_token_ids)) for due, r in zip(arrivals, requests, strict=True)
    ]
    async with asyncio.TaskGroup() as group:
        for record, request in zip(records, requests, strict=True):
            if (wait := record.scheduled_s - (time.perf_counter() - zero)) > 0:
                await asyncio.sleep(wait)
            group.create_task(_send(target, endpoint, request, record, zero, slots))
    return records


async def _send(
    target: Target,
    endpoint: PostUrl,
    request: BenchRequest,
    record: RequestRecord,
    zero: float,
    slots: asyncio.Semaphore | None,
) -> None:
    record.started_s = time.perf_counter() - zero
    async with AsyncExitStack() as held:
        if slots is not None:
            await held.enter_async_context(slots)
        answer = _Answer(zero)
        record.sent_s = time.perf_counter() - zero
        try:
            async with asyncio.timeout(target.timeout_s):
                status, _ = await post_json(endpoint, target.headers, target.body(request), answer.on_body)
            record.error = None if status == 200 else f"http {status}"
        except TimeoutError:
            record.error = "timeout"
        except ProtocolError:
            record.error = "stream cut off" if answer.chunk_times else "no valid answer"
        except OSError as error:
            record.error = "cannot connect" if not answer.chunk_times else type(error).__name__
        except (ValueError, AttributeError, TypeError):
            record.error = "unreadable event"
        record.finished_s = time.perf_counter() - zero
        answer.fill(record)


def summary(records: Sequence[RequestRecord]) -> Mapping[str, Any]:
    """Return throughput over the whole run, latency percentiles of the completed requests, and errors by kind."""
    done = [record for record in records if record.error is None]
    duration = max((record.finished_s for record in records), default=0.0)
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)

    def per_second(count: int) -> float:
        return round(count / duration, 2) if duration > 0 else 0.0

    result: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration_s": round(duration, 3),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(r.cached_tokens for r in done),
        "output_tokens": output_tokens,
        "requests_s": per_second(len(done)),
        "prompt_tok_s": per_second(prompt_tokens),
        "output_tok_s": per_second(output_tokens),
        "total_tok_s": per_second(prompt_tokens + output_tokens),
        "peak_concurrency": peak_concurrency(records),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
    }
    return result | _latencies(done, records)


def _latencies(done: Sequence[RequestRecord], records: Sequence[RequestRecord]) -> dict[str, Any]:
    gaps = [b - a for r in done for a, b in itertools.pairwise(r.chunk_times)]
    decoding = [r for r in done if r.output_tokens > 1]
    seconds = {
        "ttft_ms": [r.chunk_times[0] - r.sent_s for r in done],
        "ttft_from_schedule_ms": [r.chunk_times[0] - r.scheduled_s for r in done],
        "itl_ms": gaps,
        "tpot_ms": [(r.chunk_times[-1] - r.chunk_times[0]) / (r.output_tokens - 1) for r in decoding],
        "e2e_ms": [r.chunk_times[-1] - r.sent_s for r in done],
        "e2e_from_schedule_ms": [r.chunk_times[-1] - r.scheduled_s for r in done],
        "client_late_ms": [r.started_s - r.scheduled_s for r in records],
        "client_queue_ms": [r.sent_s - r.started_s for r in records],
    }
    return {name: summarise(values, 1000.0) for name, values in seconds.items()}


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of requests in flight at once."""
    # An end sorts before a start at the same time, because the two did not overlap.
    edges = sorted([(r.finished_s, -1) for r in records] + [(r.sent_s, 1) for r in records])
    running = peak = 0
    for _, step in edges:
        running += step
        peak = max(peak, running)
    return peak
