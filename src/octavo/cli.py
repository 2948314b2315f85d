"""The `octavo` command: parses the command line, runs a command of `octavo.commands`, and turns errors into exit codes.

Exit codes: 0 success; 1 an error, reported in one line on stderr; 2 wrong usage; 130 interrupted.
Neither this module nor the commands' modules import anything heavy before a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.commands import COMMANDS, add_command
from octavo.config import EngineConfig
from octavo.errors import OctavoError, shown
from octavo.option import nearest

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# A disk, or a user's part of it, has no room.
_FULL = (errno.ENOSPC, errno.EDQUOT)

_MOST_IN_USAGE = 12
# What Ollama and vLLM call commands.
_OTHER_COMMANDS = {"run": "chat", "pull": "serve", "ps": "top", "complete": "generate"}
# Matches argparse's own message.
_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; wrong usage raises argparse's `SystemExit(2)`."""
    try:
        args = build_parser().parse_args(argv)
        code = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # so that an error in it is told below, and not when Python exits
        return code
    except OctavoError as error:
        print(f"octavo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno in _FULL:
            where = f" {error.filename}" if error.filename else ""
            print(f"octavo: error: cannot write{where}: {error.strerror}", file=sys.stderr)
        elif not isinstance(error, BrokenPipeError):
            raise
        # The disk is full, or the reader of our output has exited (`octavo generate … | head`). Python would report
        # that again when it flushes stdout at exit, so redirect stdout to /dev/null first.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line, with one subparser per command."""
    parser = OneLineParser(
        prog="octavo", description="Serve and run language models from a paged KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    parser.set_defaults(parser=parser)  # for `octavo completion`
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        add_command(subparsers, command)
    return parser


class _ShortUsage(argparse.HelpFormatter):
    """A help formatter whose usage line leaves the options out if there are many; they are listed below it anyway."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        needed = [action for action in actions if not action.option_strings or action.required]
        if usage is None and len(actions) > _MOST_IN_USAGE:
            text = self._format_usage(None, needed, [], prefix)
            self._add_item(lambda: text.replace(self._prog, f"{self._prog} [options]", 1), [])
        else:
            super().add_usage(usage, actions, groups, prefix)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line: what is wrong, and where to look it up."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _ShortUsage, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # Use the command's own parser if there is one, so that the error names the command and its --help.
            parser = getattr(parsed, "command_parser", self)
            parser.error(_unknown(unknown[0], parser))
        return parsed

    def error(self, message: str) -> NoReturn:
        if (wrong := _INVALID_CHOICE.search(message)) is not None:
            hint = nearest(_OTHER_COMMANDS.get(wrong[1], wrong[1]), re.findall(r"[^\s',]+", wrong[2]))
            message = message[: wrong.start(2) - len(" (choose from ")] + hint if "did you mean" in hint else message
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Return the error message for an unknown argument; for a flag, with the one that was probably meant."""
    message = f"unknown argument {shown(word)}"
    if not word.startswith("--"):
        return message
    name = word[2:].partition("=")[0]
    if (replaced := EngineConfig.REMOVED.get(name.replace("-", "_"))) is not None:
        return f"{message}; it was removed: {replaced}"
    known = [flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    meant = difflib.get_close_matches(name[:80], known, n=1)
    return f"{message}; did you mean --{meant[0]}?" if meant else message


class _Version(argparse.Action):
    """An action that looks the version up only if `--version` is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from octavo import __version__

        print(f"octavo {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
