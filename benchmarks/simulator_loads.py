"""Loads on a real server that take turns with pieces of a calibration, for `benchmarks/simulator.py`."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.scheduler.plan_log import RecordedStep, read_facts, read_plans
from octavo.simulator.calibration import RoundSender, Sent, overheads, run_load, warm_up
from octavo.simulator.speed import Speed, speed_of_plans
from octavo.simulator.traffic import ClosedTraffic, OpenTraffic, Shape, Traffic
from octavo.workloads.processor_time import ProcessorTime
from octavo.workloads.server_process import running_server
from octavo.workloads.serving import RequestRecord, Target
from octavo.workloads.workload import END_TOKEN_ID, FIRST_TOKEN_ID, BenchRequest, arrival_times, named_workload

MODEL = "smollm2"
ENGINE = {"num_blocks": 2049, "max_model_len": 2048, "max_num_seqs": 64}
FEWEST = 8

_Span = tuple[float, float]


def shape(request: BenchRequest) -> Shape:
    """The shape of a request, with the same prompt token for token."""
    runs = tuple((token, len(list(same))) for token, same in itertools.groupby(request.prompt_token_ids))
    return Shape(runs, len(request.prompt_token_ids), request.max_tokens)


def open_traffic(requests: Sequence[BenchRequest], times: Sequence[float]) -> Traffic:
    timed: Iterator[tuple[float, Shape]] = zip(times, map(shape, requests), strict=True)
    return OpenTraffic(timed)


@dataclass(frozen=True, eq=False)
class Load(ABC):
    """A kind of traffic, of which pieces are sent; those of the same seed have equal arrivals and lengths."""

    name: str
    share: float

    @abstractmethod
    def requests(self, seed: int) -> list[BenchRequest]: ...

    @abstractmethod
    def arrivals(self, seed: int, count: int) -> list[float]: ...

    @abstractmethod
    def traffic(self, requests: Sequence[BenchRequest], arrivals: Sequence[float] = ()) -> Traffic: ...

    @abstractmethod
    def facts(self) -> dict[str, Any]: ...

    @property
    def num_users(self) -> int | None:
        return None


@dataclass(frozen=True, eq=False)
class OpenLoad(Load):
    """Requests at `rate` per second for `seconds`."""

    rate: float
    seconds: float

    def requests(self, seed: int) -> list[BenchRequest]:
        count = max(FEWEST, round(self.rate * self.seconds))
        return named_workload(f"mixed{count}", seed=self._seed(seed))

    def arrivals(self, seed: int, count: int) -> list[float]:
        return list(arrival_times(count, self.rate, seed=self._seed(seed)))

    def _seed(self, seed: int) -> int:
        return round(100 * self.share) + 1000 * seed

    def traffic(self, requests: Sequence[BenchRequest], arrivals: Sequence[float] = ()) -> Traffic:
        return open_traffic(requests, arrivals)

    def facts(self) -> dict[str, Any]:
        return {"share": self.share, "rate": self.rate}


@dataclass(frozen=True, eq=False)
class ClosedLoad(Load):
    """Users who each send their next request when they have their answer; every third begins like others."""

    users: int
    count: int

    def requests(self, seed: int) -> list[BenchRequest]:
        count = max(FEWEST, self.count)
        mixed = iter(named_workload(f"mixed{count}", seed=3 + seed))
        shared = iter(named_workload(f"shared{count}", seed=3 + seed))
        return [next(shared if i % 3 == 2 else mixed) for i in range(count)]

    def arrivals(self, seed: int, count: int) -> list[float]:
        return [0.0] * count

    def traffic(self, requests: Sequence[BenchRequest], arrivals: Sequence[float] = ()) -> Traffic:
        return ClosedTraffic(map(shape, requests), self.users, len(requests))

    def facts(self) -> dict[str, Any]:
        return {"share": self.share, "users": self.users}

    @property
    def num_users(self) -> int | None:
        return self.users


@dataclass(slots=True)
class Piece:
    """A piece of a load, as the server computed it.

    Attributes:
        number: of the round; two rounds in a row have the same seed.
        zero: `time.perf_counter` at time zero of the records.
        others, stolen: shares of the processors' time that other programs used, and that the host gave to other guests.
    """

    load: Load
    number: int
    requests: list[BenchRequest]
    arrivals: list[float]
    records: list[RequestRecord]
    zero: float
    ended: float
    others: float = 0.0
    stolen: float = 0.0
    steps: list[RecordedStep] = field(default_factory=list)

    def traffic(self) -> Traffic:
        return self.load.traffic(self.requests, self.arrivals)


@dataclass(frozen=True, slots=True)
class Measured:
    """All pieces, and the speed fitted to the calibration between them.

    Seconds in which other programs used the processors are in the one as in the others.
    """

    pieces: list[Piece]
    speed: Speed


def run_in_turn(loads: Sequence[Load], num_rounds: int, between_s: float, plans: Path) -> Measured:
    """Run a piece of each load in each round on one server, with `between_s` seconds of calibration before each."""
    pieces: list[Piece] = []
    sent: list[Sent] = []
    spans: list[_Span] = []
    argv = [MODEL, *(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items())]
    with running_server([*argv, f"--record-plans={plans}"]) as server:
        target = Target(server.base_url, MODEL)
        options = read_facts(plans)
        warm_up(target, options["max_model_len"], END_TOKEN_ID)
        sender = RoundSender(target, options, END_TOKEN_ID)
        for number, load in itertools.product(range(num_rounds), loads):
            began = time.perf_counter()
            sent += sender.send_for(between_s)
            spans.append((began, time.perf_counter()))
            pieces.append(run_piece(target, load, number))
            print(f"round {number + 1} of {num_rounds}: {load.name}", flush=True)
    steps = list(read_plans(plans))
    for piece in pieces:
        piece.steps = [step for step in steps if piece.zero <= step.at < piece.ended]
    calibrating = [step for step in steps if any(began <= step.at < ended for began, ended in spans)]
    intake, reply = overheads([calibrating], sent)
    loaded = [(piece.zero, piece.ended) for piece in pieces]
    speed = speed_of_plans([str(plans)], since=spans[0][0], left_out=loaded)
    return Measured(pieces, replace(speed, intake_s=intake, reply_s=reply))


def run_piece(target: Target, load: Load, number: int) -> Piece:
    """Send a piece of a load; those of odd rounds repeat the ones before with other tokens."""
    requests = [renamed(request, number % 2) for request in load.requests(number // 2)]
    arrivals, processors = load.arrivals(number // 2, len(requests)), ProcessorTime()
    zero, records = run_load(target, requests, arrivals, load.num_users)
    piece = Piece(load, number, requests, arrivals, records, zero, time.perf_counter())
    if (shares := processors.shares()) is not None:
        piece.others, piece.stolen = shares.others, shares.stolen
    return piece


def renamed(request: BenchRequest, by: int) -> BenchRequest:
    """The request with each token replaced by another one: what prompts share, they still do."""
    size = END_TOKEN_ID - FIRST_TOKEN_ID
    tokens = [FIRST_TOKEN_ID + (token - FIRST_TOKEN_ID + 1009 * by) % size for token in request.prompt_token_ids]
    return BenchRequest(tokens, request.max_tokens)
