"""Measure the memory that sequences of one request save by sharing blocks, as the PagedAttention paper reports it.

    python benchmarks/sharing.py [--text README.md] [--out benchmarks/results/sharing.md]

The figure is the paper's (Kwon et al., SOSP 2023, section 6.3, figure 15): blocks saved by sharing, divided by the
blocks that would be held without sharing, summed over all steps. Lengths are lognormal around the means of the paper's
two datasets; no prefix is cached, so that requests share nothing with each other. For parallel samples the tokens do
not matter, and a fixed rule draws them; beams follow a real model over windows of a text, because it depends on the
model how soon beams have a common ancestor.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import this_machine
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.kvcache.block import NULL_BLOCK
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId, SequenceStatus
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.scheduler import Scheduler

WIDTHS = (2, 4, 6, 8)
BLOCK_SIZE = 16
SIGMA = 0.7
MAX_LENGTH = 1500


@dataclass(frozen=True)
class Lengths:
    """Mean input and output tokens, from the paper's section 6.1; `paper` holds figure 15, in per cent."""

    name: str
    prompt: float
    output: float
    beam_requests: int
    paper: dict[str, str]


DATASETS = (
    Lengths("Alpaca", 19.31, 58.45, 12, {"samples": "6.1 to 9.8", "beams": "37.6 to 55.2"}),
    Lengths("ShareGPT", 161.31, 337.99, 3, {"samples": "16.2 to 30.5", "beams": "44.3 to 66.3"}),
)


@dataclass
class Held:
    """Blocks held, summed over steps, and the number of blocks copied on a write."""

    without_sharing: int = 0
    with_sharing: int = 0
    copied: int = 0

    @property
    def saved(self) -> float:
        return 1 - self.with_sharing / self.without_sharing


def drive(scheduler: Scheduler, execute: Callable[[StepPlan], StepResult], requests: list[Request]) -> Held:
    """Compute all requests, and count the blocks of their tables after each step is planned."""
    held = Held()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        running = [s for r in requests for s in r.sequences if s.status is SequenceStatus.RUNNING]
        tables = [block for s in running for table in scheduler.kv.tables(s) for block in table if block != NULL_BLOCK]
        held.without_sharing += len(tables)
        held.with_sharing += len(set(tables))
        held.copied += len(plan.copies)
        scheduler.update(plan, execute(plan))
    scheduler.kv.audit()
    return held


def lengths(dataset: Lengths, count: int) -> Iterator[tuple[int, int]]:
    rng = random.Random(0)

    def draw(mean: float) -> int:
        return min(MAX_LENGTH, max(1, round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))))

    return ((draw(dataset.prompt), draw(dataset.output)) for _ in range(count))


def samples(dataset: Lengths, n: int, count: int = 200) -> Held:
    spec = KVCacheSpec.build([LayerKVSpec(1, 1, 1)], BLOCK_SIZE, "float32")
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=4096, enable_prefix_caching=False)
    scheduler = assemble_scheduler(config, assemble_cache(config, spec, 200_000), max_model_len=4096)
    requests = [
        Request(RequestId(f"r{i}"), list(range(tokens)), SamplingParams(n=n, max_tokens=output, ignore_eos=True))
        for i, (tokens, output) in enumerate(lengths(dataset, count))
    ]
    return drive(scheduler, lambda plan: StepResult((7,) * plan.num_draws), requests)


def beams(llm: LLM, text: list[int], dataset: Lengths, width: int) -> Held:
    requests = []
    for i, (tokens, output) in enumerate(lengths(dataset, dataset.beam_requests)):
        first = random.Random(i).randrange(len(text) - tokens)
        params = SamplingParams(use_beam_search=True, n=width, max_tokens=output, ignore_eos=True)
        requests.append(llm.core.make_request(text[first : first + tokens], params))
    return drive(llm.core.scheduler, llm.core.runner.execute, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="followed by the beams")
    parser.add_argument("--text", type=Path, default=Path("README.md"), help="what their prompts are cut from")
    parser.add_argument("--out", type=this_machine.output_file, help="write the table there")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, block_size=BLOCK_SIZE, enable_prefix_caching=False, max_model_len=2 * MAX_LENGTH)
    text = llm.tokenizer.encode(arguments.text.read_text())
    lines = [
        "# Memory saved by sharing",
        "",
        f"`python benchmarks/sharing.py`, Python {platform.python_version()}, blocks of {BLOCK_SIZE}; beams of "
        f"{arguments.model} over windows of {arguments.text.name}. Blocks saved / blocks without sharing, summed over "
        "the steps, and blocks copied on a write per sequence. The last column is what the PagedAttention paper says "
        "(figure 15, OPT-13B, the datasets themselves), from its least to its greatest width.",
        "",
        "| lengths | mode | " + " | ".join(str(width) for width in WIDTHS) + " | paper |",
        "|---|---|" + "---:|" * (len(WIDTHS) + 1),
    ]
    for dataset in DATASETS:
        rows = {
            "samples": {n: (samples(dataset, n), 200 * n) for n in WIDTHS},
            "beams": {w: (beams(llm, text, dataset, w), dataset.beam_requests * w) for w in WIDTHS},
        }
        for mode, row in rows.items():
            cells = [f"{held.saved:.1%} ({held.copied / count:.1f})" for held, count in row.values()]
            lines.append(f"| {dataset.name} | {mode} | {' | '.join(cells)} | {dataset.paper[mode]}% |")
            print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.out:
        arguments.out.write_text(table)


if __name__ == "__main__":
    main()
