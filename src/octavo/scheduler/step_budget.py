"""What a step may take: tokens and, if running streams have a latency target, time.

`LatencyTarget` says how long the step may take, `StreamTurns` which streams have a token in it, and `StepBudget` is
what its prompts share.

    time of a step   ├─ base ─┤─ tenant a ─┤─ b ─┤─ c ……………………… cut ┤         a and b ask for less than their share
                     └───────────── latency target ─────────────────┘         c's streams take turns

Where the streams of several tenants together exceed the latency target, each tenant may use an equal share of what the
target leaves, in proportion to its weight, and what one does not use the others may (max-min fairness). A tenant that
asks for no more than its share has a token for each of its streams in every step. The streams of the others take turns:
next is the tenant that will have received least time for its weight, and of its streams the one served least recently
(weighted fair queueing: Demers et al., SIGCOMM 1989). One of them is served in every step, however long it takes.
Streams of one tenant alone are never cut: no other waits for them.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import defaultdict
from functools import partial
from typing import NamedTuple

from octavo.least_served import LeastServed
from octavo.request import Sequence, SequenceId
from octavo.scheduler.step_time import StepLoad, StepTimeModel

SHARE_OF_PROMPTS = 0.125
"""The time that prompts may use however little the target leaves them, as a part of the streams' time."""

SHARE_WITH_PROMPTS = 0.5
"""The part of the time that streams may use in a step whose time is shared, if there are prompts to compute: with the
share above alone, a prompt of 1,000 tokens takes 213 steps instead of 35."""

FIRST_CHUNK = 16
"""The most prompt tokens in the first chunk that streams wait for; each may be twice as long as the longest so far."""


class StreamTime(NamedTuple):
    """How long streams take in a step, in seconds, as far as it depends on which of them it computes.

    Attributes:
        wanted: time of all of them.
        available: time that they may take.
        per_stream: time of each, whatever its length.
        per_token: time of each token of its context.
    """

    wanted: float
    available: float
    per_stream: float
    per_token: float

    def of(self, num_tokens: int) -> float:
        """Return the time of a stream of this length."""
        return self.per_stream + self.per_token * num_tokens


class LatencyTarget:
    """Sizes chunks of prompts so that the inter-token latency of running streams stays below `seconds`.

    Streams of several tenants may take the target, and chunks what the streams leave of it, by the model's prediction
    and its usual error on top. The model is not extrapolated far: a chunk is at most twice as long as the longest one
    measured together with streams.

    Prompts do not starve. Where streams leave them less of `seconds`, they may use `SHARE_OF_PROMPTS` of the streams'
    time all the same, and at least a token.

    Args:
        seconds: target for the time between two tokens of a stream.
        model: how long steps take; by default, a new one.
    """

    def __init__(self, seconds: float, model: StepTimeModel | None = None) -> None:
        self.seconds = seconds
        self.model = StepTimeModel() if model is None else model
        self.longest_chunk = FIRST_CHUNK
        self._fastest = math.inf  # seconds of the shortest step

    def observe(self, load: StepLoad, seconds: float, *, num_chunk_tokens: int = 0) -> None:
        """Learn from a step that took `seconds`, from the end of the previous step to its own.

        Args:
            num_chunk_tokens: prompt tokens that it computed together with streams.
        """
        self.longest_chunk = max(self.longest_chunk, num_chunk_tokens)
        self._fastest = min(self._fastest, seconds) if seconds > 0 else self._fastest
        self.model.observe(load, seconds)

    @property
    def predicted_limit(self) -> float:
        """The prediction of a step that keeps the target although it may be wrong by its usual error."""
        return self.seconds / (1 + self.model.usual_error)

    def stream_time(self, num_streams: int, context: int) -> StreamTime:
        """Return how long so many streams take, whose contexts hold `context` tokens together.

        An empty step takes a part of the target, which is not theirs. Where it takes more than half, as with a large
        model, they may take as long again: else steps would be spent on reading weights for few streams each.
        """
        predict = self.model.predict
        # The fit may take what streams always need for the time of an empty step.
        base, of_rows = min(predict(StepLoad()), self._fastest), predict(StepLoad(num_streams, 0, 0.0, num_streams))
        of_all = predict(StepLoad(num_streams, context, 0.0, num_streams))
        available = max(self.predicted_limit - base, base)
        return StreamTime(of_all - base, available, (of_rows - base) / num_streams, (of_all - of_rows) / context)


