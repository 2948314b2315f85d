"""The options of `octavo simulate`, each declared once: the servers' speed and number, the traffic, the questions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from octavo.errors import ConfigError, shortened
from octavo.option import Options, option
from octavo.simulator.traffic import ClosedTraffic, OpenTraffic, Shape, Tenants, Traffic, drawn_shapes, trace_shapes
from octavo.units import MILLISECONDS, SECONDS
from octavo.workloads.traces import TraceRequest, read_trace
from octavo.workloads.workload import LENGTH_FORMS, Lengths, arrival_times

_speed = partial(option, group="how fast the server is (one of --speed, --plans, --machine)")
_fleet = partial(option, group="servers")
_traffic = partial(option, group="traffic")
_question = partial(option, group="questions")
_lengths = partial(_traffic, metavar="LENGTHS")

_ANYBODY = Tenants()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions(Options):
    """Where step times come from."""

    speed: str | None = _speed(
        None,
        "step times that `octavo calibrate-speed` wrote; model, --max-model-len, --block-size, --max-num-seqs, "
        "--max-num-batched-tokens and the size of the cache are the measured server's unless they are given",
        metavar="FILE",
    )
    plans: Sequence[str] = _speed(
        (),
        "fit step times to plans that `octavo serve --record-plans` wrote, and take the same options from them as from "
        "--speed; repeatable",
        metavar="FILE",
    )
    drafts: str | None = _speed(
        None,
        "with --speculative-config: recorded plans of a server that speculates, whose drafts hold as far as these do "
        "(default: those of --plans)",
        metavar="FILE",
    )
    machine: str | None = _speed(
        None, "estimate step times from a machine's data sheet; --list-machines names them", metavar="NAME"
    )

    def _check_together(self) -> None:
        if bool(self.speed) + bool(self.plans) + bool(self.machine) != 1:
            raise ConfigError(
                "give the server's speed in one way: --speed FILE (written by `octavo calibrate-speed`), --plans FILE, "
                "or --machine NAME (an estimate; see --list-machines)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions(Options):
    """The number of servers, and how they share the requests."""

    num_devices: int = _fleet(1, "devices of --machine that share the model", least=1)
    slowdown: float = _fleet(
        1.0, "multiply all step times by this, as a margin for a machine whose speed varies", above=0
    )
    replicas: int = _fleet(1, "such servers behind a router, each with its own cache; rates are those of all", least=1)
    router: Literal["prefix", "least_loaded", "round_robin"] = _fleet(
        "prefix", "how --replicas share the requests, as --strategy of octavo route"
    )
    link_gbit: float | None = _fleet(
        None,
        "bandwidth of each server's network in Gbit/s: servers fetch blocks from the host memory of others that have "
        "more of a prompt (needs --kv-host-memory and --kv-demotion all; default: they do not)",
        above=0,
    )
    prefill_replicas: int = _fleet(
        0,
        "how many of --replicas only compute long prompts, as with --role prefill, and the others answer (needs "
        "--link-gbit)",
        least=0,
    )

    def _check_together(self) -> None:
        if self.prefill_replicas >= self.replicas:
            raise ConfigError(
                f"prefill_replicas must leave some of the {self.replicas} replicas, got {self.prefill_replicas}"
            )
        if self.prefill_replicas and (self.link_gbit is None or self.router != "prefix"):
            raise ConfigError("prefill_replicas needs a link (--link-gbit) and --router prefix")


def _read_requests(given: Any) -> tuple[TraceRequest, ...]:
    return tuple(read_trace(given)) if isinstance(given, str) else given


def _read_tenants(given: Any) -> Tenants:
    return Tenants.parse(given) if isinstance(given, str) else given


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand(Options):
    """The traffic to simulate; `traffic()` generates the same requests every time."""

    trace: str | tuple[TraceRequest, ...] | None = _traffic(
        None,
        "a Mooncake (JSONL), Azure (CSV) or VTC (CSV) trace, or prompts in a JSON array; repeated if --num-requests "
        "exceeds it",
        metavar="FILE",
        read=_read_requests,
    )
    num_requests: int | None = _traffic(
        None, "number of requests (default: as many as the trace has, else 1000)", least=1
    )
    request_rate: float | None = _traffic(
        None, "requests per second, or inf (default: a trace's own arrival times, else inf)", above=0, most=math.inf
    )
    burstiness: float = _traffic(
        1.0, "how evenly requests arrive; 1: Poisson; below: in bursts; above: more evenly", above=0
    )
    rate_scale: float = _traffic(1.0, "multiply a trace's own rate by this", above=0, needs="trace")
    concurrency: int | None = _traffic(
        None, "closed loop: N users, each waiting for an answer before the next request", least=1
    )
    think_time: float = _traffic(
        0.0,
        "mean think time of those users between requests, exponentially distributed",
        unit=SECONDS,
        least=0,
        needs="concurrency",
    )
    input_len: str = _lengths("64", f"prompt tokens without a trace: {LENGTH_FORMS}")
    output_len: str = _lengths("128", f"output tokens without a trace: {LENGTH_FORMS}")
    prefix_len: str | None = _lengths(None, "tokens of a shared prefix that each prompt begins with")
    num_prefixes: int = _traffic(
        1, "number of shared prefixes; the i-th is as frequent as 1/i", least=1, needs="prefix_len"
    )
    scale_lengths: float = _traffic(1.0, "multiply all lengths of a trace by this", above=0, needs="trace")
    tenants: str | Tenants = _traffic(  # noqa: RUF009 (it declares a field)
        _ANYBODY,
        "tenants that send the requests: each one's weight for fairness, and its relative share of the requests "
        "(default: 1 and 1); of a trace that names its clients, weights alone",
        metavar="NAME:WEIGHT:SHARE,…",
        read=_read_tenants,
    )
    workload_seed: int = _traffic(0, "seed of lengths and arrivals")
    turn: int = _traffic(0, "the first request that one of several servers gets which take turns", internal=True)
    turns: int = _traffic(1, "the number of these servers", internal=True)

    def _check_together(self) -> None:
        if self.concurrency is not None and (self.request_rate is not None or self.rate_scale != 1):
            raise ConfigError(
                "a closed loop (--concurrency) has no rate: each user sends a request after the last answer"
            )
        if self.trace is None:
            return
        if self.prefix_len is not None:
            raise ConfigError("--prefix-len cannot be combined with --trace, which has its own shared prefixes")
        if (self.input_len, self.output_len) != ("64", "128"):
            raise ConfigError(
                "--input-len and --output-len cannot be combined with --trace, which has its own (see --scale-lengths)"
            )
        clients = {request.client for request in self.requests}
        if self.tenants == _ANYBODY or None in clients:
            return
        if unknown := [name for name in self.sent_by.names if name not in clients]:
            raise ConfigError(
                f"--tenants: no request of this --trace is from {', '.join(unknown)}; it names its own tenants: "
                f"{shortened(', '.join(sorted(map(str, clients))))}"
            )
        if set(self.sent_by.shares) != {1.0}:
            raise ConfigError(
                "--tenants: this --trace names the tenant of each request; give weights only, as NAME:WEIGHT"
            )

    @property
    def requests(self) -> tuple[TraceRequest, ...]:
        """The requests of the trace; empty without one."""
        assert not isinstance(self.trace, str), "a checked option has been read"
        return self.trace or ()

    @property
    def sent_by(self) -> Tenants:
        assert isinstance(self.tenants, Tenants), "a checked option has been read"
        return self.tenants

    @property
    def total(self) -> int:
        """The number of requests."""
        return self.num_requests if self.num_requests is not None else len(self.requests) or 1000

    @property
    def follows_trace(self) -> bool:
        """Whether requests arrive at the times of the trace."""
        timed = bool(self.requests) and all(request.arrival_s is not None for request in self.requests)
        return timed and self.request_rate is None and self.concurrency is None

    @property
    def mean_rate(self) -> float:
        """Requests per second of those that are simulated; infinite if all arrive at once."""
        if not self.follows_trace:
            return math.inf if self.request_rate is None else self.request_rate
        # A part of a trace may be slower or faster than the whole.
        last = next(itertools.islice(self.shapes(), self.total - 1, None)).arrival_s
        return self.rate_scale * (self.total - 1) / last if last else math.inf

    def at_rate(self, rate: float) -> Demand:
        """Return the same requests at another mean rate: with a trace's times, all are scaled."""
        if self.follows_trace and math.isfinite(mean := self.mean_rate):
            return replace(self, rate_scale=self.rate_scale * rate / mean)
        return replace(self, request_rate=rate)

    def shapes(self) -> Iterator[Shape]:
        """Return an endless stream of requests, without arrival times."""
        seed = self.workload_seed
        if self.requests:
            return trace_shapes(self.requests, self.sent_by, scale_lengths=self.scale_lengths, seed=seed)
        return drawn_shapes(
            Lengths.parse(self.input_len),
            Lengths.parse(self.output_len),
            self.sent_by,
            prefix_lens=None if self.prefix_len is None else Lengths.parse(self.prefix_len),
            num_prefixes=self.num_prefixes,
            seed=seed,
        )

    def traffic(self) -> Traffic:
        """Return the requests with their arrival times."""
        count, shapes = self.total, self.shapes()
        if self.concurrency is not None:
            return ClosedTraffic(shapes, self.concurrency, count, self.think_time, self.workload_seed)
        timed: Iterator[tuple[float, Shape]]
        if self.follows_trace:
            timed = (((shape.arrival_s or 0.0) / self.rate_scale, shape) for shape in itertools.islice(shapes, count))
        else:
            rate = math.inf if self.request_rate is None else self.request_rate
            timed = zip(arrival_times(count, rate, self.burstiness, self.workload_seed), shapes, strict=False)
        return OpenTraffic(itertools.islice(timed, self.turn, None, self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions(Options):
    """What is asked of each variant of the servers; without a question, its figures are."""

    find_rate: bool = _question(False, "find the highest request rate that meets --ttft-slo-ms and --itl-slo-ms")
    find_replicas: bool = _question(
        False,
        "find the fewest servers, with requests distributed round-robin, that meet --ttft-slo-ms and --itl-slo-ms",
    )
    ttft_slo_ms: float | None = _question(
        None,
        "target for the time to the first token, in milliseconds (default: 10000 if only --itl-slo-ms is given). "
        "Without a question, the share of requests and of tokens within the targets is reported",
        unit=MILLISECONDS,
        above=0,
    )
    slo_percentile: float = _question(
        99.0,
        "percentile that must meet the targets; --itl-slo-ms also limits chunks, as in octavo serve",
        metavar="P",
        above=0,
        most=100,
    )
    sweep: Sequence[str] = _question(
        (),
        "simulate each value of an engine option, or of one of the servers such as num_devices or slowdown: "
        "kv_cache_memory=1GiB,4GiB; repeatable",
        metavar="OPTION=V,V,…",
    )
    rates: Sequence[float | Literal["auto"]] = _question(
        (),
        "simulate each of these request rates; auto: ten of them, up to what is served with all requests at once",
        metavar="X,X,…|auto",
        above=0,
        most=math.inf,
    )
    price_per_hour: float | None = _question(
        None,
        "what a server costs an hour, in any currency: adds the price of a million output tokens",
        above=0,
    )
    plot: str | None = _question(
        None,
        "plot latency over throughput: a line for each variant of --sweep, a point for each of --rates (needs "
        "octavo[plot])",
        metavar="FILE.png",
    )

    def _check_together(self) -> None:
        if self.find_rate and self.find_replicas:
            raise ConfigError("give --find-rate or --find-replicas, not both")
        if self.rates and (self.find_rate or self.find_replicas):
            raise ConfigError("--rates cannot be combined with --find-rate, --find-replicas or --concurrency")


def check_question(asked: Questions, demand: Demand, *, has_targets: bool) -> None:
    """Refuse options of the question and of the traffic that have no effect together, or exclude each other."""
    if asked.slo_percentile != 99.0 and not has_targets:
        raise ConfigError("--slo-percentile needs --ttft-slo-ms or --itl-slo-ms")
    if asked.rates and demand.concurrency is not None:
        raise ConfigError("--rates cannot be combined with --find-rate, --find-replicas or --concurrency")
    if asked.rates and demand.request_rate is not None:
        raise ConfigError("give --request-rate or --rates, not both")
    if demand.rate_scale != 1:
        if demand.request_rate is not None or asked.rates:
            raise ConfigError("--rate-scale multiplies a trace's own rate: leave out --request-rate and --rates")
        if not demand.follows_trace:
            raise ConfigError("--rate-scale multiplies a trace's own rate, but this --trace has no arrival times")
    if demand.burstiness == 1 or asked.rates:
        return
    if demand.follows_trace:
        raise ConfigError("--burstiness draws arrival times, but this --trace has its own: give --request-rate as well")
    if demand.request_rate is None and not asked.find_rate:
        raise ConfigError("--burstiness needs --request-rate, --rates or --find-rate")
    if demand.request_rate == math.inf and not asked.find_rate:
        raise ConfigError("--burstiness needs a finite rate: with --request-rate inf, all requests arrive at once")
