"""The implementation of `octavo simulate`, apart from its options so that `--help` imports little."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from octavo.bench import report
from octavo.bench.traces import read_trace
from octavo.commands.common_options import integer
from octavo.commands.options import add_engine_options, engine_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError, shortened
from octavo.option import flag
from octavo.planner.roofline import MACHINES, find_machine
from octavo.planner.sources import find_shape
from octavo.simulator.pareto import draw, require_plot
from octavo.simulator.questions import (
    Demand,
    Targets,
    find_rate,
    find_replicas,
    num_refused,
    simulate,
    too_short,
    variants,
)
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Results
from octavo.simulator.speed import Speed, speed_of_plans
from octavo.simulator.traffic import Tenants

_OWN_SWEEPS: Mapping[str, Any] = {"kv_bits": float, "num_devices": integer, "slowdown": float}
_NUM_RATES = 10


def run(args: argparse.Namespace) -> int:
    if args.list_machines:
        print("\n".join(_machines()))
        return 0
    if args.plot:
        require_plot(args.plot)
    options = engine_options(args)
    plan, demand = _plan(args, options), _demand(args)
    plans, targets = _variants(args, plan), _targets(args, plan)
    if args.slo_percentile != Targets().percentile and not any(_targets(args, each).given for _, each in plans):
        raise ConfigError("--slo-percentile goes with --ttft-slo-ms or --itl-slo-ms, of which none is given")
    if args.price_per_hour is not None and not 0 < args.price_per_hour < math.inf:
        raise ConfigError(f"--price-per-hour must be above 0, got {args.price_per_hour:g}")
    if args.find_rate and args.find_replicas:
        raise ConfigError("--find-rate asks what one server serves, --find-replicas how many are needed: give one")
    if args.rates is not None and (args.find_rate or args.find_replicas or args.concurrency is not None):
        raise ConfigError("--rates gives the rates: leave out --find-rate, --find-replicas and --concurrency")
    points = [point | _price(point, args.price_per_hour) for point in _points(args, plans, demand)]
    speed = plan.effective_speed
    result: dict[str, Any] = {
        "simulate": plan.shape.name,
        "speed": {"kind": speed.kind, "origin": speed.origin},
        "options": options,
        "max_model_len": plan.max_model_len,
        "traffic": {"trace": args.trace, **{k: v for k, v in asdict(demand).items() if k not in ("trace", "tenants")}},
        "targets": asdict(targets) if targets.given else None,
        "points": points,
    }
    print(report.as_json_line(result) if args.json else "\n".join(_tables(result)))
    if args.plot:
        draw(result, args.plot)
    return 0


def _plan(args: argparse.Namespace, options: dict[str, Any]) -> Plan:
    given = [name for name in ("speed", "plans", "machine") if getattr(args, name)]
    if len(given) != 1:
        raise ConfigError(
            "say how fast the server is, in one way: --speed FILE (`octavo calibrate-speed` writes it), --plans FILE "
            "or --machine NAME (an estimate; --list-machines)"
        )
    speed = Speed.read(args.speed) if args.speed else speed_of_plans(args.plans) if args.plans else None
    if speed is not None and args.num_devices != 1:
        raise ConfigError("--num-devices goes with --machine: a measured speed is that of the server that was measured")
    machine = find_machine(args.machine) if args.machine else None
    for name in ("model", "block_size", "max_num_seqs", "max_num_batched_tokens"):
        if speed is not None and name in speed.facts:
            options.setdefault(name, speed.facts[name])
    config = EngineConfig.from_options(options)
    plan = Plan(find_shape(config.model), config, speed, machine, args.kv_bits, args.num_devices, args.slowdown)
    measured = {} if speed is None else speed.facts
    if measured.get("model", config.model) != config.model:
        print(f"note: the speed is that of {measured['model']}, not of {config.model}", file=sys.stderr)
    return plan


def _demand(args: argparse.Namespace) -> Demand:
    _refuse_what_has_no_effect(args)
    demand = Demand(
        trace=tuple(read_trace(args.trace)) if args.trace else (),
        count=args.num_requests,
        rate=args.request_rate,
        rate_scale=args.rate_scale,
        burstiness=args.burstiness,
        users=args.concurrency,
        think_s=args.think_time,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes,
        scale_lengths=args.scale_lengths,
        tenants=Tenants.parse(args.tenants) if args.tenants else Tenants(),
        seed=args.workload_seed,
    )
    _refuse_what_the_trace_says(args, demand)
    return demand


def _refuse_what_has_no_effect(args: argparse.Namespace) -> None:
    """Refuse an option of the traffic without the one that it modifies."""
    for name, plain, needed in (
        ("rate_scale", 1.0, "trace"),
        ("scale_lengths", 1.0, "trace"),
        ("think_time", 0.0, "concurrency"),
        ("num_prefixes", 1, "prefix_len"),
    ):
        if getattr(args, name) != plain and getattr(args, needed) is None:
            raise ConfigError(f"{flag(name)} goes with {flag(needed)}, which is not given")
    if args.trace is not None and args.prefix_len is not None:
        raise ConfigError("--prefix-len goes with drawn lengths: a --trace says itself which prompts begin alike")
    usual = Demand()
    if args.trace is not None and (args.input_len, args.output_len) != (usual.input_len, usual.output_len):
        raise ConfigError("--input-len and --output-len draw lengths: a --trace has its own (see --scale-lengths)")
    if args.burstiness != 1 and args.request_rate is None and args.rates is None and not args.find_rate:
        raise ConfigError("--burstiness goes with --request-rate, --rates or --find-rate, of which none is given")
    if args.rate_scale != 1 and (args.request_rate is not None or args.rates is not None):
        raise ConfigError("--rate-scale multiplies a trace's own rate: leave out --request-rate and --rates")
    if args.request_rate is not None and args.rates is not None:
        raise ConfigError("--request-rate gives one rate, --rates several: give one of them")
    if args.burstiness != 1 and args.request_rate == math.inf and args.rates is None and not args.find_rate:
        raise ConfigError("--burstiness needs a rate that is finite: with --request-rate inf, all come at once")


def _refuse_what_the_trace_says(args: argparse.Namespace, demand: Demand) -> None:
    """Refuse an option for what the trace has, or lacks, itself."""
    if not demand.trace:
        return
    if args.burstiness != 1 and demand.follows_trace and args.rates is None:
        raise ConfigError("--burstiness draws arrival times: this --trace has its own, unless --request-rate is given")
    if args.rate_scale != 1 and not demand.follows_trace:
        raise ConfigError("--rate-scale multiplies a trace's own rate: this --trace has no arrival times")
    clients = {request.client for request in demand.trace}
    if args.tenants is None or None in clients:
        return
    if unknown := [name for name in demand.tenants.names if name not in clients]:
        raise ConfigError(
            f"--tenants: no request of this --trace is from {', '.join(unknown)}; it names its own tenants: "
            f"{shortened(', '.join(sorted(map(str, clients))))}"
        )
    if set(demand.tenants.shares) != {1.0}:
        raise ConfigError("--tenants: this --trace says who sends each request; give weights alone, as NAME:WEIGHT")


def _targets(args: argparse.Namespace, plan: Plan) -> Targets:
    return Targets(args.ttft_slo_ms, plan.config.itl_slo_ms, args.slo_percentile)


def _variants(args: argparse.Namespace, plan: Plan) -> list[tuple[dict[str, Any], Plan]]:
    """Return the swept options' values and the plan of each variant, all checked before the first is simulated."""
    sweeps = [parse_sweep(text) for text in args.sweep]
    names = [name for name, _ in sweeps]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--sweep {name} is given twice: write all its values in one, {name}=V,V,…")
    if "model" in names:
        raise ConfigError("--sweep model: a report is of one model; simulate each with a command of its own")
    if "num_devices" in names and plan.machine is None:
        raise ConfigError("--sweep num_devices goes with --machine: a measured speed is that of the measured server")
    if "kv_cache_memory" in names and (plan.config.num_blocks is not None or "num_blocks" in names):
        raise ConfigError("--num-blocks overrides the memory that --sweep kv_cache_memory varies: leave it out")
    found = list(variants(plan, sweeps))
    for _, variant in found:
        # Raises `ConfigError` if the variant is impossible.
        _ = variant.num_blocks, variant.effective_speed
    return found


