"""`octavo top`: show the live page of a running server in a terminal."""

from __future__ import annotations

import argparse

from octavo.commands.base import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the server (default: %(default)s)",
    )
    parser.add_argument(
        "--admin-key", metavar="KEY", help="admin key, if the server has API keys (default: $OCTAVO_ADMIN_KEY)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the current state and exit, as it does if the output is not a terminal",
    )


def run(args: argparse.Namespace) -> int:
    from octavo.commands.top_run import run

    return run(args)


COMMAND = Command(
    "top",
    "watch a server's cache and requests in the terminal",
    add_arguments,
    run,
    "Show the KV cache, requests and latencies of a running server, like its live page. Press Ctrl-C to quit.",
)
