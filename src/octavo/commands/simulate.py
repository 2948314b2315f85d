"""`octavo simulate`: estimate the latency and throughput of a service before it exists."""

from __future__ import annotations

import argparse

from octavo.commands.base import Command
from octavo.commands.common_options import (
    add_json_option,
    add_length_options,
    add_rate_options,
    add_seed_option,
    integer,
)
from octavo.commands.options import add_engine_options

DESCRIPTION = """\
Run the scheduler and the cache of `octavo serve` on a virtual clock, under any traffic, and report time to first token,
inter-token latency, throughput, cache hits and preemptions. A step's time comes from a model that was fitted to this
machine (`octavo calibrate-speed`, --speed), from recorded plans (--plans), or, as an estimate, from a machine's data
sheet (--machine). Engine options mean what they mean to `octavo serve`. See docs/simulator.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser, "tables")
    _add_speed(parser.add_argument_group("how fast the server is (one of --speed, --plans, --machine)"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_questions(parser.add_argument_group("questions"))
    add_engine_options(parser, positional_model=True)


def _add_speed(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--speed", metavar="FILE", help="as `octavo calibrate-speed` wrote it")
    group.add_argument(
        "--plans", metavar="FILE", action="append", help="fit to plans that `--record-plans` wrote; repeatable"
    )
    group.add_argument("--machine", metavar="NAME", help="estimate from its data sheet; --list-machines names them")
    group.add_argument("--list-machines", action="store_true", help="print the machines, their figures and sources")
    group.add_argument(
        "--num-devices", type=integer, default=1, metavar="N", help="of --machine, that share the model (default: 1)"
    )
    group.add_argument(
        "--kv-bits",
        type=float,
        metavar="X",
        help="bits of an element of the KV cache, scales included (default: by --kv-cache-dtype)",
    )


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="Mooncake JSONL, Azure CSV or VTC CSV; repeated where --num-requests asks for more",
    )
    group.add_argument(
        "--num-requests", type=integer, metavar="N", help="(default: as many as the trace has, else 1000)"
    )
    add_rate_options(group)
    group.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="factor on a trace's own rate (default: 1)"
    )
    group.add_argument(
        "--concurrency", type=integer, metavar="N", help="closed loop: N users who wait for each answer before the next"
    )
    group.add_argument(
        "--think-time", type=float, default=0.0, metavar="SECONDS", help="of those users, on average (exponential)"
    )
    add_length_options(group, " without a trace")
    group.add_argument(
        "--prefix-len", metavar="LENGTHS", help="each prompt begins with one of --num-prefixes shared ones, this long"
    )
    group.add_argument(
        "--num-prefixes", type=integer, default=1, metavar="N", help="the i-th is asked for in proportion to 1/i"
    )
    group.add_argument(
        "--scale-lengths", type=float, default=1.0, metavar="X", help="factor on all lengths of a trace (default: 1)"
    )
    group.add_argument(
        "--tenants",
        metavar="NAME:WEIGHT:SHARE,…",
        help="who sends the requests, the weight of each, and how many it sends relative to others (1, 1)",
    )
    add_seed_option(group, "lengths and arrivals")


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--find-rate", action="store_true", help="the largest rate at which --ttft-slo-ms and --itl-slo-ms are kept"
    )
    group.add_argument(
        "--find-replicas",
        action="store_true",
        help="the fewest servers, requests dealt out in turn, that keep --ttft-slo-ms and --itl-slo-ms",
    )
    group.add_argument(
        "--ttft-slo-ms",
        type=float,
        metavar="X",
        help="most milliseconds to the first token (default: 10000 where only --itl-slo-ms is given)",
    )
    group.add_argument(
        "--slo-percentile",
        type=float,
        default=99.0,
        metavar="X",
        help="at which both are kept (default: 99). --itl-slo-ms also sizes chunks, as in `octavo serve`",
    )
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="OPTION=V,V,…",
        help="each value of an engine option, of kv_bits or num_devices: kv_cache_memory=1GiB,4GiB; repeatable",
    )
    group.add_argument("--rates", metavar="X,X,…", help="each of these rates in turn")
    group.add_argument(
        "--plot",
        metavar="FILE.png",
        help="latency over throughput, a line for each variant of --sweep, a point for each of --rates "
        "(needs octavo[plot])",
    )


def run(args: argparse.Namespace) -> int:
    from octavo.commands.simulate_run import run

    return run(args)


COMMAND = Command("simulate", "estimate a service's latency and throughput", add_arguments, run, DESCRIPTION)
