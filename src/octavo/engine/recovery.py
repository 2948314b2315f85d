"""Recovery after a failed step: finds the request at fault, ends it, and restarts the others."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from octavo.errors import CacheError, EngineDeadError, ExecutorError, LogitsError
from octavo.observe.stats import EngineStats
from octavo.request import CacheOutcome, CacheReport, FinishReason, Request, RequestId, Sequence
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # it imports torch, which a server does later
    from octavo.runner.runner import ModelRunner

logger = logging.getLogger(__name__)

StepRow = tuple[Sequence, int, int]
"""A sequence, with the first token and the end of the range that a step computes."""

# How often the engine tries to compute a token of a dummy request before it declares itself dead.
PROBES = 3
# The maximum number of requests named in a log message.
_MAX_NAMED = 20


Progress = Callable[[RequestId], int | None]
"""Returns how many tokens of a request (of its longest sequence) are computed; None if it has ended."""


class FaultIsolation:
    """Decides which requests take part in the next step, by their ids, until the one at fault is found.

        all ──fails──> all once more ──fails──> one half ──fails──> … ──fails──> a single one ──fails twice──> at fault
         ^                  │                      └──succeeds──> the other half, and so on
         └─────succeeds─────┴───────── all have passed the point of failure ─────────┘

    A step that fails once is simply computed again, and no request ends. If it fails again for the same requests, they
    are split in halves. Between two successes a request takes part in at most 3 + ceil(log2(requests)) failed steps, so
    that within a bounded number of tries some request ends or progresses.

    A suspect is cleared once it has computed all tokens that the failed step would have computed, or has ended. A
    smaller chunk of its prompt does not clear it, because it may still fail at the same token.
    """

    def __init__(self) -> None:
        self._once: dict[RequestId, int] = {}  # requests of the last failed step, with their goals
        self._groups: list[dict[RequestId, int]] = []  # the last group is being tried, the others are held back
        self._alone: RequestId | None = None  # has failed once while no other ran

    @property
    def is_calm(self) -> bool:
        """Whether there are no suspects."""
        return not self._once and not self._groups

    def may_run(self, request_id: RequestId) -> bool:
        return not self._groups or request_id in self._groups[-1]

    def failed(self, goals: Mapping[RequestId, int]) -> RequestId | None:
        """Record a failed step, and decide what to try next.

        Args:
            goals: the requests that took part, with the number of computed tokens that each would have had after it;
                not empty.

        Returns:
            The request at fault, once it has failed twice alone, and is no longer a suspect; else None.
        """
        if self._groups:
            group = self._groups.pop()
            if unplanned := {name: goal for name, goal in group.items() if name not in goals}:
                self._groups.append(unplanned)
        elif self._once.keys().isdisjoint(goals):
            self._once = dict(goals)
            return None
        self._once = {}
        suspects = list(goals.items())
        if len(suspects) == 1:
            name = suspects[0][0]
            if self._alone == name:
                self._alone = None
                return name
            self._alone = name
            self._groups.append(dict(suspects))
            return None
        middle = (len(suspects) + 1) // 2
        self._groups += [dict(suspects[middle:]), dict(suspects[:middle])]
        return None

    def advance(self, progress: Progress) -> bool:
        """Clear requests that have passed the point of failure; returns whether other requests may run now."""
        self._once = _uncleared(self._once, progress)
        changed = False
        while self._groups and not (left := _uncleared(self._groups[-1], progress)):
            self._groups.pop()
            self._alone = None
            changed = True
        if self._groups and not changed:
            self._groups[-1] = left
        return changed


def _uncleared(goals: dict[RequestId, int], progress: Progress) -> dict[RequestId, int]:
    if not goals:
        return goals
    return {name: goal for name, goal in goals.items() if (computed := progress(name)) is not None and computed < goal}


class Recovery:
    """Ends the requests that make a step fail, and starts over with all others.

    Before it blames a request, it computes one token of a dummy request, to see whether anything can be computed.
    Methods that handle a failure return the requests that they have ended, with `FinishReason.ERROR`.

    Attributes:
        isolation: says which requests may take part in the next step.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, stats: EngineStats) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._stats = stats
        self.isolation = FaultIsolation()
        self._ids = itertools.count()

    def advance(self) -> None:
        """Let other requests run if those being tried have passed the point of failure; called before each step."""
        if self.isolation.advance(self._num_computed):
            self._scheduler.restart(self.isolation.may_run)

    def step_failed(self, rows: list[StepRow] | None, error: Exception) -> list[Request]:
        """Handle a step that raised before its result was used: it is tried again, or a request ends.

        Args:
            rows: rows of the plan whose requests have not ended; None if the step failed before it was planned.

        Raises:
            EngineDeadError: nothing can be computed any more, or the block accounting is broken.
        """
        # The tokens of each request that would have been computed after the step.
        goals: dict[RequestId, int] = {}
        if rows is None:  # it was not planned, so all tokens of every request that may run
            for request in self._scheduler.requests:
                if self.isolation.may_run(request.request_id):
                    goals[request.request_id] = max(seq.num_tokens for seq in request.sequences)
        for seq, _, end in rows or ():
            request_id = seq.request.request_id
            goals[request_id] = max(goals.get(request_id, 0), end)
        if not goals and rows is None:
            raise EngineDeadError(f"a step without requests failed: {error}") from error
        if not goals:
            self.log(error, [], "all of them have ended")
            self._restart(error)
            return []
        culprit = self.isolation.failed(goals)
        self.log(error, list(goals), "it is tried again" if culprit is None else "it ends")
        self._restart(error)
        if culprit is None:
            return []
        self._probe(error)
        ended = self._scheduler.end_request(culprit, FinishReason.ERROR)
        self._restart(error)
        return [] if ended is None else [ended]

    def update_failed(self, rows: list[StepRow], error: Exception) -> list[Request]:
        """Handle an update that raised outside any single request; requests it changed may have lost tokens, and end.

        Args:
            rows: rows of the plan whose requests had not ended before.

        Raises:
            EngineDeadError: see `step_failed`.
        """
        touched: dict[RequestId, Request] = {}
        for seq, start, _ in rows:
            if seq.finished or seq.num_computed != start:
                touched[seq.request.request_id] = seq.request
        if not touched:
            return self.step_failed(rows, error)
        self.log(error, list(touched), "they end")
        for request_id in touched:
            self._scheduler.end_request(request_id, FinishReason.ERROR)
        self._scheduler.take_failures()
        self._restart(error)
        return list(touched.values())

    def runner_failed(self) -> tuple[str, list[Request]]:
        """Restart a runner that has lost keys and values; returns its failure, and the requests that were running.

        Requests that had not been admitted are computed afterwards.

        Raises:
            EngineDeadError: it cannot be restarted, or the block accounting is broken.
        """
        scheduler, failure = self._scheduler, self._runner.failure()
        running = [request for request in scheduler.requests if request.was_admitted]
        error = ExecutorError(failure)
        self.log(error, [request.request_id for request in running], "they end, and the runner is started again")
        self.isolation = FaultIsolation()
        for request in running:
            scheduler.end_request(request.request_id, FinishReason.ERROR)
        scheduler.take_failures()
        self._restart(error)
        # Nothing that was computed is left.
        for pin in list(scheduler.kv.pins):
            scheduler.kv.pins.unpin(pin.pin_id)
        scheduler.kv.reset_prefix_cache()
        try:
            self._runner.restart()
        except Exception as again:
            raise EngineDeadError(f"{failure}, and restarting it failed: {again}") from again
        return failure, running

    def audit(self, error: Exception | None = None) -> None:
        """Audit the block accounting after a failure; raises `EngineDeadError` if it is wrong."""
        try:
            self._scheduler.kv.audit()
        except CacheError as broken:
            raise EngineDeadError(f"a step failed, and the block accounting with it: {broken}") from (error or broken)

    def log(self, error: Exception, request_ids: list[RequestId], outcome: str) -> None:
        """Count a failed step, and log what happens to its requests."""
        self._stats.num_failed_steps += 1
        named = ", ".join(request_ids[:_MAX_NAMED]) + (", …" if len(request_ids) > _MAX_NAMED else "")
        logger.error("a step of %d requests (%s) failed: %s", len(request_ids), named, outcome, exc_info=error)

    def _restart(self, error: Exception) -> None:
        """Start over from the requests alone; raises `EngineDeadError` if even that fails."""
        try:
            self._scheduler.restart(self.isolation.may_run)
        except Exception as failure:
            raise EngineDeadError(f"a step failed ({error}), and so did starting over: {failure}") from error
        self.audit(error)

    def _probe(self, error: Exception) -> None:
        """Compute one token of a dummy request; raises `EngineDeadError` if nothing can be computed at all."""
        scheduler = self._scheduler
        for attempt in range(1, PROBES + 1):
            scheduler.restart(lambda _: False)
            request = Request(RequestId(f"probe-{next(self._ids)}"), [0], SamplingParams(max_tokens=1))
            # With a cache report, the ledger does not count it.
            request.cache_report = CacheReport(1, 0, CacheOutcome.BYPASSED)
            scheduler.add(request)
            try:
                plan = scheduler.schedule()
                scheduler.update(plan, self._runner.execute(plan))
                if not scheduler.take_failures():
                    return
            except LogitsError:
                return  # it was computed
            except Exception:
                logger.warning("test step %d of %d, without requests, failed too", attempt, PROBES)
            finally:
                scheduler.end_request(request.request_id)
        raise EngineDeadError(f"the engine cannot compute any step: {error}") from error

    def _num_computed(self, request_id: RequestId) -> int | None:
        request = self._scheduler.live.get(request_id)
        return None if request is None else max(seq.num_computed for seq in request.sequences)


def planned_rows(plan: StepPlan, planned: Seq[Sequence]) -> list[StepRow]:
    """Return the rows of a plan."""
    rows = zip(planned, plan.starts, plan.lengths, strict=True)
    return [(seq, start, start + length) for seq, start, length in rows]


def live_rows(plan: StepPlan, planned: Seq[Sequence]) -> list[StepRow]:
    """Return the rows of a plan whose sequences have not ended in the meantime."""
    return [row for row in planned_rows(plan, planned) if not row[0].finished]