class StreamTurns:
    """Decides which streams have a token in a step.

    Args:
        latency: predicts how long the streams take; if None, no step is too short for them.
    """

    def __init__(self, latency: LatencyTarget | None) -> None:
        self._latency = latency
        self._turn = 0  # rises with every turn; streams keep the one in which they were last served
        self._received = LeastServed()  # time per weight, of tenants whose streams take turns

    def time_of(self, streams: list[Sequence]) -> StreamTime | None:
        """Return the time of these streams if they belong to several tenants and exceed the target; else None."""
        if self._latency is None or len(streams) < 2:
            return None
        tenant = streams[0].request.tenant
        if all(seq.request.tenant == tenant for seq in streams):
            return None
        time = self._latency.stream_time(len(streams), sum([seq.num_tokens for seq in streams]))
        return time if time.wanted > time.available else None

    def within_time(self, streams: list[Sequence], *, have_prompts: bool) -> list[Sequence]:
        """Return the streams that have a token in a step that keeps the latency target, in their given order."""
        time = self.time_of(streams)
        if time is None:
            self._received = LeastServed()
            return streams
        of_tenant: dict[str, list[tuple[Sequence, float]]] = defaultdict(list)
        for seq in streams:
            of_tenant[seq.request.tenant].append((seq, time.of(seq.num_tokens) / seq.request.weight))
        chosen = self._in_turns(of_tenant, time.available * (SHARE_WITH_PROMPTS if have_prompts else 1.0))
        return [seq for seq in streams if seq.seq_id in chosen]

    def _in_turns(self, of_tenant: dict[str, list[tuple[Sequence, float]]], available: float) -> set[SequenceId]:
        """Return the streams that have their turn.

        Args:
            of_tenant: each tenant's streams, with their seconds per weight.
            available: seconds that they may take together.
        """
        received = self._received
        for tenant in set(received) - of_tenant.keys():
            received.forget(tenant)
        known = list(received)
        for tenant in of_tenant.keys() - set(known):
            received.arrive(tenant, known)
        lines = {tenant: sorted(own, key=_last_served, reverse=True) for tenant, own in of_tenant.items()}
        heap = [(received[tenant] + line[-1][1], tenant) for tenant, line in lines.items()]
        heapq.heapify(heap)
        chosen: set[SequenceId] = set()
        over = None
        while heap:
            _, tenant = heapq.heappop(heap)
            seq, cost = lines[tenant][-1]
            seconds = cost * seq.request.weight
            if seconds > available:
                if over is not None or len(lines[tenant]) < len(of_tenant[tenant]):
                    continue
                over = tenant  # with its first stream; tenants that ask for no more than their share come before it
            lines[tenant].pop()
            available -= seconds
            received.charge(tenant, cost)
            chosen.add(seq.seq_id)
            self._turn += 1
            seq.state.last_served = self._turn
            if line := lines[tenant]:
                heapq.heappush(heap, (received[tenant] + line[-1][1], tenant))
        cut = [tenant for tenant, line in lines.items() if line or tenant == over]
        for tenant in lines.keys() - set(cut):
            received.forget(tenant)  # it had all that it asked for, and gets neither credit nor debt for that
            received.arrive(tenant, cut)
        return chosen


def _last_served(stream: tuple[Sequence, float]) -> int:
    return stream[0].state.last_served


MOST_NEWCOMERS = 8
"""The maximum number of sequences, including siblings, admitted in a step that streams wait for. Each takes the engine
70 µs, or 200 µs with a large model, and each sibling also a copy of the prompt's last block, which takes 250 µs in
fresh memory."""

MOST_SCORED_TOKENS = 32
"""The maximum number of prompt tokens whose log-probabilities are computed in such a step: each takes 0.2 ms with a
vocabulary of 49,152 tokens."""


class StepBudget:
    """The budget that all prompts of a step share, first come, first served.

    Args:
        num_tokens: tokens that decodes have left over.
        target: the latency target; if None, only the number of tokens is limited.
        num_streams: number of streams that wait for the step.
        context: tokens in their contexts together, which only a target needs.

    Attributes:
        num_newcomers: sequences that may still be admitted.
        num_taken: prompt tokens in the step so far.
    """

    def __init__(
        self, num_tokens: int, target: LatencyTarget | None = None, num_streams: int = 0, context: int = 0
    ) -> None:
        with_streams = num_streams > 0
        self.num_tokens = num_tokens
        self.num_taken = 0
        self.num_newcomers = MOST_NEWCOMERS if with_streams else num_tokens
        self._num_scored = MOST_SCORED_TOKENS if with_streams else num_tokens
        self._model = target.model if target is not None and with_streams else None
        if target is not None and self._model is not None:
            self._load = StepLoad(num_streams, context, 0.0, num_streams)
            least = (1 + SHARE_OF_PROMPTS) * self._model.predict(self._load)
            self._seconds, self._most = max(target.predicted_limit, least), 2 * target.longest_chunk

    def chunk(self, start: int, missing: int, *, scored: bool = False, share: int = 1) -> int:
        """Return the longest chunk of a prompt that fits; 0 if the step is full. One token always fits.

        Args:
            start: computed tokens of the prompt.
            missing: tokens of the prompt that remain to be computed.
            scored: whether log-probabilities of its tokens are wanted.
            share: divisor of what fits, of which at least a token is left.
        """
        fits = min(missing, self.num_tokens, self._num_scored if scored else missing)
        if self._model is not None and fits > 0:
            # The predicted time rises with the tokens.
            sizes = range(1, min(fits, self._most - self.num_taken) + 1)
            within = bisect.bisect_right(sizes, self._seconds, key=partial(self._seconds_with, start))
            fits = max(within, int(not self.num_taken))
        return max(min(1, fits), fits // share)

    def take(self, start: int, num_tokens: int, *, scored: bool = False) -> None:
        """Add a chunk to the step."""
        self.num_tokens -= num_tokens
        self.num_taken += num_tokens
        if scored:
            self._num_scored -= num_tokens
        if self._model is not None:
            self._load = self._load.with_chunk(start, num_tokens)

    def _seconds_with(self, start: int, num_tokens: int) -> float:
        assert self._model is not None
        return self._model.predict(self._load.with_chunk(start, num_tokens))
