"""Request latency outside engine steps, from a recorded server and the times that its client measured.

    sent ── intake ──> the engine could plan it │ first step … step that drew │ ── reply ──> its client has the token

Both are shortest for a single request. Under load both take longer: on two cores the event loop competes with the next
step's kernels, so that a request may miss the step that has just begun, and tokens arrive later.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep


@dataclass(frozen=True, slots=True)
class Sent:
    """When a request was sent and had its first token, by `time.perf_counter`.

    Attributes:
        kind: of its round: a "prompt" had the server to itself, "mixed" ones came at random times beside others.
    """

    kind: str
    sent: float
    first_token: float


@dataclass(frozen=True, slots=True)
class _Way:
    """A request, and its way through the recorded steps.

    Attributes:
        first, drew: numbers of its first step and of the one that drew its first token.
    """

    request: Sent
    first: int
    drew: int


def overheads(
    steps: Sequence[RecordedStep],
    requests: Sequence[Sent],
    recorded: Mapping[str, Any],
    left_out: Sequence[tuple[float, float]] = (),
) -> tuple[float, float]:
    """Return two times in seconds: from sending until a step can have the request, and from the end of the step that
    drew the first token to its arrival.

    Both are those of the requests beside others or, if there are none, of those that were alone.

    Args:
        steps: those since the first request was sent.
        requests: all that were sent since, one sequence each.
        recorded: the facts of the recording, with `max_num_seqs` and `max_num_batched_tokens`.
        left_out: spans of time whose requests are not counted.

    Raises:
        ConfigError: no "prompt" is among them.
    """
    ways = [
        way
        for way in _ways(steps, requests)
        if not any(began <= way.request.first_token and way.request.sent <= ended for began, ended in left_out)
    ]
    alone = [way for way in ways if way.request.kind == "prompt"]
    if not alone:
        raise ConfigError("the time was too short to send a prompt alone: give more --seconds")
    beside = [way for way in ways if way.request.kind == "mixed"]
    spans = [_intake_span(steps, way, recorded) for way in beside]
    if all(span is None for span in spans):
        spans = [_intake_span(steps, way, recorded) for way in alone]
    replies = [way.request.first_token - steps[way.drew + 1].at for way in beside or alone]
    reply = statistics.fmean(replies) if beside else statistics.median(replies)
    return max(0.0, _best_fit([span for span in spans if span is not None])), max(0.0, reply)


def _ways(steps: Sequence[RecordedStep], requests: Sequence[Sent]) -> list[_Way]:
    """Match requests with sequences, whose numbers rise in the order in which they come to the engine.

    A step ends when the next one begins, so a request counts only if the next step has it too.
    """
    first: dict[int, int] = {}
    drew: dict[int, int] = {}
    for number, step in enumerate(steps):
        for seq_id, draws in zip(step.seq_ids, step.draws, strict=True):
            first.setdefault(seq_id, number)
            if draws:
                drew.setdefault(seq_id, number)
    return [
        _Way(request, first[seq_id], last)
        for seq_id, request in zip(sorted(first), sorted(requests, key=lambda each: each.sent), strict=False)
        if (last := drew.get(seq_id)) is not None and last + 1 < len(steps) and seq_id in steps[last + 1].seq_ids
    ]


def _intake_span(steps: Sequence[RecordedStep], way: _Way, recorded: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the shortest and the longest time that a request may have taken to come in, by the steps' beginnings.

    A step that began while others ran tells only that the request came in after the one before. None if there was no
    place for it in that step.
    """
    latest = steps[way.first].at - way.request.sent
    if way.first == 0:
        return latest, latest
    before = steps[way.first - 1]
    if set(before.seq_ids).isdisjoint(steps[way.first].seq_ids):
        return latest, latest  # nothing ran before: its coming in began the step
    if len(before.seq_ids) >= recorded["max_num_seqs"] or before.num_tokens >= recorded["max_num_batched_tokens"]:
        return None
    return before.at - way.request.sent, latest


def _best_fit(spans: Sequence[tuple[float, float]]) -> float:
    """Return the time whose distances to the spans that do not hold it have the least sum: the median of their ends.

    A mean of waiting times is no substitute: who just misses a step waits for the whole of it, and in a simulation
    requests miss steps too.
    """
    return statistics.median(end for span in spans for end in span)
