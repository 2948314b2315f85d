"""Prefixes that requests want pinned and that are not computed yet."""

from __future__ import annotations

from collections.abc import Callable

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, Sequence


class Pinning:
    """Pins the prefixes of admitted requests as their blocks are computed.

    Args:
        fail: ends a request if pinning its prefix raised.
    """

    def __init__(self, kv: KVCacheManager, fail: Callable[[Request, Exception], None]) -> None:
        self._kv = kv
        self._fail = fail
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        """The number of sequences with prefixes still to be pinned."""
        return len(self._waiting)

    def admitted(self, seq: Sequence) -> None:
        """Start following a request whose first sequence was admitted; may be called again."""
        if seq.request.pins and seq not in self._waiting:
            self._waiting.append(seq)

    def settle(self) -> None:
        """Pin the prefixes that are computed by now.

        Must run after a step and before anything else is allocated, while sequences that ended in it are still cached.
        """
        if self._waiting:
            self._waiting = [seq for seq in self._waiting if not self._settle(seq)]

    def _settle(self, seq: Sequence) -> bool:
        """Pin the computed prefixes of a request; returns whether none is left to pin."""
        request, size = seq.request, self._kv.spec.block_size
        for wanted in request.pins[len(request.pin_receipts) :]:
            if seq.num_computed < wanted.num_tokens // size * size:
                return seq.finished
            try:
                request.pin_receipts.append(self._kv.pin(request, wanted))
            except Exception as error:
                self._fail(request, error)
                return True
        return True
