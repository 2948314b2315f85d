"""Prefixes that requests want pinned, until they are computed."""

from __future__ import annotations

from collections.abc import Callable

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, Sequence


class Pinning:
    """Pins the prefixes of admitted requests as their blocks are computed.

    Args:
        fail: ends a request, because pinning raised.
    """

    def __init__(self, kv: KVCacheManager, fail: Callable[[Request, Exception], None]) -> None:
        self._kv = kv
        self._fail = fail
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        """Sequences that have prefixes yet to be pinned."""
        return len(self._waiting)

    def admitted(self, seq: Sequence) -> None:
        """The first sequence of a request has got its place; nothing happens if that is known."""
        if seq.request.pins and seq not in self._waiting:
            self._waiting.append(seq)

    def settle(self) -> None:
        """Pin what is computed by now.

        After a step and before anything else is allocated: what ended in this very step is still cached.
        """
        if self._waiting:
            self._waiting = [seq for seq in self._waiting if not self._settle(seq)]

    def _settle(self, seq: Sequence) -> bool:
        """Pin those prefixes of a request that are computed; returns whether nothing more is to be expected."""
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
