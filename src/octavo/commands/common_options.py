"""Options that several commands share, with the same name and meaning."""

from __future__ import annotations

import argparse
from functools import partial

from octavo.config import MOST_THREADS
from octavo.option import option

thread_option = partial(option, None, least=1, most=MOST_THREADS)


def add_json_option(parser: argparse.ArgumentParser, instead_of: str = "a table") -> None:
    """Add `--json`, which prints a line of JSON instead of tables."""
    parser.add_argument(
        "--json", action="store_true", help=f"print one JSON object on the last line instead of {instead_of}"
    )
