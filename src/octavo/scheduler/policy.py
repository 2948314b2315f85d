"""Scheduling policies: the order in which sequences are admitted, served and preempted.

A policy is one object. `key` is the order of service: the first by it that has tokens to compute is never preempted,
and the last of those that may yield is preempted first. The other orders are derived from it:

    admission     `line_rank` among the heads of waiting lines; within a line, arrival or the longest cached prefix
    prompts       `prompt_key` for what a step has left; `first_prompt` has at least 1 / `share_of_first` of it
    overtaking    `may_pass`: whether a waiting sequence may be admitted before the head, if that does not delay it
    claims        `claimant` may take the places and blocks of its `victims` among the running sequences

Claims cannot go back and forth for ever. By priority, a request takes only from those behind it in an order that never
changes. By service, a tenant takes only from tenants that are ahead of it, and only progress puts a tenant ahead: the
first admission of a prompt, or a drawn token, but never a recomputation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Literal

from octavo.least_served import LeastServed
from octavo.request import Request, Sequence

Key = tuple[Any, ...]

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0

PRIORITY_SECONDS = 60.0
"""Seconds of waiting that outweigh one level of priority under the policy "priority"."""

RECENT_HALF_LIFE = 30.0
"""Seconds after which received service counts half, when tenants are compared by recent service."""

_MOST_IDLE = 4096
"""Idle tenants are forgotten once more tenants than this are remembered."""


class FirstComeFirstServed:
    """Serves by priority, then arrival.

    Prompts share what a step has left: the first has a quarter of it, and the shortest the rest.

    Attributes:
        takes_turns: whether each tenant has its own waiting line, ranked by the service it has received.
        prefix_may_pass: whether the longest cached prefix may be admitted first, if the prefix cache orders requests.
        short_may_pass: whether the shortest prompts may be admitted before the head of the line, if it does not fit;
            otherwise, only the next in order of admission.
        may_claim: whether waiting sequences may take the places of running ones. If tenants take turns, a claimant that
            lacks nothing is admitted before all others in a step, if it may pass the head.
        share_of_first: the first prompt gets at least 1 / this of what a step has for prompts.
        headroom_tokens: default of `SchedulerConfig.headroom_tokens`.
        version: changes whenever the ranks of lines may have changed.
    """

    takes_turns = False
    prefix_may_pass = True
    short_may_pass = True
    may_claim = False
    share_of_first = 4
    headroom_tokens = 32
    version = 0

    def key(self, seq: Sequence) -> Key:
        """Return the rank in order of service."""
        return seq.order

    def line_rank(self, first: Sequence, head: Sequence) -> Key:
        """Return the rank of a waiting line: `first` is its first in order of service, `head` the one to admit."""
        return first.order

    def prompt_key(self, seq: Sequence) -> Key:
        """Return the rank of a prompt for the tokens that a step has left: the shortest first, within a priority."""
        return (seq.request.priority, seq.num_missing, *seq.order)

    def first_prompt(self, prompts: Seq[Sequence]) -> Sequence | None:
        """Return the prompt that has the guaranteed share, of running ones in order of service."""
        return prompts[0] if prompts else None

    def may_pass(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a waiting sequence may be admitted before the head, which does not fit yet."""
        return True

    def may_take(self, seq: Sequence, other: Sequence) -> bool:
        """Whether a stream may take blocks of another running sequence: of those behind it, and its own."""
        return other.order >= seq.order

    def claimant(self, heads: Seq[Sequence], head: Sequence | None, running: Seq[Sequence]) -> Sequence | None:
        """Return the waiting sequence that may claim in this step, among the heads of lines; the best is `head`."""
        return head

    def victims(self, claimant: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        """Return the running sequences that may lose their places to the claimant, in order of service."""
        return []

    def queued(self, request: Request) -> None:
        """Note a new request."""

    def arrive(self, request: Request, others: Iterable[str]) -> None:
        """Note the first waiting request of a tenant; `others` are the tenants already waiting."""

    def admitted(self, seq: Sequence) -> None:
        """Note an admission, perhaps not the first of this sequence."""

    def computed(self, seq: Sequence) -> None:
        """Note that a sequence has reached its `num_computed`, perhaps for the second time."""

    def drawn(self, sequences: Iterable[Sequence]) -> None:
        """Note one drawn token for each sequence."""

    def ended(self, request: Request) -> None:
        """Note that a request has ended."""


class AgeingPriority(FirstComeFirstServed):
    """Serves by priority with ageing, strictly in order; a request claims from less urgent ones behind it.

    Args:
        seconds: seconds of waiting that outweigh one level of priority, so that every request is next at some time.
    """

    prefix_may_pass = False
    short_may_pass = False
    may_claim = True

    def __init__(self, seconds: float = PRIORITY_SECONDS) -> None:
        self.seconds = seconds

    def queued(self, request: Request) -> None:
        request.due_time = request.arrival_time + self.seconds * request.priority

    def prompt_key(self, seq: Sequence) -> Key:
        return seq.order

    def victims(self, claimant: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        priority, order = claimant.request.priority, claimant.order
        return [seq for seq in running if seq.request.priority > priority and seq.order > order]


class VirtualTokenCounter(FirstComeFirstServed):
    """Serves the least served tenant (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    Service is the cost of a request: 1 for each prompt token that was not cached, 2 for each token drawn, as in the
    paper, divided by the tenant's weight. A prompt is charged at its first admission; recomputation after a preemption
    is not charged. A tenant that returns after a pause starts at the level of the least served waiting tenant.

    Two rules let a waiting sequence claim:

    - A tenant with few places claims from the one with the most for its weight, as long as that one keeps at least
      twice as many for its weight as the claimant then has, or as many if the claimant had none. So a tenant that sends
      few requests never waits for others to end. It need not be behind in service; it may be ahead by as much as a
      sequence that passes the head of the line.
    - Any tenant claims from the sequences of a tenant that is so far ahead of it that computing both the victim and the
      head again would cost less than half of the lead. So a request that needs most of the pool does not wait for
      long-running ones.
    """

    takes_turns = True
    short_may_pass = False
    may_claim = True
    share_of_first = 32  # the rest is shared among tenants, so fewer prompts need it
    # Preemption costs more: a tenant with a preempted sequence may have to wait until others have received as much
    # service, and by then its blocks are no longer cached.
    headroom_tokens = 96

    def __init__(self) -> None:
        self.version = 0
        self._received = LeastServed()
        self._recent: dict[str, tuple[float, float]] = {}  # service per weight, and the time of its last decay
        self._now = 0.0  # the latest arrival among those admitted
        self._level = 0.0  # of the tenant served last: where a tenant starts if no other waits

    def received(self, tenant: str) -> float:
        """Return a tenant's service per weight; after a pause, at least that of the least served waiting tenant."""
        return self._received[tenant]

    def recent(self, tenant: str) -> float:
        """Return a tenant's recently computed service per weight, decayed by half every `RECENT_HALF_LIFE` seconds."""
        amount, at = self._recent.get(tenant, (0.0, self._now))
        return amount * math.exp2((at - self._now) / RECENT_HALF_LIFE)

    def key(self, seq: Sequence) -> Key:
        return (self._received[seq.request.tenant], *seq.order)

    def line_rank(self, first: Sequence, head: Sequence) -> Key:
        """Return the tenant's service, less the cost of computing its next sequence again if that was preempted.

        So it returns while more of its blocks are still cached. Twice the cost would grow as fast as the service of the
        sequence, which would then stay ahead of others until its end.
        """
        received = self._received[head.request.tenant]
        if head.num_preemptions:
            received -= PROMPT_TOKEN * head.num_tokens / head.request.weight
        return (received, head.order)

    def prompt_key(self, seq: Sequence) -> Key:
        """Rank by the recent service of the tenant: one that sends little does not wait for those that send more.

        Within a tenant, the shortest is first. A client's priority does not count between tenants.
        """
        request = seq.request
        return (self.recent(request.tenant), seq.num_missing, request.arrival_time, seq.seq_id)

    def first_prompt(self, prompts: Seq[Sequence]) -> Sequence | None:
        return min(prompts, key=lambda seq: (seq.request.arrival_time, seq.seq_id), default=None)

    def may_pass(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a tenant is ahead of the head's by no more than the cost of computing the head twice.

        Beyond that it waits too, so that freed blocks are left to the head.
        """
        return self._lead(seq, head) <= self._allowance(head)

    def may_take(self, seq: Sequence, other: Sequence) -> bool:
        return True

    def claimant(self, heads: Seq[Sequence], head: Sequence | None, running: Seq[Sequence]) -> Sequence | None:
        places = Counter(seq.request.tenant for seq in running)

        def key(seq: Sequence) -> Key:
            request = seq.request
            return (places[request.tenant] / request.weight, *self.key(seq))

        return min(heads, key=key, default=None)

    def victims(self, claimant: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        return self._of_tenant_with_most(claimant, running) or [
            seq for seq in running if self._is_far_ahead(seq, claimant)
        ]

    def _of_tenant_with_most(self, head: Sequence, running: Seq[Sequence]) -> list[Sequence]:
        places = Counter(seq.request.tenant for seq in running)
        last = {seq.request.tenant: seq for seq in running}
        weights = {tenant: seq.request.weight for tenant, seq in last.items()}
        due = [tenant for tenant, seq in last.items() if self.may_pass(head, seq)]
        if not due:
            return []
        most = max(due, key=lambda tenant: (places[tenant] / weights[tenant], self._received[tenant], tenant))
        weight, of_most = head.request.weight, weights[most]
        # The largest k with margin * (own + k) / weight <= (places - k) / of_most.
        own = places[head.request.tenant]
        margin = 2 if own else 1
        count = int((places[most] * weight - margin * own * of_most) / (weight + margin * of_most))
        if count <= 0:
            return []
        return [seq for seq in running if seq.request.tenant == most][places[most] - count :]

    def _is_far_ahead(self, seq: Sequence, head: Sequence) -> bool:
        """Whether a running sequence's tenant is ahead of the head's by four times the cost of preempting it."""
        lost = PROMPT_TOKEN * seq.num_computed / seq.request.weight
        return self._lead(seq, head) > 2 * self._allowance(head) + 4 * lost

    def _lead(self, seq: Sequence, head: Sequence) -> float:
        return self._received[seq.request.tenant] - self._received[head.request.tenant]

    def _allowance(self, head: Sequence) -> float:
        return 2 * PROMPT_TOKEN * head.num_tokens / head.request.weight

    def arrive(self, request: Request, others: Iterable[str]) -> None:
        tenant, waiting = request.tenant, {request.tenant, *others}
        self.version += 1
        level = self._received.arrive(tenant, waiting, self._level)
        if len(self._received) > _MOST_IDLE:
            # They would be raised to the level when they return.
            for idle in [name for name in self._received if self._received[name] <= level and name not in waiting]:
                self._received.forget(idle)
                self._recent.pop(idle, None)

    def admitted(self, seq: Sequence) -> None:
        """Charge the uncached tokens of a prompt, all at once, at its first admission."""
        request = seq.request
        self._now = max(self._now, request.arrival_time)
        self._level = max(self._level, self._received[request.tenant])
        if not seq.index and not seq.num_preemptions:
            request.uncomputed_charge = seq.num_prompt_tokens - seq.num_computed
            self.charge(request.tenant, PROMPT_TOKEN * request.uncomputed_charge / request.weight)

    def computed(self, seq: Sequence) -> None:
        request = seq.request
        if before := request.uncomputed_charge:
            left = max(0, min(before, seq.num_prompt_tokens - seq.num_computed))
            request.uncomputed_charge = left
            self._note(request.tenant, PROMPT_TOKEN * (before - left) / request.weight)

    def drawn(self, sequences: Iterable[Sequence]) -> None:
        requests = [seq.request for seq in sequences]
        weights = {request.tenant: request.weight for request in requests}
        for tenant, count in Counter([request.tenant for request in requests]).items():
            service = OUTPUT_TOKEN * count / weights[tenant]
            self.charge(tenant, service)
            self._note(tenant, service)

    def ended(self, request: Request) -> None:
        """Refund the prompt tokens that were charged but never computed."""
        left, request.uncomputed_charge = request.uncomputed_charge, 0
        if left and request.tenant in self._received:
            self.charge(request.tenant, -PROMPT_TOKEN * left / request.weight)

    def charge(self, tenant: str, service: float) -> None:
        """Charge a tenant for service per weight."""
        self.version += 1
        self._received.charge(tenant, service)

    def _note(self, tenant: str, service: float) -> None:
        """Count computed service in `recent`, unlike `charge`, which counts a whole prompt at its admission."""
        self._recent[tenant] = (self.recent(tenant) + service, self._now)


Policy = FirstComeFirstServed
"""What the scheduler asks; every policy derives from the simplest one."""


def make_policy(name: Literal["fcfs", "priority", "vtc"]) -> Policy:
    """Return the policy with the given name."""
    return {"fcfs": FirstComeFirstServed, "priority": AgeingPriority, "vtc": VirtualTokenCounter}[name]()
