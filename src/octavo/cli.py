"""The `octavo` command: parses the command line, runs a command of `octavo.commands`, and turns errors into exit codes.

Exit codes: 0 success; 1 an error, reported in one line on stderr; 2 wrong usage; 130 interrupted.
A command's module is imported when the command is used, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from octavo.commands import COMMANDS
from octavo.commands.base import OneLineParser, add_commands
from octavo.errors import OctavoError, how_to_install

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130

# A disk, or a user's part of it, has no room; or the user may not read or write there.
_REPORTED = {errno.ENOSPC: "write", errno.EDQUOT: "write", errno.EROFS: "write", errno.EACCES: "open"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; wrong usage raises argparse's `SystemExit(2)`."""
    try:
        args = build_parser().parse_args(argv)
        code = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # so that an error is reported below, not when Python exits
        return code
    except OctavoError as error:
        print(f"octavo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "octavo").startswith("octavo"):
            raise
        print(f"octavo: error: the package {error.name} is missing: {how_to_install('octavo')}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if (action := _REPORTED.get(error.errno or 0)) is not None:
            where = f" {error.filename}" if error.filename else ""
            print(f"octavo: error: cannot {action}{where}: {error.strerror}", file=sys.stderr)
        elif not isinstance(error, BrokenPipeError):
            raise
        # The disk is full, or the reader of our output has exited (`octavo generate … | head`). Python would report
        # that again when it flushes stdout at exit, so redirect stdout to /dev/null first.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line, with one subparser per command."""
    parser = OneLineParser(prog="octavo", description="Serve and run language models from a paged KV cache.")
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    parser.set_defaults(parser=parser)  # for `octavo completion`
    add_commands(parser, COMMANDS, "octavo.commands", title="commands", metavar="COMMAND")
    return parser


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
