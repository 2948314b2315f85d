"""`octavo bench memory`: the paged cache against a contiguous one, or codecs, at one memory budget."""

from __future__ import annotations

import argparse

from octavo.commands.common_options import add_json_option, add_seed_option, block_sizes, positive
from octavo.commands.options import add_options
from octavo.config import EngineConfig
from octavo.workloads.workload import NAMED_WORKLOADS

DESCRIPTION = """\
Play the same requests at one memory budget with several block sizes; 'max' is one contiguous block of max_model_len
tokens per sequence (default: 2048, or less if the model supports less).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison options")
    group.add_argument(
        "--simulate",
        action="store_true",
        help="compute nothing: real scheduler and cache, exact memory, times by --gb-s and --gflop-s; MODEL may be any "
        "that `octavo plan` knows",
    )
    group.add_argument(
        "--block-sizes",
        type=block_sizes,
        metavar="N|max,…",
        help="block sizes to compare; the kernels need multiples of 16 (default: 16,max; with --simulate: "
        "1,2,4,…,256,max)",
    )
    group.add_argument(
        "--codecs",
        metavar="NAME,…",
        help="compare codecs of the KV cache, with the model's own type, instead of block sizes; all: all of them; "
        "nvfp4 is slow on a CPU, which has no kernel for it",
    )
    group.add_argument(
        "--contiguous-seqs",
        type=positive,
        default=8,
        metavar="N",
        help="without --kv-cache-memory, the budget is what N sequences of max_model_len reserve",
    )
    group.add_argument(
        "--workload",
        metavar="NAME,…",
        help=f"{NAMED_WORKLOADS} (default: mixed64,sharegpt64; with --simulate 512 each; none with --trace)",
    )
    group.add_argument(
        "--trace",
        action="append",
        metavar="FILE",
        help="also use the lengths of a trace, scaled so that 99 of 100 requests fit max_model_len; may be repeated",
    )
    group.add_argument(
        "--num-prompts",
        type=positive,
        metavar="N",
        help="number of requests from each trace (default: 64; with --simulate: 512)",
    )
    group.add_argument(
        "--runs", type=positive, default=1, metavar="N", help="report the median of N runs, with block sizes in turns"
    )
    group.add_argument("--gb-s", type=float, default=20.0, metavar="X", help="simulated memory bandwidth in GB/s")
    group.add_argument("--gflop-s", type=float, default=400.0, metavar="X", help="simulated arithmetic in GFLOP/s")
    add_seed_option(group)
    group.add_argument("--output", metavar="PATH", help="write PATH.json, PATH.md and PATH.png (needs matplotlib)")
    add_json_option(parser, "tables")
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.commands.bench.memory_comparison import run

    return run(args)