def _points(
    args: argparse.Namespace, plans: Sequence[tuple[dict[str, Any], Plan]], demand: Demand
) -> Iterator[dict[str, Any]]:
    """Yield the results of each variant and rate, or the answer to the question for each variant."""
    for changes, variant in plans:
        targets = _targets(args, variant)
        head = {"variant": changes, "num_blocks": variant.num_blocks}
        if args.find_rate:
            found = find_rate(variant, demand, targets)
            unbounded = found is not None and math.isinf(found.value)
            answer: dict[str, Any] = {"largest_rate": round(found.value, 4) if found and not unbounded else None}
            answer["missed_at"] = round(found.missed_at, 4) if found and found.missed_at is not None else None
            answer |= {"met_all_at_once": True} if unbounded else {}
            if found and not unbounded and demand.follows_trace:
                answer["rate_scale"] = float(f"{demand.at_rate(found.value).rate_scale:.6g}")
            figures = _refused(variant, demand) if found is None else found.results.report()
            yield head | answer | figures | (_note(found.results, targets) if found and not unbounded else {})
        elif args.find_replicas:
            replicas = find_replicas(variant, demand, targets)
            figures = (
                _refused(variant, demand) if replicas is None else replicas[1].report() | _note(replicas[1], targets)
            )
            yield head | {"replicas": replicas and replicas[0]} | figures
        elif args.rates is None:
            results = simulate(variant, demand)
            note = _note(results, targets) if targets.given and math.isfinite(demand.mean_rate) else {}
            yield head | _within(targets, results) | results.report() | note
        else:
            for rate in _rates(args.rates, variant, demand):
                results = simulate(variant, replace(demand, rate=rate))
                note = _note(results, targets) if math.isfinite(rate) else {}
                yield head | {"rate": rate} | _within(targets, results) | results.report() | note


