"""Compare `octavo simulate` with the server that it simulates, on work that its step times were not fitted to.

    python benchmarks/simulator.py --output benchmarks/results/simulator    # eight minutes; the machine must be idle

In pieces, where a machine is idle for shorter: the rows of each are added to those that OUTPUT.json has.

    octavo calibrate-speed smollm2 --num-blocks 2049 --max-model-len 2048 --max-num-seqs 64 --output speed.json
    python benchmarks/simulator.py --speed speed.json --shares 0.3,0.6 --output OUT
    python benchmarks/simulator.py --speed speed.json --shares 0.8,closed --output OUT --add

Three layers, each reported whatever it shows:

    1  recorded plans of the runs: the mean absolute error of a step's predicted time (goal: at most 5 %)
    2  the server at shares of its saturation, up to 80 %, open loop and closed: P50, P90 and P99 of TTFT and
       inter-token latency, and throughput, against the simulation of the same requests (goal: within 10 %)
    3  near saturation, at 95 %: absolute milliseconds

and, with all requests present from the start, so that arrivals coincide to the step: preemptions and cached tokens of
an engine in memory, which must be exactly those of the simulation.

A shared machine changes its speed while it is measured, which no simulation can know (`simulator/drift.py`). So each
run is simulated twice: with the calibrated times, and with these times scaled to the machine's speed at each moment, as
shown by the run's own plans. The errors of the second are the simulator's own: queues, batches, and the way of requests
and answers.

Each simulation is run seven times, with other draws of single steps' times, and the median of each figure is compared:
the 99th percentile of 300 requests is that of three of them, and another draw of their steps moves it by up to a third.
How far the draws move each figure is reported, and, with --twice, how far a second run of the server differs from the
first; and what changes if every step takes 5 % longer, as the machine may from one minute to the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo import LLM, EngineConfig, SamplingParams
from octavo.bench import report, serving
from octavo.bench.processor_time import ProcessorTime
from octavo.bench.server_process import running_server
from octavo.bench.serving import RequestRecord, Target
from octavo.bench.workload import END_TOKEN_ID, BenchRequest, arrival_times, named_workload
from octavo.planner.sources import find_shape
from octavo.scheduler.plan_log import RecordedStep, read_plans
from octavo.scheduler.step_time import StepLoad, StepTimes
from octavo.simulator.calibration import calibrate, run_load, warm_up
from octavo.simulator.drift import Drift, floor
from octavo.simulator.fitting import executions, mean_abs_error, periods, with_coldness
from octavo.simulator.pareto import require_matplotlib
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Results, Simulation, VirtualClock
from octavo.simulator.speed import Speed
from octavo.simulator.spread import Draws, Spread
from octavo.simulator.traffic import ClosedTraffic, OpenTraffic, Shape, Traffic
from simulator_report import HIGHEST_SHARE, PERCENTILES, as_markdown, draw

MODEL = "smollm2"
SHARES = "0.3,0.6,0.8,0.95,closed"
ENGINE = {"num_blocks": 2049, "max_model_len": 2048, "max_num_seqs": 64}
CRAMPED = {**ENGINE, "num_blocks": 257, "swap_space": 0}
SLOWER = 1.05
DRAWS = 7
MOST_OTHERS, ATTEMPTS = 0.05, 2
FEWEST = 30

_MakeTraffic = Callable[[], Traffic]
_Combine = Callable[[list[float]], float]


@dataclass(slots=True)
class TimesOfTheMoment:
    """Step times at the machine's speed of the moment, which is `zero` plus the clock's seconds."""

    drift: Drift
    clock: VirtualClock
    zero: float

    def predict(self, load: StepLoad) -> float:
        return self.drift.predict(load, self.zero + self.clock.now)


@dataclass(slots=True)
class Run:
    """What a server did in one run.

    Attributes:
        zero: `time.perf_counter` at time zero of the records.
        others, stolen: shares of the processors' time that other programs used, and that the host gave to other guests.
    """

    records: list[RequestRecord]
    zero: float
    others: float = 0.0
    stolen: float = 0.0
    steps: list[RecordedStep] = field(default_factory=list)

    @property
    def taken(self) -> float:
        return self.others + self.stolen


def simulated(
    speed: Speed,
    traffic: Traffic,
    options: dict[str, Any],
    drift: Drift | None = None,
    zero: float = 0.0,
    seed: int = 0,
) -> Results:
    """Simulate traffic with the calibrated times or, given a drift, with those of the moment.

    Args:
        seed: of the draws of single steps' times.
    """
    server = Plan(find_shape(MODEL), EngineConfig(model=MODEL, **options), speed).server()
    server.draws = Draws(speed.spread if drift is None else drift.spread(), seed)
    if drift is not None:
        server.times = TimesOfTheMoment(drift, server.clock, zero)  # type: ignore[assignment]  # it predicts
    return Simulation(server, traffic).run()


def simulations(
    speed: Speed, make_traffic: _MakeTraffic, drift: Drift | None = None, zero: float = 0.0
) -> list[dict[str, Any]]:
    """Report `DRAWS` simulations of the same requests, which differ in the draws of single steps' times."""
    return [simulated(speed, make_traffic(), ENGINE, drift, zero, seed).report() for seed in range(DRAWS)]


