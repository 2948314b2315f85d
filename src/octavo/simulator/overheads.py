"""What a request waits for beside its steps, from a recording of a server and the times that its client saw.

    sent ── intake ──> the engine could plan it │ first step … step that drew │ ── reply ──> its client has the token

A request that is alone shows the least of both. Beside others both take longer: on two cores the event loop runs beside
the next step's kernels, so that a request may miss the step that began just then, and tokens arrive later.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

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
    max_num_seqs: int,
    left_out: Sequence[tuple[float, float]] = (),
) -> tuple[float, float]:
    """Return two times in seconds: from sending until a step can have the request, and from the end of the step that
    drew the first token to its arrival.

    Both are means over the requests beside others or, if there are none, medians over those that were alone.

    Args:
        steps: those since the first request was sent.
        requests: all that were sent since, one sequence each.
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
    intake = statistics.median(steps[way.first].at - way.request.sent for way in alone)
    beside = [way for way in ways if way.request.kind == "mixed"]
    late = [seconds for way in beside if (seconds := _late(steps, way, intake, max_num_seqs)) is not None]
    replies = [way.request.first_token - steps[way.drew + 1].at for way in beside or alone]
    reply = statistics.fmean(replies) if beside else statistics.median(replies)
    return max(0.0, intake + (statistics.fmean(late) if late else 0.0)), max(0.0, reply)


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


def _late(steps: Sequence[RecordedStep], way: _Way, intake: float, max_num_seqs: int) -> float | None:
    """Return how many seconds later a request's first step began than if it had come in within `intake` seconds.

    None if it may have waited for a place.
    """
    in_time, began = way.request.sent + intake, steps[way.first].at
    if way.first == 0 or set(steps[way.first - 1].seq_ids).isdisjoint(steps[way.first].seq_ids):
        return began - in_time  # nothing ran before: its coming in began the step
    could = bisect_left(steps, in_time, key=lambda step: step.at)
    if could >= len(steps) or len(steps[could].seq_ids) >= max_num_seqs:
        return None
    return began - steps[could].at
