"""Fairness between tenants: how much service each has received, and whose turn it is.

Service is the cost of a request: 1 for each prompt token that was not cached, 2 for each token drawn, as in the paper
below. It is divided by the tenant's weight, so that a tenant of weight 3 receives three times as much service as one of
weight 1. Recomputation after a preemption is not charged.

`VirtualTokenCounter` (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): the tenant with the least
service is next. A tenant that returns after a pause starts at the level of the least served waiting tenant: it gets no
credit for the time in which it requested nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from octavo.request import Request, Sequence

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0

# Seconds after which received service counts half, when tenants are compared by recent service.
RECENT_HALF_LIFE = 30.0

# Idle tenants are forgotten once more tenants than this are remembered.
_MOST_IDLE = 4096


class VirtualTokenCounter:
    """Virtual token counter: the least served tenant is next.

    Attributes:
        version: changes whenever another tenant may have become the next.
    """

    def __init__(self) -> None:
        self.version = 0
        self._received: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._recent: dict[str, tuple[float, float]] = {}  # service per weight, and the time of its last decay
        self._now = 0.0  # the latest arrival among those admitted
        self._level = 0.0  # of the tenant served last: where a tenant starts if no other waits

    def received(self, tenant: str) -> float:
        """Return a tenant's service per weight; after a pause, at least that of the least served waiting tenant."""
        return self._received.get(tenant, 0.0)

    def recent(self, tenant: str) -> float:
        """Return a tenant's recently computed service per weight, decayed by half every `RECENT_HALF_LIFE` seconds."""
        amount, at = self._recent.get(tenant, (0.0, self._now))
        return amount * math.exp2((at - self._now) / RECENT_HALF_LIFE)

    def arrive(self, tenant: str, weight: float, waiting: Iterable[str]) -> None:
        """Note the first waiting request of a tenant; `waiting` are the tenants that wait already."""
        self.version += 1
        self._weights[tenant] = weight
        others = [self._received.get(other, 0.0) for other in waiting if other != tenant]
        level = min(others) if others else self._level
        self._received[tenant] = max(self._received.get(tenant, 0.0), level)
        if len(self._received) > _MOST_IDLE:
            self._forget_idle({tenant, *waiting}, level)

    def ranked(self, heads: Mapping[str, Sequence]) -> list[str]:
        """Return the tenants in the order of their turns, given the first sequence of each tenant's line.

        If a tenant's next sequence was preempted, the cost of computing it again is subtracted from its service, so
        that it returns while more of its blocks are still cached. Twice the cost would grow as fast as the service of
        the sequence, which would then stay ahead of others until its end.
        """

        def key(tenant: str) -> tuple[float, tuple[int, float, int]]:
            seq, received = heads[tenant], self._received.get(tenant, 0.0)
            if seq.num_preemptions:
                received -= PROMPT_TOKEN * seq.num_tokens / seq.request.weight
            return (received, seq.order)

        return sorted(heads, key=key)

    def admitted(self, seq: Sequence) -> None:
        """Charge the uncached tokens of a prompt, all at once, at its first admission."""
        tenant = seq.request.tenant
        self._now = max(self._now, seq.request.arrival_time)
        self._level = max(self._level, self._received.get(tenant, 0.0))
        if not seq.index and not seq.num_preemptions:
            uncached = seq.num_prompt_tokens - seq.num_computed
            seq.request.uncomputed_charge = uncached
            self.charge(tenant, PROMPT_TOKEN * uncached)

    def computed(self, seq: Sequence) -> None:
        """Note that a sequence has reached its `num_computed`, perhaps for the second time."""
        request = seq.request
        if before := request.uncomputed_charge:
            left = max(0, min(before, seq.num_prompt_tokens - seq.num_computed))
            request.uncomputed_charge = left
            self._note(request.tenant, PROMPT_TOKEN * (before - left))

    def ended(self, request: Request) -> None:
        """Refund the prompt tokens that were charged but never computed, when a request has ended."""
        left, request.uncomputed_charge = request.uncomputed_charge, 0
        if left and request.tenant in self._received:
            self.charge(request.tenant, -PROMPT_TOKEN * left)

    def drawn(self, sequences: Iterable[Sequence]) -> None:
        """Charge one drawn token for each sequence."""
        for tenant, count in Counter([seq.request.tenant for seq in sequences]).items():
            self.charge(tenant, OUTPUT_TOKEN * count)
            self._note(tenant, OUTPUT_TOKEN * count)

    def charge(self, tenant: str, service: float) -> None:
        """Charge a tenant for service."""
        self.version += 1
        self._received[tenant] = self._received.get(tenant, 0.0) + service / self._weights.get(tenant, 1.0)

    def _note(self, tenant: str, service: float) -> None:
        """Count computed service in `recent`, unlike `charge`, which counts a whole prompt at its admission."""
        self._recent[tenant] = (self.recent(tenant) + service / self._weights.get(tenant, 1.0), self._now)

    def may_pass(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a waiting sequence may be admitted before the head of the line, which does not fit yet.

        Its tenant may be ahead of the head's by the cost of computing the head twice. Beyond that it waits too, so that
        freed blocks are left to the head.
        """
        return self._lead(seq, head) <= self._allowance(head)

    def is_far_ahead(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a running sequence's tenant is ahead of the head's by four times the cost of preempting it."""
        lost = PROMPT_TOKEN * seq.num_computed / seq.request.weight
        return self._lead(seq, head) > 2 * self._allowance(head) + 4 * lost

    def _lead(self, seq: Sequence, head: Sequence) -> float:
        return self.received(seq.request.tenant) - self.received(head.request.tenant)

    def _allowance(self, head: Sequence) -> float:
        return 2 * PROMPT_TOKEN * head.num_tokens / head.request.weight

    def in_order_of_service(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences with those of the least served tenant first."""
        received = self._received
        return sorted(sequences, key=lambda seq: (received.get(seq.request.tenant, 0.0), *seq.order))

    def most_served(self, sequences: Seq[Sequence]) -> Sequence:
        """Return the sequence to preempt: of the most served tenant, the last in order of service.

        Args:
            sequences: in order of service, and not empty.
        """
        most = max({seq.request.tenant for seq in sequences}, key=lambda tenant: (self.received(tenant), tenant))
        return next(seq for seq in reversed(sequences) if seq.request.tenant == most)

    def _forget_idle(self, waiting: set[str], level: float) -> None:
        """Forget idle tenants at or below the level: they would be raised to it when they return."""
        for tenant in [t for t, had in self._received.items() if had <= level and t not in waiting]:
            del self._received[tenant], self._weights[tenant]
            self._recent.pop(tenant, None)
