"""The interface of a medium, which stores blocks below host memory: keys to bytes, verified on every load.

A medium (files, slabs, Redis) moves the bytes of one block after another, and reports why if it could not. A `Store`
makes it asynchronous:

    engine's thread                              store's threads
      Store.lookup(key) ───> MISS | HIT | HIT_PENDING
      Store.get(labels, buffers, seconds) ────>  medium.read, in pieces; each block's bytes are verified
      Store.put(label, buffer, tenant) ───────>  medium.write
      Store.ask(labels, seconds) ─────────────>  medium.ask, if lookup cannot tell
      Transfer.done, .outcomes <───────────────  None, or the reason of a miss
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from types import MappingProxyType

from octavo.kvcache.hashing import Label

LAYOUT_VERSION = 3
"""Version of the layout of a block's bytes and of its verification; part of every key and header."""


class LookupResult(Enum):
    """What is known about a key without asking the medium."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"  # the block is being written, or only the medium can tell


class Reason(StrEnum):
    """Why a block was not loaded or not stored. All reasons are misses, and a block is counted under exactly one."""

    ABSENT = "absent"
    CHECKSUM = "checksum"  # bit flips, torn writes, swapped slots
    LABEL = "label"  # another key, parent, or other tokens under this key
    FINGERPRINT = "fingerprint"  # other weights, dtype, codec or block size
    LAYOUT = "layout"
    TRUNCATED = "truncated"
    FORGED = "forged"  # not signed with this server's secret
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"  # the file system was mounted so, or became so after an error
    IO_ERROR = "io_error"
    LATE = "late"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    BUSY = "busy"  # the queue is full: a write was dropped, or a read refused


class Medium(ABC):
    """Stores blocks. Called from several threads; may raise any exception.

    Attributes:
        name: name of the tier.
        must_ask: whether only `ask` can tell which blocks are there.
        open_misses: blocks that were found damaged when it was opened, and whole files of them, by reason.
    """

    name: str
    must_ask = False
    open_misses: Mapping[Reason, int] = MappingProxyType({})

    @abstractmethod
    def contains(self, key: bytes) -> bool | None:
        """Return whether the medium has a key, without waiting for anything; None if it must be asked."""

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        """Return None for each block that is there, and a reason for the others; called only if `must_ask`.

        If the first block is missing, the others are reported missing without being looked up.
        """
        raise NotImplementedError(f"{self.name} knows its blocks and is not asked")

    @abstractmethod
    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        """Fill the buffers and verify each; the outcome is None for a block that matches its label."""

    @abstractmethod
    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        """Store a block that is accounted to a tenant; another may be evicted for it."""

    def bytes_by_tenant(self) -> Mapping[str, int] | None:
        """Return the bytes of the blocks stored, by tenant; None if unknown, because other processes write there."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""
