"""`octavo simulate`: estimate the latency and throughput of a service before it exists."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.roofline import MACHINES, find_machine
from octavo.simulator.options import Demand, FleetOptions, Questions, SpeedOptions, check_question
from octavo.workloads import report

if TYPE_CHECKING:
    from octavo.simulator.setup import Plan

DESCRIPTION = """\
Run the scheduler and the cache of `octavo serve` on a virtual clock, under any traffic, and report its latencies,
throughput, cache hits and preemptions (docs/size/simulator.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser, "tables")
    parser.add_argument(
        "--list-machines", action="store_true", help="print the machines with their figures and sources, and exit"
    )
    for options in (SpeedOptions, FleetOptions, Demand, Questions):
        add_options(parser, options)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.simulator.pareto import draw
    from octavo.simulator.study import Study, checked_variants
    from octavo.workloads.plots import require_plot

    if args.list_machines:
        print("\n".join(_machines()))
        return 0
    demand, asked = Demand(**given_options(args, Demand)), Questions(**given_options(args, Questions))
    if asked.plot:
        require_plot(asked.plot)
    options = given_options(args, EngineConfig)
    plan = _plan(args, options)
    plans = checked_variants(plan, asked.sweep)
    study = Study(demand, asked)
    targets = study.targets(plan)
    check_question(asked, demand, has_targets=any(study.targets(each).given for _, each in plans))
    if asked.find_replicas and plan.fleet.replicas > 1:
        raise ConfigError("give --find-replicas or --replicas, not both")
    points = list(study.points(plans))
    speed = plan.effective_speed
    result: dict[str, Any] = {
        "simulate": plan.shape.name,
        "speed": {"kind": speed.kind, "origin": speed.origin},
        "options": options,
        "max_model_len": plan.max_model_len,
        "traffic": given_options(args, Demand),
        "targets": asdict(targets) if targets.given else None,
        "points": points,
    }
    print(report.as_json_line(result) if args.json else "\n".join(_tables(result)))
    if asked.plot:
        draw(result, asked.plot)
    return 0


def _plan(args: argparse.Namespace, options: dict[str, Any]) -> Plan:
    """Return the server to simulate; to `options`, those of the engine, are added the ones of a measured server."""
    from octavo.planner.sources import find_shape
    from octavo.scheduler.plan_log import read_plans
    from octavo.simulator.acceptance import outputs_of
    from octavo.simulator.setup import Plan
    from octavo.simulator.speed import Speed, speed_of_plans

    source, fleet = SpeedOptions(**given_options(args, SpeedOptions)), given_options(args, FleetOptions)
    wants_drafts = options.get("speculative_config") is not None
    if source.drafts and not wants_drafts:
        raise ConfigError("--drafts gives the acceptance of drafts, but no --speculative-config is given")
    recorded = [source.drafts] if source.drafts else source.plans
    drafts = [output for path in recorded for output in outputs_of(read_plans(path))] if wants_drafts else []
    speed = Speed.read(source.speed) if source.speed else speed_of_plans(source.plans) if source.plans else None
    if speed is not None and "num_devices" in fleet:
        raise ConfigError("--num-devices needs --machine: a measured speed is that of one server")
    measured = {} if speed is None else speed.facts
    for name in ("model", "block_size", "max_num_seqs", "max_num_batched_tokens"):
        if name in measured:
            options.setdefault(name, measured[name])
    config = EngineConfig.from_options(options)
    plan = Plan(
        find_shape(config.model),
        config,
        speed,
        find_machine(source.machine) if source.machine else None,
        FleetOptions(**fleet),
        tuple(drafts),
    )
    if (
        "router" in fleet
        and plan.fleet.replicas == 1
        and not any("replicas" in each for each in getattr(args, "sweep", ()))
    ):
        raise ConfigError("--router needs --replicas")
    if measured.get("model", config.model) != config.model:
        print(f"note: the speed is that of {measured['model']}, not of {config.model}", file=sys.stderr)
    return plan


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
    """Yield notes below the tables: why there is no answer, or why it is doubtful."""
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