def _note(results: Results, targets: Targets) -> dict[str, Any]:
    note = too_short(results, met=targets.given and targets.met(results))
    return {"note": note} if note else {}


def _refused(plan: Plan, demand: Demand) -> dict[str, Any]:
    """Return how many requests are the reason why there is no answer, if they are, because they do not fit."""
    refused = num_refused(plan, demand)
    return {"requests": demand.num_requests, "refused": refused} if refused else {}


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
    fleet = {"fleet_price_per_hour": per_hour * point["replicas"]} if point.get("replicas") else {}
    return {"price_per_million_tokens": round(per_hour / 3600 / point["output_tok_s"] * 1e6, 4), **fleet}


def _rates(text: str, plan: Plan, demand: Demand) -> list[float]:
    if text == "auto":
        at_once = simulate(plan, replace(demand, rate=math.inf))
        most = at_once.per_second(at_once.completed)
        return [float(f"{most * part / _NUM_RATES:.3g}") for part in range(1, _NUM_RATES + 1)] if most else []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"cannot read {text!r} as rates: write 1,2,4 or auto") from None
    for rate in rates:
        if not rate > 0:
            raise ConfigError(f"each of --rates must be above 0, got {rate:g}")
    return rates


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Parse a sweep, its values as the option's flag does: 'max_num_seqs=16,64' -> ('max_num_seqs', [16, 64]).

    Raises:
        ConfigError: there is no such option, or a value is invalid.
    """
    name, equals, values = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not equals or not values:
        raise ConfigError(f"cannot read {text!r} as a sweep: write kv_cache_memory=1GiB,4GiB")
    return name, [_sweep_value(name, value) for value in values.split(",")]


def _sweep_value(name: str, value: str) -> Any:
    try:
        if name in _OWN_SWEEPS:
            return _OWN_SWEEPS[name](value)
        parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
        add_engine_options(parser)
        switches = {"on": flag(name), "off": flag("no_" + name)}
        argument = switches[value] if value in switches else f"{flag(name)}={value}"
        parsed, unknown = parser.parse_known_args([argument])
    except (argparse.ArgumentError, argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(f"--sweep {name}={value}: {error}") from None
    if unknown or not hasattr(parsed, name):
        raise ConfigError(f"--sweep {name}: no such engine option, nor kv_bits, num_devices or slowdown")
    return getattr(parsed, name)


def _tables(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{result['simulate']}: step times {result['speed']['origin']}"
    points = result["points"]
    if len(points) == 1:
        point = {name: value for name, value in points[0].items() if name not in ("variant", "tenants", "note")}
        yield report.as_table(point)
        if tenants := points[0].get("tenants"):
            yield from report.columns(
                ["tenant", *next(iter(tenants.values()))],
                [[name, *map(report.show, figures.values())] for name, figures in tenants.items()],
            )
    else:
        shown = [
            name
            for name in _OPTIONAL
            if any(point.get(name) if name in _IF_NOT_ZERO else name in point for point in points)
        ]
        heading = (*_HEADING, *(_OPTIONAL[name] for name in shown))
        rows = [[*_row(point), *(report.show(point.get(name, "-")) for name in shown)] for point in points]
        yield from report.columns(heading, rows)
    yield from _notes(points)


def _notes(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the tables do not say: why there is no answer, and what makes it doubtful."""
    if refusing := [point for point in points if point.get("refused")]:
        worst = max(refusing, key=lambda point: point["refused"])
        most = "" if len(points) == 1 else "up to "
        yield f"{most}{worst['refused']:,} of {worst['requests']:,} requests do not fit the KV cache: they are refused"
    if noted := [point for point in points if "note" in point]:
        shortest = min(noted, key=lambda point: point["arrivals_s"])
        yield f"note{'' if len(points) == 1 else f' on {len(noted)} of {len(points)} rows'}: {shortest['note']}"
    if any("met_all_at_once" in point for point in points):
        yield "no largest rate: the targets are met with all requests at once; simulate more of them (--num-requests)"
    missed = [point for point in points if not point.get("refused")]
    if any(point.get("largest_rate", 0) is None and "met_all_at_once" not in point for point in missed):
        yield "the targets are not met at any rate: even a request alone takes longer"
    if any("replicas" in point and point["replicas"] is None for point in missed):
        yield "no number of replicas meets the targets: even a request alone takes longer"


