"""Hold `octavo simulate` against the server that it simulates, on work that its step times were not fitted to.

    python benchmarks/simulator.py --output benchmarks/results/simulator    # seven minutes; the machine idle otherwise

Three layers, each reported whatever it shows:

    1  recorded plans of the open-loop runs: the mean absolute error of a step's predicted time (wanted: at most 5 %)
    2  the server at shares of its saturation, up to 80 %: P50, P90 and P99 of TTFT and inter-token latency, and
       throughput, against the simulation of the same requests at the same times (wanted: within 10 %)
    3  near saturation, at 95 %: absolute milliseconds

and, where all requests are there at once, so that arrivals are equal to the step: preemptions and cached tokens of an
engine in memory, which must be exactly those of the simulation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo import LLM, EngineConfig, SamplingParams
from octavo.bench import report, serving
from octavo.bench.server_process import running_server
from octavo.bench.serving import RequestRecord, Target
from octavo.bench.workload import BenchRequest, arrival_times, named_workload
from octavo.planner.sources import find_shape
from octavo.scheduler.plan_log import read_plans
from octavo.simulator.calibration import calibrate
from octavo.simulator.fitting import executions, mean_abs_error, periods
from octavo.simulator.pareto import require_matplotlib
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Results, Simulation
from octavo.simulator.speed import Speed
from octavo.simulator.traffic import OpenTraffic, Shape

MODEL = "smollm2"
SHARES = (0.3, 0.6, 0.8, 0.95)
ENGINE = {"num_blocks": 2049, "max_model_len": 2048, "max_num_seqs": 64}
CRAMPED = {**ENGINE, "num_blocks": 257, "swap_space": 0}
PERCENTILES = ("p50", "p90", "p99")
HIGHEST_SHARE, WITHIN, STEP_ERROR = 0.8, 0.1, 0.05
FEWEST = 30

_SHOWN = {"ttft_ms": "TTFT, ms", "itl_ms": "inter-token, ms"}


def simulated(
    speed: Speed, requests: Sequence[BenchRequest], times: Sequence[float], options: dict[str, Any]
) -> Results:
    """The same prompts, token for token, at the same times."""
    plan = Plan(find_shape(MODEL), EngineConfig(model=MODEL, **options), speed)
    return Simulation(plan.server(), OpenTraffic(iter(_timed(requests, times)))).run()


def _timed(requests: Sequence[BenchRequest], times: Sequence[float]) -> Iterator[tuple[float, Shape]]:
    for request, at in zip(requests, times, strict=True):
        runs = tuple((token, len(list(same))) for token, same in itertools.groupby(request.prompt_token_ids))
        yield at, Shape(runs, len(request.prompt_token_ids), request.max_tokens)


def serve_argv() -> list[str]:
    return [MODEL, *(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items())]


def measured(requests: Sequence[BenchRequest], times: Sequence[float], plans: Path) -> list[RequestRecord]:
    """The same on a server of its own, whose plans are recorded."""
    argv = [
        MODEL,
        *(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()),
        f"--record-plans={plans}",
    ]
    with running_server(argv) as server:
        target = Target(server.base_url, MODEL)
        asyncio.run(serving.run_load(target, [BenchRequest([7] * 40, 8)], [0.0]))  # what the first request pays for
        return asyncio.run(serving.run_load(target, requests, times))


def run_open_loop(speed: Speed, share: float, rate: float, count: int, folder: Path) -> dict[str, Any]:
    """One row of the second and the third layer, with the first layer's errors on its plans."""
    requests = named_workload(f"mixed{count}", seed=round(100 * share))
    times = arrival_times(count, share * rate, seed=round(100 * share))
    plans = folder / f"plans{share}"
    real = serving.summary(measured(requests, times, plans))
    model = simulated(speed, requests, times, ENGINE).report()
    steps = list(read_plans(plans))
    device = speed.fit["execution"]["times"]
    row: dict[str, Any] = {"share": share, "rate": share * rate, "requests": count, "steps": len(steps)}
    row["step_error"] = mean_abs_error(speed.times, periods(steps))
    row["step_bias"] = _bias(speed, periods(steps))
    row["device_step_error"] = mean_abs_error(Speed("", "measured", _times(device)).times, executions(steps))
    for name in ("ttft_ms", "itl_ms"):
        row[name] = {p: [real[name][p], model[name][p]] for p in PERCENTILES}
    row["output_tok_s"] = [real["output_tok_s"], model["output_tok_s"]]
    row["failed"] = real["failed"]
    return row


def _times(fields: dict[str, Any]) -> Any:
    from octavo.scheduler.step_time import StepTimes

    return StepTimes(**{**fields, "products": tuple(map(tuple, fields["products"]))})


def _bias(speed: Speed, steps: Sequence[Any]) -> float:
    """Predicted over measured time of all steps together, less 1: of noise, much averages out."""
    return math.fsum(speed.times.predict(step.load) for step in steps) / math.fsum(s.seconds for s in steps) - 1


def run_at_once(speed: Speed) -> dict[str, Any]:
    """Preemptions and hits where all requests are there before the first step: real, and simulated."""
    shared = named_workload("shared24")
    requests = [*named_workload("mixed40", seed=5), *shared]
    with LLM(MODEL, **CRAMPED) as llm:
        params = [SamplingParams(max_tokens=r.max_tokens, ignore_eos=True, temperature=0.0) for r in requests]
        outputs = llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
        counters = llm.core.scheduler.counters
        real = [counters.num_preemptions, sum(o.num_cached_tokens or 0 for o in outputs), counters.recomputed_tokens]
        evicted = llm.core.scheduler.kv.num_evicted
    model = simulated(speed, requests, [0.0] * len(requests), CRAMPED)
    return {
        "names": ["preemptions", "cached_tokens", "recomputed_tokens", "evictions"],
        "real": [*real, evicted],
        "simulated": [model.preemptions, model.cached_tokens, model.recomputed_tokens, model.evictions],
    }


