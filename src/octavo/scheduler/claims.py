"""Claims: which waiting requests may take places and blocks from running ones.

A claim is made at the beginning of a step, before any sequence is served, and only if it gives the head of the line
everything that it lacks. A sequence that loses its place waits for another; tokens it has drawn are kept.

Claims cannot go back and forth for ever. By priority, a request takes only from those behind it in an order that never
changes. By service, a tenant takes only from tenants that are ahead of it, and only progress puts a tenant ahead: the
first admission of a prompt, or a drawn token, but never a recomputation.
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
    """Decides which waiting sequences may claim places and blocks of running ones."""

    def claimant(self, queue: WaitingQueue, running: Seq[Sequence]) -> Sequence | None:
        """Return the waiting sequence that may claim in this step, if any."""

    def goes_first(self, claimant: Sequence, queue: WaitingQueue) -> bool:
        """Whether a claimant that lacks nothing is admitted before all others in the step."""

    def victims(self, head: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        """Return the running sequences that may lose their place to the claimant, in order of service."""


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
    """A tenant claims from tenants that have received more service.

    - A tenant with few places claims from the one with the most for its weight, as long as that one keeps at least
      twice as many for its weight as the claimant then has, or as many if the claimant had none. So a tenant that sends
      few requests never waits for others to end. It need not be behind in service; it may be ahead by as much as a
      sequence that passes the head of the line.
    - Any tenant claims from the sequences of a tenant that is so far ahead of it that computing both the victim and the
      head again would cost less than half of the lead (`VirtualTokenCounter.is_far_ahead`). So a request that needs
      most of the pool does not wait for long-running ones.
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
        # The largest k with margin * (own + k) / weight <= (places - k) / of_most.
        own = places[head.request.tenant]
        margin = 2 if own else 1
        count = int((places[most] * weight - margin * own * of_most) / (weight + margin * of_most))
        if count <= 0:
            return []
        return [seq for seq in running if seq.request.tenant == most][places[most] - count :]
