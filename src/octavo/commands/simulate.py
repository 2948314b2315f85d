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
    group.add_argument(
        "--speed",
        metavar="FILE",
        help="step times that `octavo calibrate-speed` wrote; model, --max-model-len, --block-size, --max-num-seqs, "
        "--max-num-batched-tokens and the size of the cache are the measured server's unless they are given",
    )
    group.add_argument(
        "--plans",
        metavar="FILE",
        action="append",
        help="fit step times to plans that `octavo serve --record-plans` wrote, and take the same options from them as "
        "from --speed; repeatable",
    )
    group.add_argument(
        "--machine", metavar="NAME", help="estimate step times from a machine's data sheet; --list-machines names them"
    )
    group.add_argument(
        "--list-machines", action="store_true", help="print the machines with their figures and sources, and exit"
    )
    group.add_argument(
        "--num-devices",
        type=integer,
        default=1,
        metavar="N",
        help="devices of --machine that share the model (default: 1)",
    )
    group.add_argument(
        "--slowdown",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply all step times by this, as a margin for a machine whose speed varies (default: 1)",
    )
    group.add_argument(
        "--kv-bits",
        type=float,
        metavar="X",
        help="bits per element of the KV cache, scales included (default: by --kv-cache-dtype)",
    )


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="a Mooncake (JSONL), Azure (CSV) or VTC (CSV) trace, or prompts in a JSON array; repeated if "
        "--num-requests exceeds it",
    )
    group.add_argument(
        "--num-requests",
        type=integer,
        metavar="N",
        help="number of requests (default: as many as the trace has, else 1000)",
    )
    add_rate_options(group)
    group.add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="multiply a trace's own rate by this (default: 1)"
    )
    group.add_argument(
        "--concurrency",
        type=integer,
        metavar="N",
        help="closed loop: N users, each waiting for an answer before the next request",
    )
    group.add_argument(
        "--think-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="mean think time of those users between requests, exponentially distributed (default: 0)",
    )
    add_length_options(group, " without a trace")
    group.add_argument("--prefix-len", metavar="LENGTHS", help="tokens of a shared prefix that each prompt begins with")
    group.add_argument(
        "--num-prefixes",
        type=integer,
        default=1,
        metavar="N",
        help="number of shared prefixes; the i-th is as frequent as 1/i (default: 1)",
    )
    group.add_argument(
        "--scale-lengths",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply all lengths of a trace by this (default: 1)",
    )
    group.add_argument(
        "--tenants",
        metavar="NAME:WEIGHT:SHARE,…",
        help="tenants that send the requests: each one's weight for fairness, and its relative share of the requests "
        "(default: 1 and 1); of a trace that names its clients, weights alone",
    )
    add_seed_option(group, "lengths and arrivals")


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--find-rate",
        action="store_true",
        help="find the highest request rate that meets --ttft-slo-ms and --itl-slo-ms",
    )
    group.add_argument(
        "--find-replicas",
        action="store_true",
        help="find the fewest servers, with requests distributed round-robin, that meet --ttft-slo-ms and --itl-slo-ms",
    )
    group.add_argument(
        "--ttft-slo-ms",
        type=float,
        metavar="MS",
        help="target for the time to the first token, in milliseconds (default: 10000 if only --itl-slo-ms is given). "
        "Without a question, the share of requests and of tokens within the targets is reported",
    )
    group.add_argument(
        "--slo-percentile",
        type=float,
        default=99.0,
        metavar="P",
        help="percentile that must meet the targets (default: 99). --itl-slo-ms also limits chunks, as in octavo serve",
    )
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="OPTION=V,V,…",
        help="simulate each value of an engine option, kv_bits, num_devices or slowdown: kv_cache_memory=1GiB,4GiB; "
        "repeatable",
    )
    group.add_argument(
        "--rates",
        metavar="X,X,…|auto",
        help="simulate each of these request rates; auto: ten of them, up to what is served with all requests at once",
    )
    group.add_argument(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="what a server costs an hour, in any currency: adds the price of a million output tokens",
    )
    group.add_argument(
        "--plot",
        metavar="FILE.png",
        help="plot latency over throughput: a line for each variant of --sweep, a point for each of --rates "
        "(needs octavo[plot])",
    )


def run(args: argparse.Namespace) -> int:
    from octavo.commands.simulate_run import run

    return run(args)


COMMAND = Command("simulate", "estimate a service's latency and throughput", add_arguments, run, DESCRIPTION)
