"""Use simulations to find the largest rate within latency targets, the number of replicas, the effect of options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.simulator.fleet import Fleet
from octavo.simulator.options import Demand
from octavo.simulator.results import Results
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Simulation
from octavo.simulator.traffic import clip

Simulate = Callable[[float], Results]

_CLOSE_ENOUGH = 1.03
# Arrivals for less time than so many requests take one after the other show little of a steady state.
_ENOUGH = 10
_MOST_TRIES = 40
_PATIENCE_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in milliseconds, which must hold at `percentile`.

    Attributes:
        ttft_ms: if None, ten seconds, so that an ever-growing queue does not meet the targets.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    percentile: float = 99.0

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    @property
    def most_ttft_ms(self) -> float:
        return _PATIENCE_MS if self.ttft_ms is None else self.ttft_ms

    def met(self, results: Results) -> bool:
        """Whether a run met the targets and served every request; one that can never be served misses them."""
        if results.unstable or results.refused or not results.completed:
            return False
        pairs = ((self.most_ttft_ms, results.ttft), (self.itl_ms, results.itl))
        return all(
            limit is None or not sketch.count or 1e3 * sketch.percentile(self.percentile) <= limit
            for limit, sketch in pairs
        )

    def gives_up(self, num_requests: int) -> Callable[[Results], bool]:
        """Return a function that says whether a run of `num_requests` can no longer meet the targets.

        It checks after every thousand steps.
        """
        allowed, checked = (1 - self.percentile / 100) * num_requests, 0

        def too_late(results: Results) -> bool:
            nonlocal checked
            if results.steps // 1000 == checked:
                return False
            checked = results.steps // 1000
            return results.ttft.share_above(1.02 * self.most_ttft_ms / 1e3) * results.ttft.count > allowed

        return too_late


def simulate(plan: Plan, demand: Demand, targets: Targets | None = None) -> Results:
    """Run one simulation; with `targets`, stop it as soon as it can no longer meet them."""
    give_up = None if targets is None else targets.gives_up(-(-demand.total // demand.turns))
    if plan.fleet.replicas == 1:
        return Simulation(plan.server(), demand.traffic(), demand.sent_by, give_up).run()
    return Fleet(
        plan.servers(), demand.traffic(), plan.fleet.router, demand.sent_by, give_up, plan.fleet.prefill_replicas
    ).run()


def too_short(results: Results, *, met: bool = False) -> str | None:
    """Return a warning if the requests of a run with a rate came within too short a time to show what it leads to.

    Args:
        met: the run meets targets: what a request waits counts too, because a queue that still grows is then within
            them. Otherwise a run at too large a rate shows its queue, however late its answers.
    """
    lasts = results.e2e.mean if met else results.unqueued_s
    if not results.arrivals_s < _ENOUGH * lasts:
        return None
    return (
        f"arrivals last {results.arrivals_s:.3g} s, a request {lasts:.3g} s: too short for a queue to "
        "form as under lasting load; give more --num-requests"
    )


def num_refused(plan: Plan, demand: Demand) -> int:
    """Return how many requests can never be served, on however many servers, because the KV cache is too small."""
    longest = plan.server().scheduler.tenants.max_sequence_tokens()
    if longest >= plan.max_model_len:
        return 0
    shapes = (clip(shape, plan.max_model_len) for shape in itertools.islice(demand.shapes(), demand.total))
    return sum(shape.prompt_tokens + shape.output_tokens > longest for shape in shapes)


@dataclass(frozen=True, slots=True)
class LargestValue:
    """The result of a search: the largest value that met the targets, its results, and the smallest that missed.

    The value is infinite if all requests at once meet the targets: there are too few to find it.
    """

    value: float
    results: Results
    missed_at: float | None


def find_largest(simulate_at: Simulate, targets: Targets, first: float) -> LargestValue | None:
    """Search for the largest value that meets the targets, to within 3 %.

    Returns:
        None if no value down to `first` / 2^40 meets them.
    """
    met: tuple[float, Results] | None = None
    missed: float | None = None
    value = first
    for _ in range(_MOST_TRIES):
        results = simulate_at(value)
        if targets.met(results):
            met = (value, results)
        else:
            missed = value
        if met is None:
            value /= 2
        elif missed is None:
            value *= 2
        elif missed / met[0] <= _CLOSE_ENOUGH:
            break
        else:
            value = math.sqrt(met[0] * missed)
    return None if met is None else LargestValue(met[0], met[1], missed)


def find_rate(plan: Plan, demand: Demand, targets: Targets) -> LargestValue | None:
    """Find the largest rate (requests per second) that one replica serves within the targets.

    Returns:
        None if no rate meets the targets: a request alone takes longer, or some can never be served.

    Raises:
        ConfigError: there is no target, or the traffic is a closed loop.
    """
    _check_search(demand, targets)
    if num_refused(plan, demand):
        return None

    def simulate_at(rate: float) -> Results:
        return simulate(plan, demand.at_rate(rate), targets)

    at_once = simulate(plan, replace(demand, request_rate=math.inf), targets)
    if targets.met(at_once):
        return LargestValue(math.inf, at_once, None)
    start = demand.mean_rate
    return find_largest(simulate_at, targets, start if math.isfinite(start) else 1.0)


def find_replicas(plan: Plan, demand: Demand, targets: Targets, most: int = 1 << 20) -> tuple[int, Results] | None:
    """Find the smallest number of replicas that meets the targets, with requests dealt out in turn.

    All replicas see traffic of the same kind, so only the first is simulated.

    Returns:
        None if `most` replicas do not suffice, or some requests can never be served.

    Raises:
        ConfigError: there is no target or no rate.
    """
    _check_search(demand, targets)
    if not math.isfinite(demand.mean_rate):
        raise ConfigError(
            "how many replicas a load needs depends on its rate: give --request-rate or a trace with times"
        )
    if num_refused(plan, demand):
        return None

    def with_replicas(count: int) -> Results:
        return simulate(plan, replace(demand, turns=count), targets)

    most = min(most, demand.total)
    too_few, count = 0, 1
    while not targets.met(results := with_replicas(count)):
        if count == most:
            return None
        too_few, count = count, min(2 * count, most)
    while count - too_few > 1:
        middle = (count + too_few) // 2
        if targets.met(tried := with_replicas(middle)):
            count, results = middle, tried
        else:
            too_few = middle
    return count, results


def _check_search(demand: Demand, targets: Targets) -> None:
    if not targets.given:
        raise ConfigError("give a latency target: --ttft-slo-ms, --itl-slo-ms or both")
    if demand.concurrency is not None:
        raise ConfigError("a closed loop (--concurrency) slows down with its server: it has no largest rate")
