"""Compare `octavo simulate` with the server that it simulates, on work that its step times were not fitted to.

    python -m benchmarks.simulator --output benchmarks/results/simulator    # nine minutes; the machine must be idle

Three layers, each reported whatever it shows:

    1  recorded plans of the runs: the mean absolute error of a step's predicted time (goal: at most 5 %)
    2  the server at shares of its saturation, up to 80 %, open loop and closed: P50, P90 and P99 of TTFT and
       inter-token latency, and throughput, against the simulation of the same requests (goal: within 10 %)
    3  near saturation, at 95 %: absolute milliseconds

and, with all requests present from the start, so that arrivals coincide to the step: preemptions and cached tokens of
an engine in memory, which must be exactly those of the simulation.

A shared machine changes its speed while it is measured, which no simulation can know. So the loads take turns on one
server, in pieces of some seconds, with a piece of a calibration before each:

    calibration, 16 %, calibration, 26 %, calibration, 60 %, …, calibration, 16 %, …

and each load is simulated with step times of two origins:

    beforehand  `octavo calibrate-speed`, before the first piece: what somebody who sizes a service has
    in between  fitted to the pieces of calibration: the same model at the speed of the same minutes

Every piece is run twice, with the same arrivals and lengths and with other tokens, so that no prompt is found in the
cache: how far the second differs from the first shows how well anything could predict it. Each simulation is run
seven times, with other draws of single steps' times, and the median of each figure is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulator_loads import (
    ENGINE,
    MODEL,
    ClosedLoad,
    Load,
    Measured,
    OpenLoad,
    Piece,
    open_traffic,
    run_in_turn,
)
from benchmarks.simulator_report import HIGHEST_SHARE, PERCENTILES, as_markdown
from octavo import LLM, EngineConfig, SamplingParams
from octavo.planner.roofline import StepTimes
from octavo.planner.sources import find_shape
from octavo.simulator.calibration import calibrate
from octavo.simulator.fitting import MeasuredStep, mean_abs_error, periods
from octavo.simulator.results import Results
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Simulation
from octavo.simulator.sketch import Sketch
from octavo.simulator.speed import Speed
from octavo.simulator.traffic import Traffic
from octavo.workloads import report, serving
from octavo.workloads.workload import named_workload

SHARES = "0.16,0.26,0.6,0.8,0.95,closed"
CRAMPED = {**ENGINE, "num_blocks": 257, "swap_space": 0}
DRAWS = 7

_MakeTraffic = Callable[[], Traffic]


def simulated(speed: Speed, traffic: Traffic, options: dict[str, Any], seed: int = 0) -> Results:
    """Simulate traffic with a speed's times.

    Args:
        seed: of the draws of single steps' times.
    """
    server = Plan(find_shape(MODEL), EngineConfig(model=MODEL, **options), speed).server()
    server.seed = seed
    return Simulation(server, traffic).run()


def simulations(speed: Speed, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Report `DRAWS` simulations of the pieces, which differ in the draws of single steps' times."""
    pieces = list(pieces)
    return [pooled([simulated(speed, piece.traffic(), ENGINE, seed) for piece in pieces]) for seed in range(DRAWS)]


def pooled(runs: Sequence[Results]) -> dict[str, Any]:
    """Report several runs as one."""
    ttft, itl = Sketch(), Sketch()
    for run in runs:
        ttft.merge(run.ttft)
        itl.merge(run.itl)
    return {
        "ttft_ms": ttft.summary(1000.0),
        "itl_ms": itl.summary(1000.0),
        "output_tok_s": sum(run.output_tokens for run in runs) / math.fsum(run.duration_s for run in runs),
        "cached_tokens": sum(run.cached_tokens for run in runs),
    }


