"""Measure how well step times can be predicted: the machine's own repeatability, and the error of the fitted law.

    python -m benchmarks.step_times --output benchmarks/results/step_times      # two minutes; the machine must be idle

An engine computes the same rounds of requests again and again, with different tokens of the same lengths, so that the
n-th step of a round is the same work each time. Four figures separate noise from a wrong law, the first three of them
as mean |a / b - 1|:

    repeatability    a step's time against the median of its repetitions: what no law can predict
    law on medians   the fitted law against those medians, on rounds that it was not fitted to
    single steps     the fitted law against single steps of those rounds
    own error        the law's error without the noise of the repetitions (`own_error`), root mean square

Repetitions alternate between the rounds, so that a slow spell of the machine does not fall on all of one round's. Where
a machine is idle for shorter, recordings are taken one by one and judged together:

    python -m benchmarks.step_times --seconds 40 --plans A
    python -m benchmarks.step_times --seconds 40 --plans B --with A --output OUT
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.scheduler.plan_log import RecordedStep, read_plans
from octavo.scheduler.step_time import StepLoad
from octavo.simulator.calibration import Round, rounds
from octavo.simulator.fitting import MeasuredStep, executions, fit, mean_abs_error, periods
from octavo.workloads import report
from octavo.workloads.workload import random_token_ids

MODEL = "smollm2"
ENGINE = {"num_blocks": 2049, "max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
VOCABULARY = 40_000
# Repetitions, including the cold one: with fewer there is no median.
LEAST = 4

Group = list[MeasuredStep]


def run_rounds(chosen: Sequence[Round], seconds: float, plans: Path) -> int:
    """Run every round again and again until the time is up; returns how often each was computed."""
    rng = random.Random(0)
    repetitions = 0
    with LLM(MODEL, record_plans=str(plans), **ENGINE) as llm:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at or repetitions < LEAST:
            for each in chosen:
                prompts: Any = [{"prompt_token_ids": random_token_ids(rng, n, VOCABULARY)} for n in each.prompt_lens]
                params = SamplingParams(max_tokens=each.output_len, ignore_eos=True, temperature=0.0)
                llm.generate(prompts, params, use_tqdm=False)
            repetitions += 1
    return repetitions


def grouped(
    recordings: Sequence[Sequence[RecordedStep]], chosen: Sequence[Round], measure: Callable[..., Any]
) -> list[list[Group]]:
    """For each round its steps, each with all its repetitions except the first of a recording, which is cold."""
    by_round: list[dict[StepLoad, Group]] = [defaultdict(list) for _ in chosen]
    for steps in recordings:
        for by_step, runs in zip(by_round, runs_of(steps, chosen), strict=True):
            for run in runs[1:]:
                for step in measure(run):
                    by_step[step.load].append(step)
    return [[group for group in by_step.values() if len(group) >= LEAST - 1] for by_step in by_round]


def runs_of(steps: Sequence[RecordedStep], chosen: Sequence[Round]) -> list[list[list[RecordedStep]]]:
    """For each round the steps of each of its repetitions in one recording."""
    per_round: list[list[list[RecordedStep]]] = [[] for _ in chosen]
    position, numbers = 0, itertools.cycle(range(len(chosen)))
    while position < len(steps):
        number = next(numbers)
        left = len(chosen[number].prompt_lens) * chosen[number].output_len
        run = []
        while left > 0 and position < len(steps):
            run.append(steps[position])
            left -= sum(steps[position].draws)
            position += 1
        per_round[number].append(run)
    return per_round


def median_of(group: Group) -> MeasuredStep:
    return MeasuredStep(group[0].load, statistics.median(step.seconds for step in group))


def own_error(errors: Sequence[Sequence[float]]) -> float:
    """The root mean square of a law's own errors, from its errors on repetitions of each step.

    The mean of n repetitions errs by the law's error and by noise, whose variance is that between repetitions / n, and
    is subtracted (the random effects of a one-way analysis of variance). So the noise does not count, however large.
    """
    squares = [statistics.fmean(each) ** 2 - statistics.variance(each) / len(each) for each in errors]
    return math.sqrt(max(0.0, statistics.fmean(squares)))


def repeatability(groups: Sequence[Group]) -> float:
    """The mean of |a step's time / the median of the others - 1|."""
    errors = []
    for group in groups:
        for i, step in enumerate(group):
            others = statistics.median(other.seconds for j, other in enumerate(group) if j != i)
            errors.append(abs(others / step.seconds - 1))
    return statistics.fmean(errors)


