"""Run the real scheduler and cache on a virtual clock, with a step-time model in place of a device.

    traffic ──arrival──> scheduler.schedule() ──plan──> step times ──seconds──> clock
                              ^                                                   │
                              └───────────────── scheduler.update() <─────────────┘

Nothing else differs from serving: queueing, admission, preemption, eviction and prefix matching are the engine's own
code, so requests that arrive between the same steps lead to the same decisions.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from octavo.errors import CapacityError, ContextLengthError, OctavoError
from octavo.kv_budget import KVBudget
from octavo.kvcache.manager import KVCacheManager
from octavo.planner.roofline import StepTimes, WindowedLayers
from octavo.request import Request, RequestId, Sequence, SequenceId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepLoad
from octavo.simulator.acceptance import RIGHT
from octavo.simulator.fitting import PAUSE_S, Spread
from octavo.simulator.leaps import Leaps
from octavo.simulator.links import NeighbourStore
from octavo.simulator.results import Results, TenantResults
from octavo.simulator.traffic import DECODE, PREFILL, SimulatedRequest, Tenants, Traffic, clip

_ROOM_S = 0.005


class VirtualClock:
    """A clock that counts seconds since the simulation began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class SimulatedServer:
    """The parts of one simulated replica.

    Attributes:
        intake_s: seconds from a request's arrival until it reaches the engine.
        reply_s: seconds from the end of a step until clients receive its tokens.
        spread: how far single steps deviate from `times`.
        windowed: layers that attend to less than `times` assumes.
        seed: of the draws from the spread.
        leaps: the scheduler's, if steps may be simulated several at a time.
        neighbours: where it fetches blocks from; None if it does not.
        budget: of all requests.
    """

    scheduler: Scheduler
    times: StepTimes
    clock: VirtualClock
    intake_s: float = 0.0
    reply_s: float = 0.0
    spread: Spread = field(default_factory=Spread)
    windowed: tuple[WindowedLayers, ...] = ()
    seed: int = 0
    leaps: Leaps | None = None
    neighbours: NeighbourStore | None = None
    budget: KVBudget | None = None

    @property
    def kv(self) -> KVCacheManager:
        return self.scheduler.kv


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make cyclic garbage collection rare: there are no cycles, and looking for them took a quarter of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class Simulation:
    """One run of a server with given traffic.

    Args:
        tenants: weights of the tenants.
        give_up: called after every step; the simulation stops when it returns True.
        results: where several servers add up their results.
        on_first_token: called with each request that has its first token, and when its client receives it.
    """

    def __init__(
        self,
        server: SimulatedServer,
        traffic: Traffic,
        tenants: Tenants | None = None,
        give_up: Callable[[Results], bool] | None = None,
        results: Results | None = None,
        on_first_token: Callable[[SimulatedRequest, float], None] | None = None,
    ) -> None:
        self.results = Results() if results is None else results
        self._on_first_token = on_first_token
        self._delay = 0.0
        self._server = server
        self._traffic = traffic
        self._tenants = tenants or Tenants()
        self._give_up = give_up
        self._numbers = itertools.count()
        self._live: dict[SequenceId, SimulatedRequest] = {}
        self._came: list[SimulatedRequest] = []  # during the last step
        self._random = random.Random(server.seed).random
        self._ended_at = -math.inf  # the last step
        self._drew: set[SequenceId] = set()  # sequences that drew a token in the last step, which ended at
        self._drew_at = 0.0
        self._last_token: dict[SequenceId, float] = {}  # of unfinished sequences that drew no token in the last step
        self._running_s = self._usage_s = 0.0
        self._ahead: list[float] = []  # seconds of the next steps, as far as only a new request could change them
        # One object per output length: many requests share a length, and nothing modifies the object.
        self._params: dict[int, SamplingParams] = {}
        server.scheduler.on_admitted = self._on_admitted

    def run(self) -> Results:
        """Run until all requests have ended.

        Raises:
            OctavoError: requests wait, nothing runs and nothing more arrives: a fault of the scheduler.
        """
        began, results = time.perf_counter(), self.results
        with rare_collections():
            while self.advance():
                if self._give_up is not None and self._give_up(results):
                    results.unstable = True
                    break
        self.add_totals()
        results.wall_s = time.perf_counter() - began
        return results

    def next_begins(self) -> float:
        """Return when the last of the next steps begins that only a new request could change; if there is none, when
        something arrives.
        """
        now = self._server.clock.now
        if not self._server.scheduler.num_running and not self._came:
            return max(now, self._next_event(self._traffic.due(), math.inf) or now)
        if self._traffic.due() is not None:
            return now
        self._ahead = self._ahead or self._foreseen(math.inf)
        return now + math.fsum(self._ahead[:-1])

    def advance(self, until: float = math.inf) -> bool:
        """Take what has arrived, and compute steps or wait for the next request; False if there is nothing to do.

        Args:
            until: when the next request arrives; several steps are computed only if they all begin before.
        """
        traffic, scheduler, clock = self._traffic, self._server.scheduler, self._server.clock
        intake, num_live = self._server.intake_s, len(self._live)
        for sent in self._came:
            self._arrive(sent)
        self._came.clear()
        while (due := traffic.due()) is not None and due + intake <= clock.now:
            self._arrive(traffic.take())
        if due is not None:
            until = min(until, due + intake)
        if len(self._live) != num_live:
            self._ahead = []
        ahead = self._steps_before(until)
        plan = scheduler.schedule() if scheduler.has_work else StepPlan()
        if plan:
            self._step(plan, ahead)
        elif (event := self._next_event(due, until)) is not None:
            clock.now = event
        elif scheduler.has_work:
            raise OctavoError(f"{scheduler.num_waiting} simulated requests wait, but nothing runs")
        else:
            return False
        return True

    def _next_event(self, due: float | None, until: float) -> float | None:
        """Return when the next request or block comes, at the latest `until`, while nothing runs; None if none do."""
        scheduler, neighbours, events = self._server.scheduler, self._server.neighbours, [until]
        if due is not None:
            events.append(due + self._server.intake_s)
        if neighbours is not None and (end := neighbours.next_end()) is not None:
            events.append(end)
        elif scheduler.fetching is not None and len(scheduler.fetching):
            events.append(self._server.clock.now + _ROOM_S)  # a fetch waits for room in host memory
        return event if (event := min(events)) < math.inf else None

    def _steps_before(self, until: float) -> list[float]:
        """Return the seconds of the next steps, those that begin before `until` and at least one, if they are known."""
        leaps, begins, count = self._server.leaps, self._server.clock.now, 0
        if leaps is None:
            return []
        ahead, self._ahead = self._ahead or self._foreseen(until), []
        for seconds in ahead:
            if count and begins >= until:
                break
            begins += seconds
            count += 1
        leaps.num_steps = count
        return ahead[:count]

    def _foreseen(self, until: float) -> list[float]:
        """Return the seconds of the next steps that begin before `until` and that only a new request could change."""
        server, found = self._server, list[float]()
        streams = server.scheduler.running.order
        if server.leaps is None or self._came or server.scheduler.num_waiting:
            return []
        most, begins = server.leaps.most(streams), server.clock.now
        load = StepLoad(len(streams), sum(seq.num_tokens for seq in streams), 0.0, len(streams))
        while len(found) < most and (not found or begins < until):
            found.append(self._seconds(load, resumed=not found and begins - self._ended_at >= PAUSE_S))
            begins += found[-1]
            load = load._replace(context=load.context + load.rows)
        return found

    def _seconds(self, load: StepLoad, num_moved: int = 0, *, resumed: bool) -> float:
        """Return how long a step takes, but for the requests that arrive meanwhile."""
        server = self._server
        seconds = server.times.predict(load, num_moved)
        if ratios := server.spread.ratios(load, resumed):
            seconds *= ratios[int(self._random() * len(ratios))]
        return seconds

    def delay(self, seconds: float) -> None:
        """Let the next step take longer, because of a request that arrived during the last one."""
        self._delay += seconds

    def add_totals(self) -> None:
        """Add to the results what is known at the end."""
        results, scheduler = self.results, self._server.scheduler
        results.preemptions += scheduler.counters.num_preemptions
        results.recomputed_tokens += scheduler.counters.recomputed_tokens
        results.evictions += self._server.kv.evicted.count
        results.duration_s = max(results.duration_s, self._server.clock.now)
        if results.busy_s:
            results.mean_running += self._running_s / results.busy_s
            results.mean_usage += self._usage_s / results.busy_s

    def _arrive(self, sent: SimulatedRequest) -> None:
        results, scheduler = self.results, self._server.scheduler
        results.requests += sent.stage != PREFILL
        results.arrivals_s = max(results.arrivals_s, sent.arrival_s)
        if (shape := clip(sent.shape, scheduler.config.max_model_len)) is not sent.shape:
            sent = replace(sent, shape=shape)
            results.clipped += 1
        params = self._params.get(shape.output_tokens)
        if params is None:
            params = SamplingParams(
                max_tokens=shape.output_tokens, ignore_eos=True, temperature=0.0, kv_budget=self._server.budget
            )
            self._params[shape.output_tokens] = params
        request = Request(
            RequestId(f"sim-{next(self._numbers)}"),
            sent.prompt_token_ids(),
            params,
            arrival_time=sent.arrival_s,
            tenant=shape.tenant,
            kv_hint=sent.kv_hint,
            weight=self._tenants.weight_of(shape.tenant),
        )
        try:
            scheduler.add(request)
        except (CapacityError, ContextLengthError):
            results.refused += 1
            self._traffic.ended(sent, self._server.clock.now)
            return
        self._live[request.sequences[0].seq_id] = sent
        results.peak_waiting = max(results.peak_waiting, scheduler.num_waiting)

    def _on_admitted(self, request: Request) -> None:
        if self._live[request.sequences[0].seq_id].stage != DECODE:  # what it has was computed for it
            self.results.prompt_tokens += len(request.prompt_token_ids)
            self.results.cached_tokens += request.num_cached_tokens or 0

    def _step(self, plan: StepPlan, ahead: Seq[float]) -> None:
        """Compute a plan, which stands for as many steps as `ahead` has durations, or for one."""
        server, results = self._server, self.results
        scheduler, clock = server.scheduler, server.clock
        moved = len(plan.copies) + len(plan.stores) + len(plan.loads)
        steps = list(ahead)
        if steps:
            steps[0] += server.times.per_moved_block * moved
        else:
            load = StepLoad.of(plan.starts, plan.lengths, num_streams=plan.num_streams)
            steps.append(self._seconds(load, moved, resumed=clock.now - self._ended_at >= PAUSE_S))
            for layers in server.windowed:
                steps[0] -= layers.saved(plan.starts, plan.lengths)
        steps[0] += self._delay
        self._delay = 0.0
        if per_arrival := server.times.per_arrival:
            steps[-1] += per_arrival * self._take_until(clock.now + sum(steps) - server.intake_s)
        seconds = sum(steps)
        running, used, began = scheduler.num_running, server.kv.usage, clock.now
        self._ended_at = clock.now = began + seconds
        updates = scheduler.update(plan, StepResult((RIGHT,) * plan.num_draws))
        scheduler.observe(plan, seconds)
        results.steps += len(steps)
        results.busy_s += seconds
        results.moved_blocks += moved
        results.output_tokens += sum([len(update.token_ids) for update in updates])
        results.peak_running = max(results.peak_running, running)
        self._running_s += running * seconds
        self._usage_s += used * seconds
        self._note_tokens(plan, began, steps)
        for update in updates:
            if update.finish_reason is not None:
                self._finish(update.seq)

    def _take_until(self, at: float) -> int:
        """Take the requests that arrive until then, for after the step; returns their number."""
        while (due := self._traffic.due()) is not None and due <= at:
            self._came.append(self._traffic.take())
        return len(self._came)

    def _note_tokens(self, plan: StepPlan, began: float, steps: Seq[float]) -> None:
        """Record the time to first token and the inter-token latencies of steps in a row of the same sequences."""
        now, before = began + steps[0], self._drew
        drew = set(plan.seq_ids[: plan.num_streams])
        if plan.num_streams < plan.num_rows:
            later = zip(plan.seq_ids[plan.num_streams :], plan.draws[plan.num_streams :], strict=True)
            drew.update(seq_id for seq_id, draws in later if draws)
        # Nearly all of them also drew a token in the step before.
        if again := len(drew & before):
            self.results.itl.add(now - self._drew_at, again)
        for seq_id in before - drew:
            self._last_token[seq_id] = self._drew_at
        for seq_id in sorted(drew - before):
            if (at := self._last_token.pop(seq_id, None)) is None:
                self._first_token(self._live[seq_id], now)
            else:
                self.results.itl.add(now - at)
        for seconds in steps[1:]:
            self.results.itl.add(seconds, len(drew))
        self._drew, self._drew_at = drew, began + sum(steps)

    def _first_token(self, sent: SimulatedRequest, now: float) -> None:
        if self._on_first_token is not None:
            self._on_first_token(sent, now + self._server.reply_s)
        if sent.stage == PREFILL:
            self.results.output_tokens -= 1
            return
        waited = now + self._server.reply_s - sent.arrival_s
        self.results.ttft.add(waited)
        tenant = self.results.tenants.setdefault(sent.shape.tenant, TenantResults())
        tenant.requests += 1
        tenant.output_tokens += sent.shape.output_tokens
        tenant.ttft.add(waited)

    def _finish(self, seq: Sequence) -> None:
        received = self._server.clock.now + self._server.reply_s
        sent = self._live.pop(seq.seq_id)
        self._drew.discard(seq.seq_id)
        # Breaks the reference cycle, so that no garbage collection is needed.
        seq.request.sequences.clear()
        if sent.stage != PREFILL:
            self.results.completed += 1
            self.results.e2e.add(received - sent.arrival_s)
        self._traffic.ended(sent, received)
