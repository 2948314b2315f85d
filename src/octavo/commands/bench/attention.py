"""`octavo bench attention`: paged against contiguous memory, with the same kernel and lengths."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.commands.common_options import add_json_option, block_sizes, positive, positives, thread_count
from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS
from octavo.planner.machine import default_num_threads
from octavo.workloads import report

if TYPE_CHECKING:
    from octavo.workloads.attention import Kind

KINDS: tuple[Kind, ...] = ("decode", "prefill")

DESCRIPTION = "Time decode and prefill attention at several block sizes in turns, over shuffled blocks."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="what to time; may be given twice (default: both)"
    )
    parser.add_argument(
        "--attention-backend",
        choices=("native", "reference"),
        action="append",
        help="implementation to time; may be given twice (default: native where it runs, and reference)",
    )
    parser.add_argument(
        "--contexts",
        type=positives,
        default="512,1024,2048,4096,8192,16384",
        metavar="N,…",
        help="tokens of context",
    )
    parser.add_argument(
        "--block-sizes",
        type=block_sizes,
        default="16,32,max",
        metavar="N|max,…",
        help="tokens per block; max: one block",
    )
    parser.add_argument(
        "--heads",
        default="9,3,64",
        metavar="Q,KV,DIM",
        help="query heads, KV heads and head size of a layer (default: SmolLM2's 9,3,64)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=tuple(KV_FORMATS),
        help="format of keys and values; with a codec, queries are bfloat16",
    )
    parser.add_argument(
        "--working-set-mib",
        type=positive,
        default=256,
        metavar="N",
        help="size of the working set that is cycled through, in MiB (default: 256, which is read from DRAM)",
    )
    parser.add_argument("--seconds", type=float, default=1.0, metavar="X", help="seconds per measurement")
    parser.add_argument("--num-threads", type=thread_count, metavar="N", help="number of threads (default: all cores)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    heads = positives(args.heads)
    if len(heads) != 3 or heads[0] % heads[1]:
        raise ConfigError(f"--heads must be Q,KV,DIM with Q a multiple of KV, got {args.heads}")

    from octavo import __version__, kernels
    from octavo.workloads.attention import HeadCounts, cases, measure_case
    from octavo.workloads.machine_limits import read_bandwidth
    from octavo.workloads.timing import threads

    backends = args.attention_backend or (["native"] if kernels.available() else []) + ["reference"]
    count = args.num_threads or default_num_threads()
    figures: list[dict[str, Any]] = []
    with threads(count):
        read = read_bandwidth("read", args.working_set_mib << 20, count, seconds=args.seconds).value
        for case in cases(
            args.kind or KINDS,
            backends,
            args.contexts,
            heads=HeadCounts(*heads),
            dtype=args.dtype,
        ):
            figures += measure_case(
                case, args.block_sizes, working_set=args.working_set_mib << 20, seconds=args.seconds
            )
        # Measure it again, because a disturbance at the start would make every share of the bandwidth too large.
        read = max(read, read_bandwidth("read", args.working_set_mib << 20, count, seconds=args.seconds).value)
    machine = {**report.machine(), "isa": kernels.isa() if kernels.available() else None, "threads": count}
    result: dict[str, Any] = {
        "bench": "attention",
        "version": __version__,
        "heads": {"query": heads[0], "kv": heads[1], "dim": heads[2]},
        "read_gb_per_s": read,
        "worst_slower_percent": {
            backend: {str(size): _worst(figures, size, backend) for size in args.block_sizes if size != "max"}
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
