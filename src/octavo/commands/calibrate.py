"""`octavo calibrate`: choose the scales of a KV cache, or a codec for each layer, by running a model over text."""

from __future__ import annotations

import argparse

from octavo.commands.base import Command
from octavo.commands.common_options import add_json_option, add_window_options
from octavo.commands.options import add_engine_options

DESCRIPTION = """\
Run a model over text and write what its KV cache should be kept in (docs/kv_codecs.md). Without --search: the scales of
an fp8 or nvfp4 cache, in a file beside the model, where octavo serve finds it. With --search: a codec for the keys and
the values of each layer, for --kv-cache-dtype FILE.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration options")
    group.add_argument(
        "--data", metavar="FILE", help="text that the model is calibrated with; default: Python's own documentation"
    )
    group.add_argument(
        "--output", metavar="FILE", help="what is written; default: beside the model; of --search: kv_cache_table.toml"
    )
    add_window_options(group, "8; of --search: 2", "512; of --search: 256")
    group.add_argument(
        "--method",
        choices=("max", "percentile", "mse"),
        default="mse",
        help="max: nothing of the text is cut off; percentile: --percentile of each head's numbers are kept whole; "
        "mse: the least squared error (default: %(default)s)",
    )
    group.add_argument(
        "--percentile", type=float, default=99.99, metavar="P", help="of --method percentile (default: %(default)g)"
    )
    group.add_argument("--search", action="store_true", help="search a codec for the keys and the values of each layer")
    group.add_argument(
        "--bits", type=float, default=6.0, metavar="B", help="of --search: mean bits of a number, scales apart (6.0)"
    )
    group.add_argument(
        "--candidates", default="int8,int4", metavar="NAME,…", help="of --search: codecs to choose from (%(default)s)"
    )
    group.add_argument(
        "--exchanges", type=int, default=12, metavar="N", help="of --search: measured attempts at a better table (12)"
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
