"""`octavo calibrate`: choose the scales of a KV cache, or a codec for each layer, by running a model over text."""

from __future__ import annotations

import argparse

from octavo.commands.base import Command
from octavo.commands.common_options import add_json_option, add_window_options
from octavo.commands.options import add_engine_options

DESCRIPTION = """\
Run a model over text and choose how to quantise its KV cache (docs/kv_codecs.md). Without --search: write the scales of
an fp8 or nvfp4 cache to a file beside the model, where `octavo serve` finds it. With --search: write a codec for the
keys and the values of each layer, for --kv-cache-dtype FILE.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration options")
    group.add_argument("--data", metavar="FILE", help="text to calibrate with; default: Python's own documentation")
    group.add_argument(
        "--output", metavar="FILE", help="file to write; default: beside the model; with --search: kv_cache_table.toml"
    )
    add_window_options(group, "8; with --search: 2", "512; with --search: 256")
    group.add_argument(
        "--method",
        choices=("max", "percentile", "mse"),
        default="mse",
        help="how scales are chosen; max: no value is clipped; percentile: --percentile of each head's values are not "
        "clipped; mse: the smallest squared error (default: %(default)s)",
    )
    group.add_argument(
        "--percentile",
        type=float,
        default=99.99,
        metavar="P",
        help="percentile for --method percentile (default: %(default)g)",
    )
    group.add_argument(
        "--search", action="store_true", help="search for a codec for the keys and the values of each layer"
    )
    group.add_argument(
        "--bits",
        type=float,
        default=6.0,
        metavar="B",
        help="with --search: mean bits per value, without scales (default: 6)",
    )
    group.add_argument(
        "--candidates",
        default="int8,int4",
        metavar="NAME,…",
        help="with --search: codecs to choose from (default: %(default)s)",
    )
    group.add_argument(
        "--exchanges",
        type=int,
        default=12,
        metavar="N",
        help="with --search: number of measured attempts to improve the table (default: 12)",
    )
    add_json_option(parser)
    add_engine_options(parser, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.commands.calibrate_run import run

    return run(args)


COMMAND = Command(
    "calibrate",
    "choose a KV cache's scales, or a codec for each layer, by running text",
    add_arguments,
    run,
    DESCRIPTION,
)
