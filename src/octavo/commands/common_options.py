"""Options that several commands share, with the same name and meaning, and the types of their values."""

from __future__ import annotations

import argparse
from typing import Literal

from octavo.config import MOST_THREADS
from octavo.workloads.workload import LENGTH_FORMS

INPUT_LEN, OUTPUT_LEN = "64", "128"


def add_json_option(parser: argparse.ArgumentParser, instead_of: str = "a table") -> None:
    """Add `--json`, which prints a line of JSON instead of tables."""
    parser.add_argument(
        "--json", action="store_true", help=f"print one JSON object on the last line instead of {instead_of}"
    )


def add_length_options(
    group: argparse._ArgumentGroup, of: str = "", *, input_len: str = INPUT_LEN, is_set: bool = True
) -> None:
    """Add the options for the lengths of prompts and outputs.

    Args:
        of: the workload that they apply to.
        is_set: whether the defaults are set, or shown only.
    """
    for name, tokens, default in (("--input-len", "prompt", input_len), ("--output-len", "output", OUTPUT_LEN)):
        help = f"{tokens} tokens{of}: {LENGTH_FORMS} (default: {default})"
        group.add_argument(name, default=default if is_set else None, metavar="LENGTHS", help=help)


def add_seed_option(group: argparse._ArgumentGroup, of: str = "lengths and tokens") -> None:
    """Add `--workload-seed`."""
    group.add_argument("--workload-seed", type=int, default=0, metavar="N", help=f"seed of {of}")


def add_window_options(group: argparse._ActionsContainer, windows: int | str, window: int | str) -> None:
    """Add `--windows` and `--window`. A default given as text, which depends on other options, is shown but not set."""
    for name, default, of in (("--windows", windows, "pieces of text"), ("--window", window, "tokens of each piece")):
        value = default if isinstance(default, int) else None
        group.add_argument(name, type=positive, default=value, metavar="N", help=f"{of} (default: {default})")


def positive(text: str) -> int:
    """Parse an integer of at least 1; an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return int(text)


def thread_count(text: str) -> int:
    """Parse a number of threads; an argparse type."""
    if (count := positive(text)) > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_THREADS}, got {text!r}")
    return count


def positives(text: str) -> list[int]:
    """Parse positive integers such as '512,1024'; an argparse type."""
    return [positive(part) for part in text.split(",")]


def block_sizes(text: str) -> list[int | Literal["max"]]:
    """Parse distinct block sizes such as '16,32,max'; an argparse type."""
    sizes: list[int | Literal["max"]] = ["max" if part == "max" else positive(part) for part in text.split(",")]
    if len(set(sizes)) < len(sizes):
        raise argparse.ArgumentTypeError(f"a size occurs twice in {text!r}")
    return sizes
