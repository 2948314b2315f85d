"""The contract of a medium, on which blocks lie below host memory: keys to bytes, proven on every load.

A medium (files, slabs, Redis) moves the bytes of one block after another, and says why it could not. A `Store` makes it
asynchronous:

    engine's thread                              store's threads
      Store.lookup(key) ───> MISS | HIT | HIT_PENDING
      Store.get(labels, buffers, seconds) ────>  medium.read, in pieces; each block's bytes are proven
      Store.put(label, buffer) ───────────────>  medium.write
      Store.ask(labels, seconds) ─────────────>  medium.ask, where lookup cannot tell
      Transfer.done, .outcomes <───────────────  None, or the reason of a miss
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Protocol, runtime_checkable

from octavo.kvcache.label import Label

LAYOUT_VERSION = 2
"""Of what a block's bytes mean and of how it is proven: part of every key and header."""


class LookupResult(Enum):
    """What is known of a key without asking the medium."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"  # it is on its way there, or only the medium can tell


class Reason(StrEnum):
    """Why a block was not loaded or not stored. All of them are misses; a key is counted under one."""

    ABSENT = "absent"
    CHECKSUM = "checksum"  # bit flips, torn writes, swapped slots
    LABEL = "label"  # another key, parent, or other tokens under this key
    FINGERPRINT = "fingerprint"  # other weights, dtype, codec or block size
    LAYOUT = "layout"
    TRUNCATED = "truncated"
    FORGED = "forged"  # not signed with this server's secret
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    LATE = "late"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    BUSY = "busy"  # as much waits already as may: a write was dropped, a read refused


class Medium(Protocol):
    """What blocks lie on. Called from several threads; may raise anything.

    Attributes:
        name: of the tier.
    """

    name: str

    def contains(self, key: bytes) -> bool | None:
        """Whether it has a key, without waiting for anything; None where only asking would tell."""

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        """Fill the buffers, and prove each; None for one that is what its label says, to the last bit."""

    def write(self, label: Label, payload: memoryview) -> Reason | None:
        """Keep a block; another may have to go for it."""

    def close(self) -> None:
        """Give up files and connections."""


@runtime_checkable
class DistantMedium(Protocol):
    """What a medium has besides where only asking tells what is there."""

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        """Which blocks are there (None), and why others are not; where the first is not there, none is asked for."""