def shape(request: BenchRequest) -> Shape:
    """The shape of a request, with the same prompt token for token."""
    runs = tuple((token, len(list(same))) for token, same in itertools.groupby(request.prompt_token_ids))
    return Shape(runs, len(request.prompt_token_ids), request.max_tokens)


def open_traffic(requests: Sequence[BenchRequest], times: Sequence[float]) -> Traffic:
    timed: Iterator[tuple[float, Shape]] = zip(times, map(shape, requests), strict=True)
    return OpenTraffic(timed)


def serve_argv() -> list[str]:
    return [MODEL, *(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items())]


def measured(requests: Sequence[BenchRequest], times: Sequence[float], plans: Path, users: int | None = None) -> Run:
    """Measure until nobody else uses the processors, up to `ATTEMPTS` times; returns the quietest run."""
    runs = []
    for _ in range(ATTEMPTS):
        runs.append(measured_once(requests, times, plans, users))
        if runs[-1].taken <= MOST_OTHERS:
            break
        print(f"others used {runs[-1].taken:.0%} of the processor time", flush=True)
    return min(runs, key=lambda run: run.taken)


def measured_once(
    requests: Sequence[BenchRequest], times: Sequence[float], plans: Path, users: int | None = None
) -> Run:
    """Send the requests to a new, warmed-up server that records its plans."""
    processors = ProcessorTime()
    with running_server([*serve_argv(), f"--record-plans={plans}"]) as server:
        target = Target(server.base_url, MODEL)
        warm_up(target, ENGINE["max_model_len"], END_TOKEN_ID)
        began = time.perf_counter()
        zero, records = run_load(target, requests, times, users)
    run = Run(records, zero)
    if (shares := processors.shares()) is not None:
        run.others, run.stolen = shares.others, shares.stolen
    run.steps = [step for step in read_plans(plans) if step.at >= began]
    return run


def slowed(speed: Speed) -> Speed:
    """The speed of a machine on which every step takes `SLOWER` times as long."""
    spread = speed.spread
    decodes, chunks = (tuple(SLOWER * ratio for ratio in kind or (1.0,)) for kind in (spread.decodes, spread.chunks))
    return replace(speed, spread=Spread(decodes, chunks))


def compared(speed: Speed, run: Run, make_traffic: _MakeTraffic, again: Run | None) -> dict[str, Any]:
    """Compare a run with its two simulations, with a second run of the same requests and with a simulated machine that
    is slower; and report the errors of the steps."""
    steps = with_coldness(speed.times, periods(run.steps))
    drift = Drift(speed.times, steps)
    real = combined([serving.summary(run.records)])
    plain, moment = simulations(speed, make_traffic), simulations(speed, make_traffic, drift, run.zero)
    slower = simulations(slowed(speed), make_traffic)
    device = StepTimes(**{**(fields := speed.fit["execution"]["times"]), "products": _points(fields)})
    error, share = floor(steps)
    row: dict[str, Any] = {
        "requests": len(run.records),
        "failed": sum(record.error is not None for record in run.records),
        "others": run.others,
        "stolen": run.stolen,
        "steps": len(run.steps),
        "step_error": mean_abs_error(speed.times, steps),
        "device_step_error": mean_abs_error(device, with_coldness(device, executions(run.steps))),
        "step_bias": math.fsum(map(speed.times.predict, (step.load for step in steps)))
        / math.fsum(step.seconds for step in steps)
        - 1,
        "error_of_time": math.fsum(abs(speed.times.predict(step.load) - step.seconds) for step in steps)
        / math.fsum(step.seconds for step in steps),
        "floor": error,
        "floor_share": share,
        "residual": drift.residual(),
        "cached_tokens": [
            sum(record.cached_tokens for record in run.records),
            *(each[0]["cached_tokens"] for each in (plain, moment)),
        ],
    }
    row |= beside(real, combined(plain), combined(moment))
    row["draws"] = beside(combined(plain, min), combined(plain, max))
    row["slower"] = beside(combined(plain), combined(slower))
    if again is not None:
        row["again"] = beside(real, combined([serving.summary(again.records)])) | {"taken": again.taken}
    return row


def combined(reports: Sequence[Mapping[str, Any]], how: _Combine = statistics.median) -> dict[str, Any]:
    """Combine each figure of all reports: by default, to its median."""
    found: dict[str, Any] = {
        name: {p: how([each[name][p] for each in reports]) for p in PERCENTILES} for name in ("ttft_ms", "itl_ms")
    }
    return found | {"output_tok_s": how([each["output_tok_s"] for each in reports])}


