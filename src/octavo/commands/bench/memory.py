"""`octavo bench memory`: the paged cache against a contiguous one, or codecs, at one memory budget."""

from __future__ import annotations

import argparse

from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options, given_options
from octavo.config import EngineConfig
from octavo.workloads.memory_options import MemoryOptions

DESCRIPTION = """\
Play the same requests at one memory budget with several block sizes; 'max' is one contiguous block of max_model_len
tokens per sequence (default: 2048, or less if the model supports less).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser, "tables")
    add_options(parser, MemoryOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.commands.bench.memory_comparison import run

    return run(MemoryOptions(**given_options(args, MemoryOptions)), given_options(args, EngineConfig), args.json)
