"""Incremental audits: invariants are checked in slices, without delaying requests.

A check yields None wherever it may pause, a few hundred entries apart, and a sentence for each violation. If it is
abandoned, its findings so far are valid, and the rest is unknown. Nothing may change between two slices: after any
change to the cache, its checks must be restarted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from octavo.errors import CacheError
from octavo.kvcache.block import BlockState

Findings = Iterator[str | None]

# Entries between two pauses, which take a few tenths of a millisecond.
SLICE = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Audit:
    """The number of blocks in each state; `num_host` counts the blocks of host memory that swapped sequences hold."""

    counts: dict[BlockState, int] = field(default_factory=dict)
    num_sequences: int = 0
    num_swapped: int = 0
    num_host: int = 0


def in_slices(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of `SLICE`."""
    iterator = iter(items)
    while batch := list(islice(iterator, SLICE)):
        yield batch


def problems(findings: Findings) -> list[str]:
    """Return every problem that a check finds, without pausing."""
    return [finding for finding in findings if finding is not None]


def proven(findings: Findings) -> Generator[None, None, None]:
    """Run every check, with pauses; raises `CacheError` at the end if there were violations, listing all of them."""
    found: list[str] = []
    for finding in findings:
        if finding is None:
            yield
        else:
            found.append(finding)
    if found:
        raise CacheError("audit failed: " + "; ".join(found))


def counted(states: Iterable[BlockState]) -> Generator[None, None, dict[BlockState, int]]:
    """Count the blocks in each state, with pauses."""
    counts: Counter[BlockState] = Counter()
    for batch in in_slices(states):
        counts.update(batch)
        yield
    return dict(counts)
