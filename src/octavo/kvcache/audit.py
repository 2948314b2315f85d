"""Incremental audits: invariants are checked in slices, without delaying requests.

A check yields None wherever it may pause, a few hundred entries apart, and a sentence for each violation. What it has
found when it is left is true; what it has not looked at is unknown. Nothing may change between two slices: whoever
changes the cache starts its checks anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from octavo.kvcache.block import BlockState

Findings = Iterator[str | None]

# Entries between two pauses: some tenths of a millisecond.
SLICE = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Audit:
    """Blocks by state, as found; `num_host` are those of host memory that swapped sequences hold."""

    counts: dict[BlockState, int] = field(default_factory=dict)
    num_sequences: int = 0
    num_swapped: int = 0
    num_host: int = 0


def in_slices(items: Iterable[T]) -> Iterator[list[T]]:
    """The items, `SLICE` at a time."""
    iterator = iter(items)
    while batch := list(islice(iterator, SLICE)):
        yield batch


def problems(findings: Findings) -> list[str]:
    """Every problem that a check finds, without pausing."""
    return [finding for finding in findings if finding is not None]
