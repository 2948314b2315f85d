"""Turns among running streams, in steps with too little time for all of them.

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
        lines = {
            tenant: sorted(own, key=lambda each: each[0].state.last_served, reverse=True)
            for tenant, own in of_tenant.items()
        }
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
            received.forget(tenant)  # all its demand was met, so it starts again without credit or debt
        return chosen
