"""Fairness between tenants: how much service each has received, and whose turn it is.

Service is what a request costs: a token of its prompt that was not cached counts 1, a token that it draws 2, as in the
paper below. It is divided by the tenant's weight, so that a tenant of weight 3 has its turn when it has had three times
as much as one of weight 1. What is computed again after a preemption is not charged twice.

`VirtualTokenCounter` (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): the tenant with the least
service is next. A tenant that comes back after a pause starts where the least served of those that wait stands: it has
no credit for the time in which it asked for nothing.

`DeficitRound` (Cao et al., Locality-aware Fair Scheduling in LLM Serving, arXiv 2501.14312): each tenant may spend a
quantum of service per round, and among those that have some of it left the longest cached prefix is next. A larger
quantum keeps more requests over one prefix together, and lets tenants drift apart by as much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from octavo.request import Request, RequestId, Sequence
from octavo.scheduler.cached_prefixes import CachedPrefixes
from octavo.scheduler.preemption import VictimPolicy

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0

# What a tenant has received counts half as much so many seconds later, where the question is who had most of late.
RECENT_HALF_LIFE = 30.0

# Tenants that wait for nothing are remembered up to so many.
_MOST_IDLE = 4096


class VirtualTokenCounter:
    """The least served first.

    Attributes:
        version: changes whenever somebody else may be next.
    """

    def __init__(self) -> None:
        self.version = 0
        self._to_compute: dict[RequestId, int] = {}  # tokens of prompts that are charged, and not yet computed
        self._received: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._recent: dict[str, tuple[float, float]] = {}  # service per weight, and the time to which it has decayed
        self._now = 0.0  # the latest arrival among those admitted
        self._level = 0.0  # of the tenant that had the last turn: where one begins that comes when nobody waits

    def received(self, tenant: str) -> float:
        """Service per weight; of a tenant that has paused, no less than what those that waited have had."""
        return self._received.get(tenant, 0.0)

    def recent(self, tenant: str) -> float:
        """Service per weight that was computed of late: what is `RECENT_HALF_LIFE` seconds old counts half."""
        amount, at = self._recent.get(tenant, (0.0, self._now))
        return amount * math.exp2((at - self._now) / RECENT_HALF_LIFE)

    def arrive(self, tenant: str, weight: float, waiting: Iterable[str]) -> None:
        """A tenant that had nothing waiting has a request now, beside the tenants that wait already."""
        self.version += 1
        self._weights[tenant] = weight
        others = [self._received.get(other, 0.0) for other in waiting if other != tenant]
        level = min(others) if others else self._level
        self._received[tenant] = max(self._received.get(tenant, 0.0), level)
        if len(self._received) > _MOST_IDLE:
            self._forget_idle({tenant, *waiting}, level)

    def choose(self, heads: Mapping[str, Sequence]) -> str:
        """Whose turn it is, of tenants with the first sequence of their lines."""
        return self.ranked(heads)[0]

    def ranked(self, heads: Mapping[str, Sequence]) -> list[str]:
        """Every tenant of these, in the order of turns."""
        return sorted(heads, key=lambda tenant: (self._received.get(tenant, 0.0), heads[tenant].order))

    def admitted(self, seq: Sequence) -> None:
        """Charge a prompt at its first admission: what of it is not cached, at once."""
        tenant = seq.request.tenant
        self._now = max(self._now, seq.request.arrival_time)
        self._level = max(self._level, self._received.get(tenant, 0.0))
        if not seq.index and not seq.num_preemptions:
            uncached = seq.num_prompt_tokens - seq.num_computed
            self._to_compute[seq.request.request_id] = uncached
            self.charge(tenant, PROMPT_TOKEN * uncached)

    def computed(self, seq: Sequence) -> None:
        """A sequence has come to its `num_computed`, perhaps not for the first time."""
        request_id = seq.request.request_id
        if (before := self._to_compute.get(request_id)) is not None:
            left = min(before, seq.num_prompt_tokens - seq.num_computed)
            self._note(seq.request.tenant, PROMPT_TOKEN * (before - max(0, left)))
            if left > 0:
                self._to_compute[request_id] = left
            else:
                del self._to_compute[request_id]

    def ended(self, request: Request) -> None:
        """A request has ended: what was charged of its prompt, and never computed, is given back."""
        left = self._to_compute.pop(request.request_id, 0)
        if left and request.tenant in self._received:
            self.charge(request.tenant, -PROMPT_TOKEN * left)

    def drawn(self, sequences: Iterable[Sequence]) -> None:
        """Charge a token for each of these sequences."""
        for tenant, count in Counter([seq.request.tenant for seq in sequences]).items():
            self.charge(tenant, OUTPUT_TOKEN * count)
            self._note(tenant, OUTPUT_TOKEN * count)

    def charge(self, tenant: str, service: float) -> None:
        """A tenant has received so much."""
        self.version += 1
        self._received[tenant] = self._received.get(tenant, 0.0) + service / self._weights.get(tenant, 1.0)

    def _note(self, tenant: str, service: float) -> None:
        """Count service in `recent` once it was computed. `charge` counts a whole prompt at its admission."""
        self._recent[tenant] = (self.recent(tenant) + service / self._weights.get(tenant, 1.0), self._now)

    def may_pass(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a waiting sequence may be admitted before the head of the line, which does not fit yet.

        Its tenant may have received as much more than the head's as computing the head twice is worth. Beyond that it
        waits too, so that what becomes free is left to the head.
        """
        return self._lead(seq, head) <= self._allowance(head)

    def is_far_ahead(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a running sequence's tenant is ahead of the head's by four times what preempting it may cost."""
        lost = PROMPT_TOKEN * seq.num_computed / seq.request.weight
        return self._lead(seq, head) > 2 * self._allowance(head) + 4 * lost

    def _lead(self, seq: Sequence, head: Sequence) -> float:
        return self.received(seq.request.tenant) - self.received(head.request.tenant)

    def _allowance(self, head: Sequence) -> float:
        return 2 * PROMPT_TOKEN * head.num_tokens / head.request.weight

    def in_order_of_service(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences, those of the least served tenant first."""
        received = self._received
        return sorted(sequences, key=lambda seq: (received.get(seq.request.tenant, 0.0), *seq.order))

    def _forget_idle(self, waiting: set[str], level: float) -> None:
        """Those that have had no more than the level would be lifted to it when they come back."""
        for tenant in [t for t, had in self._received.items() if had <= level and t not in waiting]:
            del self._received[tenant], self._weights[tenant]
            self._recent.pop(tenant, None)


class DeficitRound(VirtualTokenCounter):
    """Longest cached prefix first among the tenants that have some of this round's quantum left.

    Args:
        prefixes: how much of a sequence's beginning is cached now.
        quantum: service per weight and round.
    """

    def __init__(self, prefixes: CachedPrefixes, quantum: float = 1024.0) -> None:
        super().__init__()
        self._prefixes = prefixes
        self.quantum = quantum
        self._left: dict[str, float] = {}  # of this round, per weight; below 0 where more was spent

    def arrive(self, tenant: str, weight: float, waiting: Iterable[str]) -> None:
        super().arrive(tenant, weight, waiting)
        # What was left before a pause is void; a debt is not.
        self._left[tenant] = min(0.0, self._left.get(tenant, 0.0))

    def choose(self, heads: Mapping[str, Sequence]) -> str:
        if all(self._left.get(tenant, 0.0) <= 0 for tenant in heads):
            self._begin_round(heads)
        return self.ranked(heads)[0]

    def ranked(self, heads: Mapping[str, Sequence]) -> list[str]:
        def key(tenant: str) -> tuple[bool, int, tuple[int, float, int]]:
            seq = heads[tenant]
            return (self._left.get(tenant, 0.0) <= 0, -self._prefixes.num_tokens(seq), seq.order)

        return sorted(heads, key=key)

    def is_far_ahead(self, seq: Sequence, head: Sequence) -> bool:
        """Never: who is next, cached prefixes decide, and a sequence that was just preempted has the longest."""
        return False

    def _allowance(self, head: Sequence) -> float:
        return super()._allowance(head) + self.quantum

    def charge(self, tenant: str, service: float) -> None:
        super().charge(tenant, service)
        self._left[tenant] = self._left.get(tenant, 0.0) - service / self._weights.get(tenant, 1.0)

    def _begin_round(self, heads: Mapping[str, Sequence]) -> None:
        """As many rounds at once as it takes until somebody who waits has something to spend."""
        least_debt = min(-self._left.get(tenant, 0.0) for tenant in heads)
        added = self.quantum * (least_debt // self.quantum + 1)
        for tenant in heads:
            self._left[tenant] = self._left.get(tenant, 0.0) + added

    def _forget_idle(self, waiting: set[str], level: float) -> None:
        super()._forget_idle(waiting, level)
        self._left = {tenant: left for tenant, left in self._left.items() if tenant in self._received}


class MostServed:
    """A victim policy: the tenant that has received most yields, and of its sequences the one that `within` chooses."""

    def __init__(self, counter: VirtualTokenCounter, within: VictimPolicy) -> None:
        self._counter = counter
        self.within = within

    def choose(self, running: Seq[Sequence]) -> Sequence:
        received = self._counter.received
        most = max({seq.request.tenant for seq in running}, key=lambda tenant: (received(tenant), tenant))
        return self.within.choose([seq for seq in running if seq.request.tenant == most])
