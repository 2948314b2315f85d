"""`octavo bench NAME`. A new benchmark is a module like that of a command, and a line here."""

from __future__ import annotations

import argparse

from octavo.commands.base import add_commands

BENCHES = {
    "throughput": "offline throughput of an engine",
    "serve": "latency and throughput of a server under load",
    "latency": "latency of one batch",
    "memory": "blocks against contiguous memory: waste, sequences at once, throughput",
    "attention": "attention over blocks against one contiguous block",
    "cpu": "this machine's limits, and how close models come to them",
}
"""Name and summary of each benchmark, in the order of `octavo bench --help`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_commands(parser, BENCHES, "octavo.commands.bench", title="benchmarks", metavar="BENCHMARK")
