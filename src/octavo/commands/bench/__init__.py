"""`octavo bench NAME`. A new benchmark is a module with a `COMMAND` that is listed here."""

from __future__ import annotations

import argparse

from octavo.commands.base import Command, add_command
from octavo.commands.bench import attention, latency, limits, memory, serve, throughput

BENCHES: tuple[Command, ...] = (
    throughput.COMMAND,
    serve.COMMAND,
    latency.COMMAND,
    memory.COMMAND,
    attention.COMMAND,
    limits.COMMAND,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for command in BENCHES:
        add_command(subparsers, command)


def _no_run(args: argparse.Namespace) -> int:
    raise AssertionError("argparse requires a benchmark, whose own run takes this one's place")


COMMAND = Command("bench", "measure an engine or a server", add_arguments, _no_run)
