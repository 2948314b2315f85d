"""`octavo bench throughput`: offline throughput, with all requests queued at once."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from octavo.commands.bench.workload_options import WorkloadOptions, clip_to_model, load_requests
from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.option import option
from octavo.workloads import report, throughput

DESCRIPTION = "Measure the throughput of a workload whose requests are all queued at once."


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(WorkloadOptions):
    """The options of `octavo bench throughput`."""

    runs: int = option(1, "report the median of N runs", least=1, group="workload options")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    add_options(parser, ThroughputOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    asked = ThroughputOptions(**given_options(args, ThroughputOptions))
    work = load_requests(asked)
    engine = given_options(args, EngineConfig)

    from octavo import LLM, __version__

    start = time.perf_counter()
    with LLM(**engine) as llm:
        startup_s = time.perf_counter() - start
        work = clip_to_model(work, llm.info.max_model_len, llm.info.vocab_size)
        runs = throughput.measure(llm, work.requests, asked.runs, use_tqdm=sys.stderr.isatty())
        model = llm.config.model
    result = {
        "bench": "throughput",
        "version": __version__,
        "model": model,
        "options": engine,
        "workload": work.name,
        "clipped": work.num_clipped,
        **throughput.summary(runs),
        "startup_s": round(startup_s, 3),
        "machine": report.machine(),
    }
    print(report.as_json_line(result) if args.json else report.as_table(result))
    return 0