def kind_of(group: Group) -> str:
    load = group[0].load
    if load.chunk_work:
        return "chunks of up to 64 rows" if load.rows <= 64 else "chunks of over 64 rows"
    for most in (1, 4, 16):
        if load.rows <= most:
            return f"decode, up to {most} rows"
    return "decode, over 16 rows"


def judged(found: list[list[Group]]) -> dict[str, Any]:
    """Predict each half of the rounds with the law fitted to the other half."""
    result: dict[str, Any] = {}
    kinds: dict[str, list[list[float]]] = defaultdict(lambda: [[], [], []])
    law, single, noise, fitted_to = [], [], [], []
    errors: list[list[float]] = []
    for half in (0, 1):
        train = [group for i, groups in enumerate(found) if i % 2 == half for group in groups]
        test = [group for i, groups in enumerate(found) if i % 2 != half for group in groups]
        times = fit([median_of(group) for group in train]).times
        fitted_to.append(mean_abs_error(times, [median_of(group) for group in train]))
        for middle, group in zip(map(median_of, test), test, strict=True):
            on_median = mean_abs_error(times, [middle])
            predicted = times.predict(middle.load)
            errors.append([predicted / step.seconds - 1 for step in group])
            each = statistics.fmean(map(abs, errors[-1]))
            own = repeatability([group])
            law.append(on_median)
            single.append(each)
            noise.append(own)
            for column, value in zip(kinds[kind_of(group)], (own, on_median, each), strict=True):
                column.append(value)
    result["steps"] = len(law)
    result["repeatability"] = statistics.fmean(noise)
    result["law_on_medians_fitted"] = statistics.fmean(fitted_to)
    result["law_on_medians"] = statistics.fmean(law)
    result["single_steps"] = statistics.fmean(single)
    result["own_error"] = own_error(errors)
    result["kinds"] = {
        name: [len(columns[0]), *(statistics.fmean(column) for column in columns)]
        for name, columns in sorted(kinds.items())
    }
    return result


def as_markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# How far step times can be predicted",
        "",
        f"`python -m benchmarks.step_times`, {machine['cores']} cores of {machine['cpu']}; {MODEL}, "
        f"{result['repetitions']} repetitions of {result['rounds']} rounds. Mean |a / b - 1|; the law was fitted to "
        "the medians of one half of the rounds and is judged on the other.",
        "",
        "| steps | different | repeatability | law on medians | law on single steps | law's own error, RMS |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("execution", "period"):
        found = result[name]
        cells = [found["repeatability"], found["law_on_medians"], found["single_steps"], found["own_error"]]
        lines.append(f"| **{name}** | {found['steps']} | " + " | ".join(f"{100 * v:.1f} %" for v in cells) + " |")
        for kind, (count, *values) in found["kinds"].items():
            lines.append(f"| {kind} | {count} | " + " | ".join(f"{100 * value:.1f} %" for value in values) + " | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument(
        "--sweeps", type=int, default=2, help="rounds with other lengths: half of them are for the test"
    )
    parser.add_argument("--output", help="write OUTPUT.json and OUTPUT.md")
    parser.add_argument("--plans", help="keep the recording there")
    parser.add_argument("--with", dest="others", nargs="*", default=[], help="recordings that are judged with this one")
    arguments = parser.parse_args()
    sweep = sum(1 for _ in itertools.takewhile(lambda one: one.kind != "mixed", rounds(64, 2048, 2048)))
    endless = (each for each in rounds(64, 2048, 2048) if each.rate is None)
    chosen = list(itertools.islice(endless, arguments.sweeps * sweep))
    with tempfile.TemporaryDirectory() as folder:
        plans = Path(arguments.plans or Path(folder) / "plans")
        repetitions = run_rounds(chosen, arguments.seconds, plans)
        recordings = [list(read_plans(path)) for path in (plans, *arguments.others)]
    result: dict[str, Any] = {
        "machine": report.machine(),
        "repetitions": repetitions * len(recordings),
        "rounds": len(chosen),
    }
    for name, measure in (("execution", executions), ("period", periods)):
        result[name] = judged(grouped(recordings, chosen, measure))
    print(as_markdown(result))
    if arguments.output:
        stem = Path(arguments.output)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(as_markdown(result))


if __name__ == "__main__":
    main()
