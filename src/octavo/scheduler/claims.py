"""Who may take places and blocks of sequences that run, when there are too few for the first in line.

A claim is made at the beginning of a step, before anybody is served in it, and only where it gives the head of the line
all that it lacks. Whoever loses a place waits for another; what it has drawn is kept.

No claims go back and forth for ever. By priority, a request takes only from those behind it in an order that never
changes. By service, a tenant takes only from tenants that are ahead of it, and what puts a tenant ahead is a prompt at
its first admission or a token that is drawn, never a recomputation: every claim was paid for with progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.request import Sequence
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.tenant_queue import TenantQueue


class Claims(Protocol):
    """Decides who has a claim on what others hold."""

    def claimant(self, queue: WaitingQueue, running: Seq[Sequence]) -> Sequence | None:
        """Of those that wait, the one that may claim in this step."""

    def goes_first(self, claimant: Sequence, queue: WaitingQueue) -> bool:
        """Whether one that lacks nothing is admitted before all others in the step."""

    def victims(self, head: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        """Of those that run, in order of service, who may lose their place to the claimant; in the same order."""


class ByPriority:
    """A request claims from those with a lower priority that come after it in order of service."""

    def claimant(self, queue: WaitingQueue, running: Seq[Sequence]) -> Sequence | None:
        return queue.peek()

    def goes_first(self, claimant: Sequence, queue: WaitingQueue) -> bool:
        return False

    def victims(self, head: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        priority, order = head.request.priority, head.order
        return [seq for seq in running if seq.request.priority > priority and seq.order > order]


class ByService:
    """A tenant claims from tenants that have received more service than it has.

    - One with few places claims from the tenant that has most for its weight, as long as that one keeps at least twice
      as many for its weight, or as many where the claimant had none. So a tenant that sends little waits for nobody to
      end. It need not be behind in service, but ahead by no more than those may be that pass the head of the line.
    - Any tenant claims from sequences of a tenant that is so far ahead of it that computing both the victim and the
      head again would cost less than half of the lead (`VirtualTokenCounter.is_far_ahead`). So a request that needs
      most of the pool does not wait for others that run for long.
    """

    def __init__(self, turns: VirtualTokenCounter) -> None:
        self._turns = turns

    def claimant(self, queue: WaitingQueue, running: Seq[Sequence]) -> Sequence | None:
        assert isinstance(queue, TenantQueue)
        places = Counter(seq.request.tenant for seq in running)
        received = self._turns.received

        def key(seq: Sequence) -> tuple[float, ...]:
            request = seq.request
            return (places[request.tenant] / request.weight, received(request.tenant), *seq.order)

        return min(queue.heads().values(), key=key, default=None)

    def goes_first(self, claimant: Sequence, queue: WaitingQueue) -> bool:
        head = queue.peek()
        return head is None or self._turns.may_pass(claimant, head)

    def victims(self, head: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        from_most = self._of_tenant_with_most(head, running)
        return from_most or [seq for seq in running if self._turns.is_far_ahead(seq, head)]

    def _of_tenant_with_most(self, head: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        received = self._turns.received
        places = Counter(seq.request.tenant for seq in running)
        last = {seq.request.tenant: seq for seq in running}
        weights = {tenant: seq.request.weight for tenant, seq in last.items()}
        due = [tenant for tenant, seq in last.items() if self._turns.may_pass(head, seq)]
        if not due:
            return []
        most = max(due, key=lambda tenant: (places[tenant] / weights[tenant], received(tenant), tenant))
        weight, of_most = head.request.weight, weights[most]
        # Of k that are taken: margin * (own + k) / weight <= (places - k) / of_most.
        own = places[head.request.tenant]
        margin = 2 if own else 1
        count = int((places[most] * weight - margin * own * of_most) / (weight + margin * of_most))
        if count <= 0:
            return []
        return [seq for seq in running if seq.request.tenant == most][places[most] - count :]
