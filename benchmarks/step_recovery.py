"""Measure how long decode steps of one row take after a chunk of a prompt, decodes of many rows, or a pause.

    python benchmarks/step_recovery.py         # 20 seconds; the machine must be idle

Every such step does the same work, so what differs is the state that earlier steps left the processor in
(`simulator/coldness.py`). The table has the median step of each place in the series that follows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench import report
from octavo.bench.workload import random_token_ids
from octavo.scheduler.plan_log import RecordedStep, read_plans

MODEL = "smollm2"
ENGINE = {"num_blocks": 2049, "max_model_len": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
VOCABULARY = 40_000
LENGTH = 24
PAUSE_S = 0.25
CHUNKS, ROWS = (8, 24, 100, 600), (8, 32)
PLACES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24)


class Sleeper:
    """Makes an engine pause once, before the n-th step from now."""

    def __init__(self, core: Any) -> None:
        self.left = 0
        self._step = core.step
        core.step = self

    def __call__(self) -> Any:
        self.left -= 1
        if self.left == 0:
            time.sleep(PAUSE_S)
        return self._step()


def record(seconds: float, plans: Path) -> list[tuple[str, float, float]]:
    """Run every kind again and again until the time is up; returns each run's kind, beginning and end."""
    rng, runs = random.Random(0), []
    with LLM(MODEL, record_plans=str(plans), **ENGINE) as llm:
        sleeper = Sleeper(llm.core)

        def run(kind: str, prompt_lens: Sequence[int], output_lens: Sequence[int]) -> None:
            prompts: Any = [{"prompt_token_ids": random_token_ids(rng, n, VOCABULARY)} for n in prompt_lens]
            params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in output_lens]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            runs.append((kind, began, time.perf_counter()))

        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            for chunk in CHUNKS:
                run(f"a chunk of {chunk}", [chunk], [LENGTH + 2])
            for rows in ROWS:
                run(f"12 decodes of {rows} rows", [8] * rows, [12] * (rows - 1) + [LENGTH + 14])
            sleeper.left = 24
            run(f"a pause of {PAUSE_S} s", [8], [LENGTH + 24])
    return runs


def series_after(kind: str, steps: Sequence[RecordedStep]) -> list[float]:
    """The seconds of the steps of one row that follow the last other step or, of a pause, the pause."""
    if "pause" in kind:
        return [step.seconds for step in steps[-LENGTH:]]
    last = max(i for i, step in enumerate(steps) if sum(step.lengths) > 1)
    return [step.seconds for step in steps[last + 1 :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=18.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plans = Path(folder) / "plans"
        runs = record(arguments.seconds, plans)
        steps = list(read_plans(plans))
    found = defaultdict(list)
    for kind, began, ended in runs:
        found[kind].append(series_after(kind, [step for step in steps if began <= step.at < ended]))
    machine = report.machine()
    print(f"`python benchmarks/step_recovery.py`, {machine['cores']} cores of {machine['cpu']}; {MODEL}, ", end="")
    print(f"medians of {len(runs) // len(found)} runs, milliseconds\n")
    print("| step after | " + " | ".join(map(str, PLACES)) + " |\n" + "|---" * (len(PLACES) + 1) + "|")
    for kind, series in found.items():
        cells = [f"{1e3 * statistics.median(one[place - 1] for one in series):.1f}" for place in PLACES]
        print(f"| {kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
