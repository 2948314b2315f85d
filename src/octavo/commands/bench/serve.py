"""`octavo bench serve`: an open-loop client for this server, or any other with OpenAI's completions API."""

from __future__ import annotations

import argparse

from octavo.commands.base import Command
from octavo.commands.bench.workload_options import add_workload_options
from octavo.commands.common_options import add_json_option, add_rate_options
from octavo.commands.options import add_engine_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("client options")
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="URL of a running server, which knows the model as --model (default: start one with the engine options)",
    )
    group.add_argument("--api-key", metavar="KEY", help="key to send as a bearer token")
    add_rate_options(group)
    group.add_argument("--max-concurrency", type=int, metavar="N", help="maximum number of requests in flight")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="timeout of a request (default: 600)"
    )
    group.add_argument(
        "--return-token-ids",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request the token ids of each chunk (default: on; off for a server that refuses the field)",
    )
    add_json_option(parser)
    add_workload_options(parser)
    add_engine_options(parser, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from octavo.commands.bench.serve_run import run

    return run(args)


COMMAND = Command(
    "serve",
    "latency and throughput of a server under load",
    add_arguments,
    run,
    "Send streaming completions at their scheduled times (open loop) and report latency and throughput.",
)
