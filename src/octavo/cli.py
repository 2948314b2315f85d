"""The `octavo` command: reads the command line, hands over to `octavo.commands`, and turns errors into exit codes.

Exit codes: 0 done; 1 an error, told in one line on stderr; 2 wrong usage; 130 interrupted.
Nothing heavy is imported here or in the commands' modules before a command runs, so that `--help` is immediate.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.commands import COMMANDS, add_command
from octavo.errors import OctavoError, shown
from octavo.option import nearest

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_MOST_IN_USAGE = 12
# argparse's own message.
_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong usage leaves through argparse's `SystemExit(2)`."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except OctavoError as error:
        print(f"octavo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`octavo generate … | head`). Python would complain again when it flushes
        # stdout at exit, so stdout is pointed at nothing first.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, one subparser a command."""
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
    """Help whose first line names the arguments, and the options only where they are few: they are listed below."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        needed = [action for action in actions if not action.option_strings or action.required]
        if usage is None and len(actions) > _MOST_IN_USAGE:
            text = self._format_usage(None, needed, [], prefix)
            self._add_item(lambda: text.replace(self._prog, f"{self._prog} [options]", 1), [])
        else:
            super().add_usage(usage, actions, groups, prefix)


class OneLineParser(argparse.ArgumentParser):
    """Tells wrong usage in one line: what is wrong, and where to look it up."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _ShortUsage, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown, parsed))
        return parsed

    def error(self, message: str) -> NoReturn:
        if (wrong := _INVALID_CHOICE.search(message)) is not None:
            hint = nearest(wrong[1], re.findall(r"[^\s',]+", wrong[2]))
            message = message[: wrong.start(2) - len(" (choose from ")] + hint if "did you mean" in hint else message
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _unknown(words: Sequence[str], args: argparse.Namespace) -> str:
    """What to say of words that mean nothing to the command; of a flag, the one that was meant."""
    word = words[0]
    hint = nearest(word.partition("=")[0], args.flags) if word.startswith("--") else ""
    return f"unknown argument {shown(word)}" + (hint if "did you mean" in hint else "")


class _Version(argparse.Action):
    """Looks the version up only when `--version` is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from octavo import __version__

        print(f"octavo {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
