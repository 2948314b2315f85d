"""`octavo completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from octavo.commands.base import load_commands

SHELLS = ("bash", "zsh", "fish", "tcsh")

DESCRIPTION = """\
Write a script that completes octavo's commands and options:
octavo completion bash > ~/.local/share/bash-completion/completions/octavo
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read the script")


def run(args: argparse.Namespace) -> int:
    import shtab

    load_commands(args.parser)
    print(shtab.complete(args.parser, shell=args.shell))
    return 0
