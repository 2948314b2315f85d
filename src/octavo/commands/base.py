"""The definition of a command, and how it becomes a subparser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Command:
    """One `octavo NAME …`.

    Attributes:
        summary: the line in the list of commands.
        add_arguments: declares the command's options; must import nothing heavy.
        run: carries the command out and returns the exit code; imports what it needs.
        description: what `octavo NAME --help` says above the options; `summary` where it is empty.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str = ""


def add_command(subparsers: argparse._SubParsersAction[Any], command: Command) -> None:
    """Make `command` one of the choices of `subparsers`."""
    parser = subparsers.add_parser(
        command.name, help=command.summary, description=command.description or command.summary, allow_abbrev=False
    )
    command.add_arguments(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    parser.set_defaults(run=command.run, flags=flags)