def observed(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Report what the clients of several pieces saw."""
    pieces = list(pieces)
    found = dict(serving.summary([record for piece in pieces for record in piece.records]))
    seconds = math.fsum(max(record.finished_s for record in piece.records) for piece in pieces)
    return found | {"output_tok_s": found["output_tokens"] / seconds}


def compared(beforehand: Speed, measured: Measured, load: Load) -> dict[str, Any]:
    """Compare the pieces of a load with their simulations and with one another; and report the errors of the steps."""
    between, pieces = measured.speed, [piece for piece in measured.pieces if piece.load is load]
    recorded = [step for piece in pieces for step in piece.steps]
    steps = periods(recorded)
    first, second = ([piece for piece in pieces if piece.number % 2 == turn] for turn in (0, 1))
    real = combined([observed(pieces)])
    early, late = simulations(beforehand, first), simulations(between, first)
    row: dict[str, Any] = {
        "name": load.name,
        "requests": sum(len(piece.records) for piece in pieces),
        "failed": sum(record.error is not None for piece in pieces for record in piece.records),
        "others": statistics.fmean(piece.others for piece in pieces),
        "stolen": statistics.fmean(piece.stolen for piece in pieces),
        "steps": len(recorded),
        "step_error": mean_abs_error(between.times, steps),
        "biases": [bias(speed.times, steps) for speed in (beforehand, between)],
        "error_of_time": math.fsum(abs(step.predicted(between.times) - step.seconds) for step in steps)
        / math.fsum(step.seconds for step in steps),
        "cached_tokens": [
            sum(record.cached_tokens for piece in pieces for record in piece.records),
            *(len(pieces) // len(first) * each[0]["cached_tokens"] for each in (early, late)),
        ],
    }
    row |= side_by_side(real, *map(combined, (early, late)))
    if second:
        row["again"] = side_by_side(*(combined([observed(half)]) for half in (first, second)))
    return row


def bias(times: StepTimes, steps: Sequence[MeasuredStep]) -> float:
    """Return how much longer all steps together are predicted to take than they took."""
    return math.fsum(step.predicted(times) for step in steps) / math.fsum(step.seconds for step in steps) - 1


def combined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    found: dict[str, Any] = {
        name: {p: statistics.median([each[name][p] for each in reports]) for p in PERCENTILES}
        for name in ("ttft_ms", "itl_ms")
    }
    return found | {"output_tok_s": statistics.median([each["output_tok_s"] for each in reports])}


def side_by_side(*found: dict[str, Any]) -> dict[str, Any]:
    """Return a list for each figure, with one value for each of `found`."""
    rows: dict[str, Any] = {
        name: {p: [each[name][p] for each in found] for p in PERCENTILES} for name in ("ttft_ms", "itl_ms")
    }
    return rows | {"output_tok_s": [each["output_tok_s"] for each in found]}


def closed_load(speed: Speed, rate: float, seconds: float) -> ClosedLoad:
    """As many users as stay below 80 % of saturation."""

    def rate_of(users: int) -> float:
        load = ClosedLoad("", 0.0, users, 60)
        return load.count / simulated(speed, load.traffic(load.requests(0)), ENGINE).duration_s

    users = max((n for n in range(1, 17) if rate_of(n) <= HIGHEST_SHARE * rate), default=1)
    reached = rate_of(users)
    return ClosedLoad(f"{users} users", reached / rate, users, max(1, round(reached * seconds)))


def run_at_once(speed: Speed) -> dict[str, Any]:
    """Count preemptions and hits, real and simulated, if all requests are there before the first step."""
    shared = named_workload("shared24")
    requests = [*named_workload("mixed40", seed=5), *shared]
    with LLM(MODEL, **CRAMPED) as llm:
        params = [SamplingParams(max_tokens=r.max_tokens, ignore_eos=True, temperature=0.0) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
        counters = llm.core.scheduler.counters
        real = [counters.num_preemptions, sum(o.num_cached_tokens or 0 for o in outputs), counters.recomputed_tokens]
        evicted = llm.core.scheduler.kv.evicted.count
    model = simulated(speed, open_traffic(requests, [0.0] * len(requests)), CRAMPED)
    return {
        "names": ["preemptions", "cached_tokens", "recomputed_tokens", "evictions"],
        "real": [*real, evicted],
        "simulated": [model.preemptions, model.cached_tokens, model.recomputed_tokens, model.evictions],
    }


def saturation(speed: Speed, count: int) -> float:
    """Requests per second that the simulation serves if all are there at once."""
    requests = named_workload(f"mixed{count}", seed=1)
    return count / simulated(speed, open_traffic(requests, [0.0] * count), ENGINE).duration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", help="calibrated beforehand with `octavo calibrate-speed`; default: measured now")
    parser.add_argument("--seconds", type=float, default=80.0, help="of that calibration")
    parser.add_argument("--shares", default=SHARES, help="of saturation, and the closed loop (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="in which each load has its turn; every two are alike")
    parser.add_argument("--run-seconds", type=float, default=10.0, help="of arrivals in each piece")
    parser.add_argument("--between-seconds", type=float, default=4.0, help="of calibration before each piece")
    parser.add_argument("--keep-plans", metavar="FILE", help="keep the recording of the server")
    parser.add_argument("--output", help="write OUTPUT.json and OUTPUT.md")
    arguments = parser.parse_args()
    if arguments.speed:
        beforehand = Speed.read(arguments.speed)
    else:
        options = (f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items())
        beforehand = calibrate([MODEL, *options], arguments.seconds, find_shape(MODEL).config.vocab_size)
    rate = saturation(beforehand, 150)
    loads: list[Load] = [
        closed_load(beforehand, rate, arguments.run_seconds)
        if share == "closed"
        else OpenLoad(f"{float(share):.0%}", float(share), float(share) * rate, arguments.run_seconds)
        for share in arguments.shares.split(",")
    ]
    with tempfile.TemporaryDirectory() as folder:
        plans = Path(arguments.keep_plans or Path(folder) / "plans")
        measured = run_in_turn(loads, arguments.rounds, arguments.between_seconds, plans)
    rows = [compared(beforehand, measured, load) | load.facts() for load in loads]
    result: dict[str, Any] = {
        "model": MODEL,
        "machine": report.machine(),
        "saturation": rate,
        "rounds": arguments.rounds,
        "run_seconds": arguments.run_seconds,
        "calibrations": {
            name: {"steps": speed.fit["steps"], "error": speed.fit["mean_abs_error"]}
            for name, speed in (("beforehand", beforehand), ("in between", measured.speed))
        },
        "at_once": run_at_once(measured.speed),
        "rows": sorted(rows, key=lambda row: ("users" in row, row["share"])),
    }
    print(as_markdown(result))
    if arguments.output:
        stem = Path(arguments.output)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(as_markdown(result))


if __name__ == "__main__":
    main()
