"""The definition of a command, and its conversion into a subparser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Command:
    """One command, `octavo NAME …`.

    Attributes:
        summary: the command's line in the list of commands.
        add_arguments: declares the command's options; must not import anything heavy.
        run: executes the command and returns the exit code; imports what it needs.
        description: the text above the options in `octavo NAME --help`; by default, `summary` as a sentence.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str = ""


def add_command(subparsers: argparse._SubParsersAction[Any], command: Command) -> None:
    """Add `command` to the choices of `subparsers`."""
    description = command.description or f"{command.summary[0].upper()}{command.summary[1:]}."
    parser = subparsers.add_parser(command.name, help=command.summary, description=description, allow_abbrev=False)
    command.add_arguments(parser)
    parser.set_defaults(run=command.run, command_parser=parser)
