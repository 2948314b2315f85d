"""The study of `octavo simulate`: variants of a server, under one demand, with a question or at several rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.option import options_of
from octavo.simulator.options import Demand, FleetOptions, Questions
from octavo.simulator.questions import (
    Targets,
    find_rate,
    find_replicas,
    num_refused,
    simulate,
    too_short,
)
from octavo.simulator.results import Results
from octavo.simulator.setup import Plan

Variant = tuple[dict[str, Any], Plan]
"""The swept options' values, and the server with them."""

_NUM_RATES = 10


@dataclass(frozen=True, slots=True)
class Study:
    """Questions about servers under one demand; the target for inter-token latency is each variant's `itl_slo_ms`."""

    demand: Demand
    asked: Questions

    def targets(self, plan: Plan) -> Targets:
        return Targets(self.asked.ttft_slo_ms, plan.config.itl_slo_ms, self.asked.slo_percentile)

    def points(self, plans: Sequence[Variant]) -> Iterator[dict[str, Any]]:
        """Yield the results of each variant and rate, or the answer to the question for each variant, as JSON."""
        for changes, variant in plans:
            head = {"variant": changes, "num_blocks": variant.num_blocks}
            for point in self._points_of(variant):
                yield head | point | _price(point, self.asked.price_per_hour)

    def _points_of(self, plan: Plan) -> Iterator[dict[str, Any]]:
        demand, targets = self.demand, self.targets(plan)
        if self.asked.find_rate:
            yield self._largest_rate(plan, targets)
        elif self.asked.find_replicas:
            replicas = find_replicas(plan, demand, targets)
            figures = _refused(plan, demand) if replicas is None else replicas[1].report() | _note(replicas[1], targets)
            yield {"replicas": replicas and replicas[0]} | figures
        else:
            for rate in _rates(self.asked.rates, plan, demand) if self.asked.rates else [None]:
                at_rate = demand if rate is None else replace(demand, request_rate=rate)
                results = simulate(plan, at_rate)
                steady = (rate is not None or targets.given) and math.isfinite(at_rate.mean_rate)
                note = _note(results, targets) if steady else {}
                head = {} if rate is None else {"rate": rate}
                yield head | _within(targets, results) | results.report() | note

    def _largest_rate(self, plan: Plan, targets: Targets) -> dict[str, Any]:
        found = find_rate(plan, self.demand, targets)
        unbounded = found is not None and math.isinf(found.value)
        answer: dict[str, Any] = {"largest_rate": round(found.value, 4) if found and not unbounded else None}
        answer["missed_at"] = round(found.missed_at, 4) if found and found.missed_at is not None else None
        if unbounded:
            answer["met_all_at_once"] = True
        elif found and self.demand.follows_trace:
            answer["rate_scale"] = float(f"{self.demand.at_rate(found.value).rate_scale:.6g}")
        figures = _refused(plan, self.demand) if found is None else found.results.report()
        return answer | figures | (_note(found.results, targets) if found and not unbounded else {})


def checked_variants(plan: Plan, texts: Sequence[str]) -> list[Variant]:
    """Return the variants that sweeps ask for, all checked before the first is simulated."""
    sweeps = [parse_sweep(text) for text in texts]
    names = [name for name, _ in sweeps]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--sweep {name} is given twice: write all its values in one, {name}=V,V,…")
    if "model" in names:
        raise ConfigError("--sweep model is not possible: simulate each model with its own command")
    if "num_devices" in names and plan.machine is None:
        raise ConfigError("--sweep num_devices needs --machine: a measured speed is that of one server")
    if "kv_cache_memory" in names and (plan.config.num_blocks is not None or "num_blocks" in names):
        raise ConfigError("--num-blocks overrides the memory that --sweep kv_cache_memory varies: leave it out")
    combinations = itertools.product(*(values for _, values in sweeps))
    changed = [dict(zip(names, values, strict=True)) for values in combinations]
    found = [(changes, plan.replace(**changes)) for changes in changed]
    for _, variant in found:
        # Raises `ConfigError` if the variant is impossible.
        _ = variant.num_blocks, variant.effective_speed
    return found


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Parse a sweep, its values as the option's flag does: 'max_num_seqs=16,64' -> ('max_num_seqs', [16, 64]).

    Raises:
        ConfigError: there is no such option, or a value is invalid.
    """
    name, equals, values = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not equals or not values:
        raise ConfigError(f"cannot read {text!r} as a sweep: write kv_cache_memory=1GiB,4GiB")
    of_fleet = options_of(FleetOptions)
    option = of_fleet.get(name) or options_of(EngineConfig).get(name)
    if option is None or option.internal:
        raise ConfigError(f"--sweep {name}: no such engine option, nor one of {', '.join(of_fleet)}")
    return name, [option.parse(value, f"--sweep {text}: {name}") for value in values.split(",")]


def _note(results: Results, targets: Targets) -> dict[str, Any]:
    note = too_short(results, met=targets.given and targets.met(results))
    return {"note": note} if note else {}


def _refused(plan: Plan, demand: Demand) -> dict[str, Any]:
    """Return the number of requests that do not fit, if these are why there is no answer."""
    refused = num_refused(plan, demand)
    return {"requests": demand.total, "refused": refused} if refused else {}


def _within(targets: Targets, results: Results) -> dict[str, Any]:
    """Return whether the targets are met, and the shares of requests and of tokens that are within them."""
    found: dict[str, Any] = {"targets_met": targets.met(results)} if targets.given else {}
    latencies = (
        ("ttft", targets.ttft_ms, results.ttft, results.refused),
        ("itl", targets.itl_ms, results.itl, 0),
    )
    for name, limit, sketch, missing in latencies:
        if limit is not None and (count := sketch.count + missing):
            found[f"{name}_within"] = round((1 - sketch.share_above(limit / 1e3)) * sketch.count / count, 4)
    return found


def _price(point: Mapping[str, Any], per_hour: float | None) -> dict[str, Any]:
    """Return what a million output tokens cost, and all servers an hour, if it is known what one costs."""
    if per_hour is None or not point.get("output_tok_s"):
        return {}
    servers = point.get("servers", 1)
    count = point.get("replicas") or servers
    fleet = {"fleet_price_per_hour": per_hour * count} if count > 1 or "replicas" in point else {}
    return {"price_per_million_tokens": round(servers * per_hour / 3600 / point["output_tok_s"] * 1e6, 4), **fleet}


def _rates(asked: Sequence[float | str], plan: Plan, demand: Demand) -> list[float]:
    if "auto" in asked:
        at_once = simulate(plan, replace(demand, request_rate=math.inf))
        most = at_once.per_second(at_once.completed)
        return [float(f"{most * part / _NUM_RATES:.3g}") for part in range(1, _NUM_RATES + 1)] if most else []
    return [float(rate) for rate in asked]
