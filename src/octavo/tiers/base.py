"""The interface of a medium, which stores blocks below host memory: keys to bytes, verified on every load. And the
transfers to and from it, with their totals.

A medium (files, slabs, Redis) moves the bytes of one block after another, and reports why if it could not. A `Store`
makes it asynchronous:

    engine's thread                              store's threads
      Store.lookup(key) ───> True | False | None, if only the medium or a write in progress can tell
      Store.get(labels, buffers, seconds) ────>  medium.read, in pieces; each block's bytes are verified
      Store.put(label, buffer, tenant) ───────>  medium.write
      Store.ask(labels, seconds) ─────────────>  medium.ask, if lookup cannot tell
      Transfer.done, .outcomes <───────────────  None, or the reason of a miss
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType

from octavo.kvcache.block import HostBlockId
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostMemory
from octavo.tiers.speed import LoadSpeed

LAYOUT_VERSION = 3
"""Version of the layout of a block's bytes and of its verification; part of every key and header."""


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
        is_read_only: whether blocks are never written there.
        open_misses: blocks that were found damaged when it was opened, and whole files of them, by reason.
    """

    name: str
    must_ask = False
    is_read_only = False
    open_misses: Mapping[Reason, int] = MappingProxyType({})

    @abstractmethod
    def contains(self, key: bytes) -> bool | None:
        """Return whether the medium has a key, without waiting for anything; None if it must be asked."""

    def lend(self, memory: HostMemory, row: Callable[[HostBlockId], memoryview]) -> None:  # noqa: B027
        """Offer the blocks in host memory to other servers until `close`; most media do not."""

    def expect(self, labels: Sequence[Label], address: str) -> None:  # noqa: B027
        """Note that the neighbour at `HOST:PORT` may have these blocks."""

    def speed_of(self, key: bytes) -> LoadSpeed | None:
        """Return the speed of loads from a block's location; None if all blocks have the same, or it is unknown."""
        return None

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


class Work(Enum):
    """Kinds of transfers, the most urgent first."""

    ASK = "ask"  # whether they are there
    READ = "read"
    WRITE = "write"


class Transfer:
    """A question about blocks, or a read or write of them. `outcomes` has an entry for each block once it is `done`.

    The buffers belong to the store until then, however late that is. The bytes are accounted to `tenant`.
    """

    def __init__(
        self, work: Work, labels: Sequence[Label], buffers: Sequence[memoryview], deadline: float, tenant: str = ""
    ) -> None:
        self.work = work
        self.labels = labels
        self.buffers = buffers
        self.deadline = deadline
        self.tenant = tenant
        self.outcomes: list[Reason | None] = []
        self._done = threading.Event()
        self.cancelled = False

    @property
    def done(self) -> bool:
        """Whether the transfer is over, so that the store does not touch the buffers any more."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Cancel the part that has not started; `done` becomes true soon afterwards."""
        self.cancelled = True

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the transfer, and return whether it is done."""
        return self._done.wait(seconds)

    def finish(self) -> None:
        """Mark the transfer as done; called by the store."""
        self._done.set()


LATENCY_BOUNDS = (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0)
"""Upper bounds, in seconds, of the latency buckets of transfers; a last bucket without bound follows."""


@dataclass(slots=True)
class WorkTotals:
    """Totals of reads or of writes since the start, in blocks unless noted."""

    blocks: int = 0
    bytes: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)  # bytes
    misses: Counter[Reason] = field(default_factory=Counter)  # of reads, including those of `ask`
    latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))  # transfers
    seconds: float = 0.0


class StoreCounters:
    """Totals since the start. Several threads update them, and any thread may read.

    Attributes:
        open_misses: blocks that an earlier process had stored.
    """

    def __init__(self, open_misses: Mapping[Reason, int]) -> None:
        self.read = WorkTotals()
        self.write = WorkTotals()
        self.open_misses = Counter(open_misses)
        self._lock = threading.Lock()

    def count(self, transfer: Transfer) -> None:
        """Count the outcomes of a transfer."""
        totals = self.write if transfer.work is Work.WRITE else self.read
        with self._lock:
            for buffer, reason in zip(transfer.buffers, transfer.outcomes, strict=True):
                if reason is not None:
                    totals.misses[reason] += 1
                elif transfer.work is not Work.ASK:
                    totals.blocks += 1
                    totals.bytes += buffer.nbytes
                    totals.by_tenant[transfer.tenant] += buffer.nbytes

    def time(self, work: Work, seconds: float) -> None:
        """Record how long the medium took for a read or a write."""
        totals = self.write if work is Work.WRITE else self.read
        with self._lock:
            totals.latency[sum(seconds > bound for bound in LATENCY_BOUNDS)] += 1
            totals.seconds += seconds
