"""`octavo bench attention`: paged against contiguous memory, with the same kernel and lengths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from octavo.commands.common_options import add_json_option, thread_option
from octavo.commands.options import add_options, given_options
from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS
from octavo.option import Options, option
from octavo.planner.machine import default_num_threads
from octavo.workloads import report

DESCRIPTION = "Time decode and prefill attention at several block sizes in turns, over shuffled blocks."


_bench = partial(option, group="attention options")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions(Options):
    """The options of `octavo bench attention`."""

    kind: Sequence[Literal["decode", "prefill"]] = _bench(
        ("decode", "prefill"), "what to time; may be given twice (default: both)"
    )
    attention_backend: Sequence[Literal["native", "reference"]] = _bench(
        (), "implementation to time; may be given twice (default: native where it runs, and reference)"
    )
    contexts: Sequence[int] = _bench((512, 1024, 2048, 4096, 8192, 16384), "tokens of context", least=1)
    block_sizes: Sequence[int | Literal["max"]] = _bench(
        (16, 32, "max"), "tokens per block; max: one block", least=1, metavar="N|max,…"
    )
    heads: Sequence[int] = _bench(
        (9, 3, 64), "query heads, KV heads and head size of a layer, as SmolLM2's", least=1, metavar="Q,KV,DIM"
    )
    dtype: Literal[*KV_FORMATS] = _bench(  # type: ignore[valid-type]
        "bfloat16", "format of keys and values; with a codec, queries are bfloat16"
    )
    working_set_mib: int = _bench(
        256, "size of the working set that is cycled through, in MiB; the default is read from DRAM", least=1
    )
    seconds: float = _bench(1.0, "seconds per measurement", least=0)
    num_threads: int | None = thread_option("number of threads (default: all cores)", group="attention options")

    def _check_together(self) -> None:
        if len(self.heads) != 3 or self.heads[0] % self.heads[1]:
            raise ConfigError(f"heads must be Q,KV,DIM with Q a multiple of KV, got {','.join(map(str, self.heads))}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)
    add_options(parser, AttentionOptions)


def run(args: argparse.Namespace) -> int:
    asked = AttentionOptions(**given_options(args, AttentionOptions))
    heads, working_set = asked.heads, asked.working_set_mib << 20

    from octavo import __version__, kernels
    from octavo.workloads.attention import HeadCounts, cases, measure_case
    from octavo.workloads.machine_limits import read_bandwidth
    from octavo.workloads.timing import threads

    own = ("native", "reference") if kernels.available() else ("reference",)
    backends: Sequence[str] = asked.attention_backend or own
    count = asked.num_threads or default_num_threads()
    figures: list[dict[str, Any]] = []
    with threads(count):
        read = read_bandwidth("read", working_set, count, seconds=asked.seconds).value
        for case in cases(asked.kind, backends, asked.contexts, heads=HeadCounts(*heads), dtype=asked.dtype):
            figures += measure_case(case, asked.block_sizes, working_set=working_set, seconds=asked.seconds)
        # Measure it again, because a disturbance at the start would make every share of the bandwidth too large.
        read = max(read, read_bandwidth("read", working_set, count, seconds=asked.seconds).value)
    machine = {**report.machine(), "isa": kernels.isa() if kernels.available() else None, "threads": count}
    result: dict[str, Any] = {
        "bench": "attention",
        "version": __version__,
        "heads": {"query": heads[0], "kv": heads[1], "dim": heads[2]},
        "read_gb_per_s": read,
        "worst_slower_percent": {
            backend: {str(size): _worst(figures, size, backend) for size in asked.block_sizes if size != "max"}
            for backend in backends
        },
        "machine": machine,
    }
    if args.json:
        print(report.as_json_line({**result, "figures": figures}))
    else:
        print("\n".join(_tables(result, figures)))
    return 0


def _worst(figures: list[dict[str, Any]], block_size: int, backend: str) -> float | None:
    """Return the largest `slower_percent` of a block size over all kinds and contexts; None if there is none."""
    slower = (f["slower_percent"] for f in figures if (f["block_size"], f["backend"]) == (block_size, backend))
    return max((each for each in slower if each is not None), default=None)


def _tables(result: dict[str, Any], figures: list[dict[str, Any]]) -> list[str]:
    read = result["read_gb_per_s"]
    rows = []
    for f in figures:
        rate, slower = f["gb_per_s"], f["slower_percent"]
        share = "-" if rate is None else f"{100 * rate / read:.0f} %"
        against = "-" if slower is None or f["block_size"] == "max" else f"{slower:+.1f} %"
        times = map(report.show, (f["microseconds"], rate))
        row = (f["kind"], f["backend"], f"{f['seqs']} x {f['context']}", f["block_size"], *times)
        rows.append((*row, share, report.show(f["gflop_per_s"]), against))
    heading = ("", "backend", "seqs x context", "block", "µs", "GB/s", "of read", "GFLOP/s", "vs contiguous")
    shown = {
        "heads": result["heads"],
        "read_gb_per_s": read,
        **{f"worst of {name}, % slower": worst for name, worst in result["worst_slower_percent"].items()},
        "machine": result["machine"],
    }
    return [*report.columns(heading, rows), "", report.as_table(shown)]