_HEADING = ("variant", "asked", "req/s", "out tok/s", "ttft p50", "p99 ms", "itl p50", "p99 ms", "hits", "preempted")


# Columns of figures that not every table has.
_OPTIONAL = {
    "refused": "refused",
    "clipped": "clipped",
    "targets_met": "targets met",
    "price_per_million_tokens": "price of 1 M",
    "fleet_price_per_hour": "fleet / h",
}
_IF_NOT_ZERO = ("refused", "clipped")


def _row(point: Mapping[str, Any]) -> Sequence[str]:
    variant = ", ".join(f"{name} {report.show(value)}" for name, value in point["variant"].items()) or "-"
    asked = next((point[name] for name in ("largest_rate", "replicas", "rate") if name in point), None)
    if "ttft_ms" not in point:
        return [variant, report.show(asked), *["-"] * 8]
    ttft, itl = point["ttft_ms"], point["itl_ms"]
    figures = (asked, point["requests_s"], point["output_tok_s"], ttft["p50"], ttft["p99"], itl["p50"], itl["p99"])
    return [variant, *map(report.show, figures), f"{100 * point['hit_rate']:.1f} %", f"{point['preemptions']:,}"]


def _machines() -> list[str]:
    rows = [
        [m.name, *(f"{figure:g}" if figure else "-" for figure in (m.gb_s, m.tflop_s, m.memory / 1e9, m.host_gb_s))]
        for m in MACHINES.values()
    ]
    heading = ["machine", "GB/s", "bf16 TFLOP/s", "GB", "GB/s to host", "source"]
    return report.columns(heading, [[*row, m.source] for row, m in zip(rows, MACHINES.values(), strict=True)])
