"""The options of `octavo simulate`: the server's speed, the traffic and the questions, and what they ask for."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from octavo.commands.common_options import (
    INPUT_LEN,
    OUTPUT_LEN,
    add_length_options,
    add_rate_options,
    add_seed_option,
    integer,
)
from octavo.config import EngineConfig
from octavo.errors import ConfigError, shortened
from octavo.option import flag
from octavo.planner.roofline import find_machine
from octavo.workloads.traces import read_trace

if TYPE_CHECKING:
    from octavo.simulator.questions import Demand
    from octavo.simulator.setup import Plan


def add_speed(group: argparse._ArgumentGroup) -> None:
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
        "--drafts",
        metavar="FILE",
        help="with --speculative-config: recorded plans of a server that speculates, whose drafts hold as far as these "
        "do (default: those of --plans)",
    )
    group.add_argument(
        "--machine", metavar="NAME", help="estimate step times from a machine's data sheet; --list-machines names them"
    )
    group.add_argument(
        "--list-machines", action="store_true", help="print the machines with their figures and sources, and exit"
    )
    group.add_argument(
        "--num-devices", type=integer, default=1, metavar="N", help="devices of --machine that share the model"
    )
    group.add_argument(
        "--slowdown",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply all step times by this, as a margin for a machine whose speed varies",
    )
    group.add_argument(
        "--replicas",
        type=integer,
        default=1,
        metavar="N",
        help="such servers behind a router, each with its own cache; rates are those of all",
    )
    group.add_argument(
        "--router",
        choices=("prefix", "least_loaded", "round_robin"),
        help="how --replicas share the requests, as --strategy of octavo route (default: prefix)",
    )
    group.add_argument(
        "--link-gbit",
        type=float,
        metavar="X",
        help="bandwidth of each server's network in Gbit/s: servers fetch blocks from the host memory of others that "
        "have more of a prompt (needs --kv-host-memory and --kv-demotion all; default: they do not)",
    )
    group.add_argument(
        "--prefill-replicas",
        type=integer,
        default=0,
        metavar="N",
        help="how many of --replicas only compute long prompts, as with --role prefill, and the others answer (needs "
        "--link-gbit; default: 0)",
    )
    group.add_argument(
        "--kv-bits",
        type=float,
        metavar="X",
        help="bits per element of the KV cache, scales included (default: by --kv-cache-dtype)",
    )


def add_traffic(group: argparse._ArgumentGroup) -> None:
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
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="multiply a trace's own rate by this")
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
        help="mean think time of those users between requests, exponentially distributed",
    )
    add_length_options(group, " without a trace")
    group.add_argument("--prefix-len", metavar="LENGTHS", help="tokens of a shared prefix that each prompt begins with")
    group.add_argument(
        "--num-prefixes",
        type=integer,
        default=1,
        metavar="N",
        help="number of shared prefixes; the i-th is as frequent as 1/i",
    )
    group.add_argument(
        "--scale-lengths", type=float, default=1.0, metavar="X", help="multiply all lengths of a trace by this"
    )
    group.add_argument(
        "--tenants",
        metavar="NAME:WEIGHT:SHARE,…",
        help="tenants that send the requests: each one's weight for fairness, and its relative share of the requests "
        "(default: 1 and 1); of a trace that names its clients, weights alone",
    )
    add_seed_option(group, "lengths and arrivals")


def add_questions(group: argparse._ArgumentGroup) -> None:
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
        help="percentile that must meet the targets; --itl-slo-ms also limits chunks, as in octavo serve",
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


def refuse_questions_without_effect(args: argparse.Namespace, has_targets: bool) -> None:
    """Refuse options of the questions that have no effect, or that exclude each other."""
    if args.slo_percentile != 99.0 and not has_targets:
        raise ConfigError("--slo-percentile needs --ttft-slo-ms or --itl-slo-ms")
    if args.price_per_hour is not None and not 0 < args.price_per_hour < math.inf:
        raise ConfigError(f"--price-per-hour must be above 0, got {args.price_per_hour:g}")
    if args.find_replicas and args.replicas > 1:
        raise ConfigError("give --find-replicas or --replicas, not both")
    if args.router is not None and args.replicas == 1 and not any("replicas" in sweep for sweep in args.sweep):
        raise ConfigError("--router needs --replicas")
    if args.find_rate and args.find_replicas:
        raise ConfigError("give --find-rate or --find-replicas, not both")
    if args.rates is not None and (args.find_rate or args.find_replicas or args.concurrency is not None):
        raise ConfigError("--rates cannot be combined with --find-rate, --find-replicas or --concurrency")


def make_plan(args: argparse.Namespace, options: dict[str, Any]) -> Plan:
    """Return the server to simulate; to `options`, those of the engine, are added the ones of a measured server."""
    from octavo.planner.sources import find_shape
    from octavo.scheduler.plan_log import read_plans
    from octavo.simulator.acceptance import outputs_of
    from octavo.simulator.setup import Plan
    from octavo.simulator.speed import Speed, speed_of_plans

    wants_drafts = options.get("speculative_config") is not None
    if args.drafts and not wants_drafts:
        raise ConfigError("--drafts gives the acceptance of drafts, but no --speculative-config is given")
    given = [name for name in ("speed", "plans", "machine") if getattr(args, name)]
    if len(given) != 1:
        raise ConfigError(
            "give the server's speed in one way: --speed FILE (written by `octavo calibrate-speed`), --plans FILE, or "
            "--machine NAME (an estimate; see --list-machines)"
        )
    recorded = [args.drafts] if args.drafts else args.plans or []
    drafts = [output for path in recorded for output in outputs_of(read_plans(path))] if wants_drafts else []
    speed = Speed.read(args.speed) if args.speed else speed_of_plans(args.plans) if args.plans else None
    if speed is not None and args.num_devices != 1:
        raise ConfigError("--num-devices needs --machine: a measured speed is that of one server")
    machine = find_machine(args.machine) if args.machine else None
    for name in ("model", "block_size", "max_num_seqs", "max_num_batched_tokens"):
        if speed is not None and name in speed.facts:
            options.setdefault(name, speed.facts[name])
    config = EngineConfig.from_options(options)
    plan = Plan(
        find_shape(config.model),
        config,
        speed,
        machine,
        args.kv_bits,
        args.num_devices,
        args.slowdown,
        args.replicas,
        args.router or "prefix",
        args.link_gbit,
        args.prefill_replicas,
        tuple(drafts),
    )
    measured = {} if speed is None else speed.facts
    if measured.get("model", config.model) != config.model:
        print(f"note: the speed is that of {measured['model']}, not of {config.model}", file=sys.stderr)
    return plan


def make_demand(args: argparse.Namespace) -> Demand:
    """Return the traffic to simulate."""
    from octavo.simulator.questions import Demand
    from octavo.simulator.traffic import Tenants

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
            raise ConfigError(f"{flag(name)} needs {flag(needed)}")
    if args.trace is not None and args.prefix_len is not None:
        raise ConfigError("--prefix-len cannot be combined with --trace, which has its own shared prefixes")
    if args.trace is not None and (args.input_len, args.output_len) != (INPUT_LEN, OUTPUT_LEN):
        raise ConfigError(
            "--input-len and --output-len cannot be combined with --trace, which has its own (see --scale-lengths)"
        )
    if args.burstiness != 1 and args.request_rate is None and args.rates is None and not args.find_rate:
        raise ConfigError("--burstiness needs --request-rate, --rates or --find-rate")
    if args.rate_scale != 1 and (args.request_rate is not None or args.rates is not None):
        raise ConfigError("--rate-scale multiplies a trace's own rate: leave out --request-rate and --rates")
    if args.request_rate is not None and args.rates is not None:
        raise ConfigError("give --request-rate or --rates, not both")
    if args.burstiness != 1 and args.request_rate == math.inf and args.rates is None and not args.find_rate:
        raise ConfigError("--burstiness needs a finite rate: with --request-rate inf, all requests arrive at once")


def _refuse_what_the_trace_says(args: argparse.Namespace, demand: Demand) -> None:
    """Refuse an option for what the trace has, or lacks, itself."""
    if not demand.trace:
        return
    if args.burstiness != 1 and demand.follows_trace and args.rates is None:
        raise ConfigError("--burstiness draws arrival times, but this --trace has its own: give --request-rate as well")
    if args.rate_scale != 1 and not demand.follows_trace:
        raise ConfigError("--rate-scale multiplies a trace's own rate, but this --trace has no arrival times")
    clients = {request.client for request in demand.trace}
    if args.tenants is None or None in clients:
        return
    if unknown := [name for name in demand.tenants.names if name not in clients]:
        raise ConfigError(
            f"--tenants: no request of this --trace is from {', '.join(unknown)}; it names its own tenants: "
            f"{shortened(', '.join(sorted(map(str, clients))))}"
        )
    if set(demand.tenants.shares) != {1.0}:
        raise ConfigError("--tenants: this --trace names the tenant of each request; give weights only, as NAME:WEIGHT")