def beside(*found: dict[str, Any]) -> dict[str, Any]:
    """Return a list for each figure, with one value for each of `found`."""
    rows: dict[str, Any] = {
        name: {p: [each[name][p] for each in found] for p in PERCENTILES} for name in ("ttft_ms", "itl_ms")
    }
    return rows | {"output_tok_s": [each["output_tok_s"] for each in found]}


def _points(fields: dict[str, Any]) -> tuple[tuple[float, float], ...]:
    return tuple((rows, seconds) for rows, seconds in fields["products"])


def run_open_loop(
    speed: Speed, share: float, rate: float, count: int, folder: Path, twice: bool = False
) -> dict[str, Any]:
    """Send requests at their arrival times, at a share of saturation."""
    requests = named_workload(f"mixed{count}", seed=round(100 * share))
    times = arrival_times(count, share * rate, seed=round(100 * share))
    run = measured(requests, times, folder / f"plans{share}")
    again = measured_once(requests, times, folder / f"again{share}") if twice else None
    row = compared(speed, run, lambda: open_traffic(requests, times), again)
    return {"name": f"{share:.0%}", "share": share, "rate": share * rate, **row}


def run_closed_loop(speed: Speed, rate: float, seconds: float, folder: Path) -> dict[str, Any]:
    """Run as many users as stay below 80 % of saturation; each sends its next request when it has its answer.

    Every third request begins with a prefix that others share.
    """

    def requests(count: int) -> list[BenchRequest]:
        mixed, shared = iter(named_workload(f"mixed{count}", seed=3)), iter(named_workload(f"shared{count}", seed=3))
        return [next(shared if i % 3 == 2 else mixed) for i in range(count)]

    def simulate_users(users: int, count: int) -> float:
        traffic = ClosedTraffic(map(shape, requests(count)), users, count)
        return count / simulated(speed, traffic, ENGINE).duration_s

    most = HIGHEST_SHARE * rate
    users = max((n for n in range(1, 17) if simulate_users(n, 60) <= most), default=1)
    count = max(FEWEST, round(simulate_users(users, 60) * seconds))
    chosen = requests(count)
    run = measured(chosen, [0.0] * count, folder / "plans", users)
    row = compared(speed, run, lambda: ClosedTraffic(map(shape, chosen), users, count), None)
    reached = count / (max(record.finished_s for record in run.records) * rate)
    return {"name": f"{users} users", "share": reached, "rate": reached * rate, "users": users, **row}


def run_at_once(speed: Speed) -> dict[str, Any]:
    """Count preemptions and hits, real and simulated, if all requests are there before the first step."""
    shared = named_workload("shared24")
    requests = [*named_workload("mixed40", seed=5), *shared]
    with LLM(MODEL, **CRAMPED) as llm:
        params = [SamplingParams(max_tokens=r.max_tokens, ignore_eos=True, temperature=0.0) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
        counters = llm.core.scheduler.counters
        real = [counters.num_preemptions, sum(o.num_cached_tokens or 0 for o in outputs), counters.recomputed_tokens]
        evicted = llm.core.scheduler.kv.num_evicted
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
    parser.add_argument("--speed", help="as calibrate-speed wrote it; default: measured now")
    parser.add_argument("--seconds", type=float, default=80.0, help="of the calibration")
    parser.add_argument("--run-seconds", type=float, default=50.0, help="of arrivals in each run")
    parser.add_argument("--shares", default=SHARES, help="of saturation, and the closed loop (default: %(default)s)")
    parser.add_argument("--twice", action="store_true", help="run each share of the open loop a second time")
    parser.add_argument("--add", action="store_true", help="keep the rows that OUTPUT.json has of other shares")
    parser.add_argument("--output", help="write OUTPUT.json, OUTPUT.md and OUTPUT.png")
    arguments = parser.parse_args()
    if arguments.output:
        require_matplotlib()
    if arguments.speed:
        speed = Speed.read(arguments.speed)
    else:
        speed = calibrate(serve_argv(), arguments.seconds, find_shape(MODEL).vocab_size)
    rate = saturation(speed, 150)
    result: dict[str, Any] = {
        "model": MODEL,
        "machine": report.machine(),
        "saturation": rate,
        "at_once": run_at_once(speed),
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for share in arguments.shares.split(","):
            if share == "closed":
                rows.append(run_closed_loop(speed, rate, arguments.run_seconds, Path(folder)))
            else:
                count = max(FEWEST, round(float(share) * rate * arguments.run_seconds))
                rows.append(run_open_loop(speed, float(share), rate, count, Path(folder), arguments.twice))
    if arguments.add:
        names = {row["name"] for row in rows}
        before = json.loads(Path(arguments.output).with_suffix(".json").read_text())["rows"]
        rows = [row for row in before if row["name"] not in names] + rows
    result["rows"] = sorted(rows, key=lambda row: ("users" in row, row["share"]))
    print(as_markdown(result))
    if arguments.output:
        stem = Path(arguments.output)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(as_markdown(result) + f"\n![Real and simulated latency]({stem.name}.png)\n")
        draw(result, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
