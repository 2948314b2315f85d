"""Blocks of other servers of the same model, each asked like a Redis that can only be read (`lending.py`).

    request with a hint ──> expect(labels, address) ──> contains ──> ask, read ──> RemoteMedium of that address

Only what a hint names is asked for. One neighbour cannot take the store from the others: it has two of the store's
threads at most, answers within seconds or is left, and is left alone for a while after faults.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import redis

from octavo.errors import ConfigError
from octavo.kvcache.block import HostBlockId
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostMemory
from octavo.tiers.base import Medium, Reason
from octavo.tiers.lending import Lender
from octavo.tiers.remote import TIMEOUT_SECONDS, RemoteMedium
from octavo.tiers.speed import LoadSpeed
from octavo.tiers.store import Breaker

MOST_HINTS = 1 << 16
"""Blocks that hints are remembered for."""

MOST_PEERS = 64
"""Neighbours whose connections are kept; beyond that, the one used longest ago is left."""

MOST_AT_ONCE = 2
"""Pieces of transfers that come from one neighbour at a time."""

CALL_SECONDS = 5.0
"""Time in which a neighbour must have answered for a piece of a transfer, however steadily it sends."""

RETRY_SECONDS = 10.0
_MOST_FAULTS = 2
# A neighbour that sends what does not match is left alone like one that does not answer.
_LIES = {Reason.FORGED, Reason.CHECKSUM, Reason.LABEL, Reason.TRUNCATED, Reason.LAYOUT, Reason.FINGERPRINT}


class _Peer:
    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self.medium: RemoteMedium | None = None
        self.speed = LoadSpeed()
        self.opening = threading.Lock()
        self.turns = threading.Semaphore(MOST_AT_ONCE)
        self.breaker = Breaker(f"neighbour {address}", "answers", _MOST_FAULTS, RETRY_SECONDS, clock)


class NeighbourMedium(Medium):
    """The blocks that neighbours have in host memory.

    Args:
        fingerprint: 16 bytes that identify the weights, dtype, codec and block size.
        block_bytes: size of a block.
        secret: the servers' common secret; without it a neighbour finds no block.
        lend_at: `HOST:PORT` at which other servers may ask for blocks of this host memory.
        call_seconds: see `CALL_SECONDS`.
    """

    name = "neighbour"
    must_ask = True
    is_read_only = True

    def __init__(
        self,
        fingerprint: bytes,
        block_bytes: int,
        secret: str,
        lend_at: str | None = None,
        *,
        call_seconds: float = CALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._secret = secret
        self._lend_at = lend_at
        self._lender: Lender | None = None
        self._call_seconds = call_seconds
        self._clock = clock
        self._hints: OrderedDict[bytes, str] = OrderedDict()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._lock = threading.Lock()

    def lend(self, memory: HostMemory, row: Callable[[HostBlockId], memoryview]) -> None:
        if self._lend_at is not None:
            self._lender = Lender(self._lend_at, memory, row, self._fingerprint, self._secret)

    def expect(self, labels: Sequence[Label], address: str) -> None:
        with self._lock:
            for label in labels:
                self._hints[label.key] = address
                self._hints.move_to_end(label.key)  # or a hint that comes again would be the first to go
            while len(self._hints) > MOST_HINTS:
                self._hints.popitem(last=False)

    def contains(self, key: bytes) -> bool | None:
        """Return None for a block of a hint, whose neighbour must be asked."""
        return None if key in self._hints else False

    def speed_of(self, key: bytes) -> LoadSpeed | None:
        """Return the speed of the neighbour of a hint, if it was asked before."""
        with self._lock:
            peer = self._peers.get(self._hints.get(key, ""))
        return None if peer is None else peer.speed

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        found = self._call(labels, lambda peer: peer.ask(labels))
        if any(reason is not None for reason in found):
            with self._lock:
                for label, reason in zip(labels, found, strict=True):
                    if reason is not None:
                        self._hints.pop(label.key, None)
        return found

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        outcomes = self._call(labels, lambda peer: peer.read(labels, buffers))
        with self._lock:
            for label in labels:
                self._hints.pop(label.key, None)
        return outcomes

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        return Reason.READ_ONLY

    def close(self) -> None:
        if self._lender is not None:
            self._lender.close()
        for peer in self._peers.values():
            if peer.medium is not None:
                peer.medium.close()

    def _call(self, labels: Sequence[Label], act: Callable[[RemoteMedium], list[Reason | None]]) -> list[Reason | None]:
        """Return the answer of the labels' neighbour; they are consecutive in one prompt, so there is one neighbour."""
        if (peer := self._peer(labels[0].key)) is None:
            return [Reason.ABSENT] * len(labels)
        address, peer_state = peer
        if not peer_state.turns.acquire(timeout=TIMEOUT_SECONDS):
            return [Reason.BUSY] * len(labels)
        try:
            if peer_state.breaker.is_closed:
                return [Reason.CLOSED] * len(labels)
            outcomes = self._timed(self._opened(address, peer_state), act)
        except (redis.RedisError, OSError, ConfigError) as error:
            peer_state.breaker.fault(error)
            return [Reason.IO_ERROR] * len(labels)
        finally:
            peer_state.turns.release()
        is_lying = not _LIES.isdisjoint(outcomes)
        peer_state.breaker.judge([Reason.IO_ERROR] if is_lying else outcomes)
        return outcomes

    def _timed(self, medium: RemoteMedium, act: Callable[[RemoteMedium], list[Reason | None]]) -> list[Reason | None]:
        """Run within the time limit of a call, or fail."""
        # The client's own time limit is of each piece that arrives, so bytes that trickle in could hold it for ever.
        timer = threading.Timer(self._call_seconds, medium.give_up)
        timer.start()
        try:
            return act(medium)
        finally:
            timer.cancel()

    def _peer(self, key: bytes) -> tuple[str, _Peer] | None:
        left = None
        with self._lock:
            if (address := self._hints.get(key)) is None:
                return None
            if (peer := self._peers.get(address)) is None:
                self._peers[address] = peer = _Peer(address, self._clock)
                if len(self._peers) > MOST_PEERS:
                    _, left = self._peers.popitem(last=False)
            self._peers.move_to_end(address)
        if left is not None and left.medium is not None:
            left.medium.close()
        return address, peer

    def _opened(self, address: str, peer: _Peer) -> RemoteMedium:
        with peer.opening:
            if peer.medium is None:
                url = f"redis://{address}/0?protocol=2"
                peer.medium = RemoteMedium(url, self._fingerprint, self._block_bytes, secret=self._secret)
            return peer.medium