def saturation(speed: Speed, count: int) -> float:
    """Requests a second that the simulation serves when all are there at once."""
    requests = named_workload(f"mixed{count}", seed=1)
    return count / simulated(speed, requests, [0.0] * count, ENGINE).duration_s


def as_markdown(result: dict[str, Any]) -> str:
    rows = result["rows"]
    below = [row for row in rows if row["share"] <= HIGHEST_SHARE]
    above = [row for row in rows if row["share"] > HIGHEST_SHARE]
    lines = [
        "# The simulator against the server",
        "",
        f"`python benchmarks/simulator.py`, {result['machine']['cores']} cores of {result['machine']['cpu']}; {MODEL}.",
        f"Saturation: {result['saturation']:.2f} requests a second, by simulation. All figures are real → simulated.",
        "",
        "## Single steps",
        "",
        f"Wanted: a mean absolute error of {100 * STEP_ERROR:.0f} % at most. `benchmarks/step_times.py` measures how "
        "far one and the same step differs from time to time on this machine, which no law can predict.",
        "",
        "| share of saturation | steps | error | of the device's time alone | bias | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = [f"{100 * row[name]:.1f} %" for name in ("step_error", "device_step_error", "step_bias")]
        verdict = "met" if row["step_error"] <= STEP_ERROR else "missed"
        lines.append(f"| {row['share']:.0%} | {row['steps']} | " + " | ".join([*errors, verdict]) + " |")
    lines += ["", f"## Up to {HIGHEST_SHARE:.0%} of saturation", ""]
    lines += [f"Wanted: within {100 * WITHIN:.0f} %.", ""]
    lines += ["| share | requests | figure | p50 | p90 | p99 | |", "|---|---|---|---|---|---|---|"]
    for row in below:
        for name in ("ttft_ms", "itl_ms"):
            pairs = list(row[name].values())
            cells = [f"{real:.1f} → {model:.1f} ({_percent(real, model)})" for real, model in pairs]
            lines.append(f"| {_head(row)} | {_SHOWN[name]} | " + " | ".join(cells) + f" | {_verdict(pairs)} |")
        real, model = row["output_tok_s"]
        cells = f"{real:.0f} → {model:.0f} ({_percent(real, model)}) | |"
        lines.append(f"| {_head(row)} | output tokens / s | {cells} | {_verdict([(real, model)])} |")
    if above:
        lines += [
            "",
            "## Near saturation",
            "",
            "In milliseconds: a small error of the rate is a large one of the queue.",
            "",
        ]
        lines += ["| share | requests | figure | p50 | p90 | p99 |", "|---|---|---|---|---|---|"]
        for row in above:
            for name in ("ttft_ms", "itl_ms"):
                cells = [f"{real:.0f} → {model:.0f} ({model - real:+.0f} ms)" for real, model in row[name].values()]
                lines.append(f"| {_head(row)} | {_SHOWN[name]} | " + " | ".join(cells) + " |")
            real, model = row["output_tok_s"]
            lines.append(
                f"| {_head(row)} | output tokens / s | {real:.0f} → {model:.0f} ({_percent(real, model)}) | | |"
            )
    once = result["at_once"]
    lines += ["", "## All requests at once, in 256 blocks", "", "Wanted: exactly equal.", ""]
    lines += ["| | real | simulated | |", "|---|---|---|---|"]
    lines += [
        f"| {name.replace('_', ' ')} | {real} | {model} | {'met' if real == model else 'missed'} |"
        for name, real, model in zip(once["names"], once["real"], once["simulated"], strict=True)
    ]
    return "\n".join(lines) + "\n"


def _head(row: dict[str, Any]) -> str:
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return f"{row['share']:.0%} | {row['requests']}{failed}"


def _percent(real: float, model: float) -> str:
    return f"{100 * (model / real - 1):+.0f} %"


def _verdict(pairs: Sequence[Sequence[float]]) -> str:
    return "met" if all(abs(model / real - 1) <= WITHIN for real, model in pairs) else "missed"


def draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, 2), ("ttft_ms", "itl_ms"), strict=True):
        for p, colour in zip(PERCENTILES, ("#0072B2", "#E69F00", "#D55E00"), strict=True):
            rates = [row["rate"] for row in result["rows"]]
            for index, (style, label) in enumerate((("o-", "real"), ("x--", "simulated"))):
                values = [row[name][p][index] for row in result["rows"]]
                axes.plot(rates, values, style, color=colour, label=f"{p} {label}")
        axes.set(yscale="log", xlabel="requests a second", ylabel=name.replace("_", ", "))
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", help="as calibrate-speed wrote it; default: measured now")
    parser.add_argument("--seconds", type=float, default=80.0, help="of the calibration")
    parser.add_argument("--run-seconds", type=float, default=65.0, help="of arrivals in each open-loop run")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of saturation")
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
        "machine": report.machine(),
        "saturation": rate,
        "at_once": run_at_once(speed),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for share in map(float, arguments.shares.split(",")):
            count = max(FEWEST, round(share * rate * arguments.run_seconds))
            result["rows"].append(run_open_loop(speed, share, rate, count, Path(folder)))
    print(as_markdown(result))
    if arguments.output:
        stem = Path(arguments.output)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(as_markdown(result) + f"\n![Real and simulated latency]({stem.name}.png)\n")
        draw(result, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
