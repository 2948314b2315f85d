"""`octavo bench cpu`: the hardware limits of this machine, and how close models come to them."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from octavo.commands.common_options import add_json_option, thread_option
from octavo.commands.options import add_options, given_options
from octavo.option import Options, option
from octavo.workloads import report

if TYPE_CHECKING:
    from octavo.workloads.machine_limits import Limit
    from octavo.workloads.scoreboard import Score

DESCRIPTION = "Measure this machine's limits, and how close models come to them."


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOptions(Options):
    """The options of `octavo bench cpu`."""

    num_threads: int | None = thread_option("number of threads to compare with one (default: all cores)")
    seconds: float = option(0.5, "seconds per measurement", least=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models to measure, as for `octavo serve`")
    add_json_option(parser)
    add_options(parser, CpuOptions)


def run(args: argparse.Namespace) -> int:
    from octavo import __version__, kernels
    from octavo.workloads.machine_limits import measure_limits, thread_counts
    from octavo.workloads.scoreboard import score

    asked = CpuOptions(**given_options(args, CpuOptions))
    counts = thread_counts(asked.num_threads)
    limits = list(measure_limits(counts, seconds=asked.seconds))
    scores = [score(model, counts[-1]) for model in args.models]
    machine = {**report.machine(), "isa": kernels.isa() if kernels.available() else None}
    if args.json:
        found = {"limits": [asdict(limit) for limit in limits], "models": [asdict(score) for score in scores]}
        print(report.as_json_line({"bench": "cpu", "version": __version__, **found, "machine": machine}))
        return 0
    print(report.as_table({"version": __version__, "machine": machine}))
    columns = ("limit", "threads", "median", "best", "", "by")
    rows = [(x.name, x.threads, report.show(x.value), report.show(x.best), x.unit, x.how) for x in limits]
    print("\n".join(report.columns(columns, rows)))
    if scores:
        print("\n".join(_score_table(scores, limits)))
    return 0


def _score_table(scores: list[Score], limits: list[Limit]) -> list[str]:
    (dram,) = (x.value for x in limits if x.name == "read from DRAM" and x.threads == scores[0].threads)
    columns = ("model", "tok/s, 1 stream", "GB/s of weights", "of DRAM's", "tok/s, 8 streams", "prompt tok/s")
    rows = [
        (
            x.model,
            _beside(x.decode_tokens_s, x.llamacpp_decode_tokens_s),
            report.show(x.weights_gb_s),
            f"{100 * x.weights_gb_s / dram:.0f} %",
            report.show(x.streams_tokens_s),
            _beside(x.prompt_tokens_s, x.llamacpp_prompt_tokens_s),
            "-" if x.prompt_gop_s is None else report.show(x.prompt_gop_s),
        )
        for x in scores
    ]
    return ["", *report.columns((*columns, "GOP/s a thread"), rows)]


def _beside(ours: float, llamacpp: float | None) -> str:
    return report.show(ours) if llamacpp is None else f"{report.show(ours)} (llama.cpp {report.show(llamacpp)})"
