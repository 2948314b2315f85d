"""`octavo bench throughput`: offline throughput, with all requests queued at once."""

from __future__ import annotations

import argparse
import sys
import time

from octavo.commands.bench.workload_options import add_workload_options, clip_to_model, load_requests
from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.workloads import report, throughput

DESCRIPTION = "Measure the throughput of a workload whose requests are all queued at once."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="report the median of N runs")
    add_json_option(parser)
    add_workload_options(parser)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    if args.runs < 1:
        raise ConfigError(f"--runs must be at least 1, got {args.runs}")
    work = load_requests(args)
    engine = given_options(args, EngineConfig)

    from octavo import LLM, __version__

    start = time.perf_counter()
    with LLM(**engine) as llm:
        startup_s = time.perf_counter() - start
        work = clip_to_model(work, llm.info.max_model_len, llm.info.vocab_size)
        runs = throughput.measure(llm, work.requests, args.runs, use_tqdm=sys.stderr.isatty())
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
