"""Turns among running streams, in steps with too little time or too few tokens for all of them.

    time of a step   ├─ base ─┤─ tenant a ─┤─ b ─┤─ c ……………………… cut ┤         a and b ask for less than their share
                     └───────────── latency target ─────────────────┘         c's streams take turns

**Time.** Where the streams of several tenants together exceed the latency target, each tenant may use an equal share of
what the target leaves, in proportion to its weight, and what one does not use the others may (max-min fairness). A
tenant that asks for no more than its share has a token for each of its streams in every step. The streams of the others
take turns: next is the tenant that has received least time for its weight, and of its streams the one served least
recently (start-time fair queueing, Goyal et al., SIGCOMM 1996). One of them is served in every step, however long it
takes. So a stream that does not fit beside others has its turn in the next step, because its tenant is still the next.
Streams of one tenant alone are never cut: no other waits for them.

**Tokens.** In a step with fewer tokens than streams, the least recently served streams are served first; all prompts
together take turns like one stream. So with s streams and a limit of t tokens per step, each stream gets a token at
least every ceil((s + 1) / t) steps.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from octavo.least_served import LeastServed
from octavo.request import Sequence, SequenceId
from octavo.scheduler.step_budget import LatencyTarget, StreamTime

SHARE_WITH_PROMPTS = 0.5
"""The part of the time that streams may use in a step whose time is shared, if there are prompts to compute."""


class StreamTurns:
    """Decides which streams have a token in a step.

    Args:
        latency: predicts how long the streams take; if None, only the number of tokens is limited.
    """

    def __init__(self, latency: LatencyTarget | None) -> None:
        self._latency = latency
        self._turn = 0  # rises with every turn; streams keep the one in which they were last served
        self._last_of_prompts = 0
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
        available = time.available * (SHARE_WITH_PROMPTS if have_prompts else 1.0)
        of_tenant: dict[str, list[tuple[Sequence, float]]] = defaultdict(list)
        for seq in streams:
            of_tenant[seq.request.tenant].append((seq, time.of(seq.num_tokens)))
        chosen, left = self._within_share(of_tenant, available)
        chosen |= self._in_turns(of_tenant, left)
        return [seq for seq in streams if seq.seq_id in chosen]

    def within_tokens(
        self, streams: list[Sequence], num_tokens: int, *, have_prompts: bool
    ) -> tuple[list[Sequence], int]:
        """Return the streams that have a token in a step of `num_tokens`, in their given order.

        Returns:
            The chosen streams, and the number of tokens left for prompts.
        """
        self._turn += 1
        by_turn = sorted(streams, key=lambda seq: seq.state.last_served)
        for_prompts = 0
        if have_prompts and (
            len(by_turn) < num_tokens or self._last_of_prompts <= by_turn[num_tokens - 1].state.last_served
        ):
            for_prompts = max(1, num_tokens // 8)
            self._last_of_prompts = self._turn
        chosen = set(by_turn[: num_tokens - for_prompts])
        for seq in chosen:
            seq.state.last_served = self._turn
        return [seq for seq in streams if seq in chosen], for_prompts

    def _within_share(
        self, of_tenant: dict[str, list[tuple[Sequence, float]]], available: float
    ) -> tuple[set[SequenceId], float]:
        """Remove the tenants that ask for no more than their share; returns their streams and the time left."""
        weights = {tenant: own[0][0].request.weight for tenant, own in of_tenant.items()}
        demands = {tenant: sum(seconds for _, seconds in own) for tenant, own in of_tenant.items()}
        weight_left = sum(weights.values())
        chosen: set[SequenceId] = set()
        for tenant in sorted(demands, key=lambda tenant: demands[tenant] / weights[tenant]):
            if demands[tenant] * weight_left > available * weights[tenant]:
                break
            chosen.update(seq.seq_id for seq, _ in of_tenant.pop(tenant))
            available -= demands[tenant]
            weight_left -= weights[tenant]
        return chosen, available

    def _in_turns(self, of_tenant: dict[str, list[tuple[Sequence, float]]], available: float) -> set[SequenceId]:
        """Return the streams that have their turn, of tenants that ask for more than their share."""
        received = self._received
        for tenant in set(received) - of_tenant.keys():
            received.forget(tenant)
        known = list(received)
        for tenant in of_tenant.keys() - set(known):
            received.arrive(tenant, known)
        lines = {
            tenant: iter(sorted(own, key=lambda stream: stream[0].state.last_served))
            for tenant, own in of_tenant.items()
        }
        chosen: set[SequenceId] = set()
        heap = [(received[tenant], tenant) for tenant in of_tenant]
        heapq.heapify(heap)
        while heap:
            _, tenant = heapq.heappop(heap)
            seq, seconds = next(lines[tenant], (None, 0.0))
            if seq is None or (chosen and seconds > available):
                continue
            available -= seconds
            received.charge(tenant, seconds / seq.request.weight)
            chosen.add(seq.seq_id)
            self._turn += 1
            seq.state.last_served = self._turn
            heapq.heappush(heap, (received[tenant], tenant))
        return chosen
