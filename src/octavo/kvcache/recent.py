"""The blocks evicted and copied last, for the live page, which looks now and then and shows them as they happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from octavo.kvcache.block import BlockCopy, BlockId
from octavo.request import RequestId

MOST_EVICTED = 256
MOST_COPIED = 64

_T = TypeVar("_T")


class RequestCopy(NamedTuple):
    """A copy-on-write for a request, which wrote into a block that another sequence held too."""

    request_id: RequestId
    source: BlockId
    destination: BlockId


class RecentChanges:
    """Counts evictions and copies since the start, and remembers the latest.

    Several may look, each at its own pace: whoever remembers the number at its last look gets what came after it.

    Attributes:
        num_evicted: number of cached blocks evicted since the start.
        num_copied: number of blocks copied on a write since the start.
    """

    def __init__(self) -> None:
        self.num_evicted = 0
        self.num_copied = 0
        self._evicted: deque[BlockId] = deque(maxlen=MOST_EVICTED)
        self._copied: deque[RequestCopy] = deque(maxlen=MOST_COPIED)

    def evicted(self, block_ids: Sequence[BlockId]) -> None:
        self.num_evicted += len(block_ids)
        self._evicted.extend(block_ids[-MOST_EVICTED:])

    def copied(self, request_id: RequestId, copy: BlockCopy) -> None:
        self.num_copied += 1
        self._copied.append(RequestCopy(request_id, copy.source, copy.destination))

    def evicted_since(self, num_evicted: int) -> list[BlockId]:
        """Return the blocks evicted after the first `num_evicted`, of which at most `MOST_EVICTED` are remembered."""
        return _latest(self._evicted, self.num_evicted - num_evicted)

    def copied_since(self, num_copied: int) -> list[RequestCopy]:
        """Return the copies made after the first `num_copied`, of which at most `MOST_COPIED` are remembered."""
        return _latest(self._copied, self.num_copied - num_copied)


def _latest(remembered: deque[_T], count: int) -> list[_T]:
    return list(islice(remembered, max(0, len(remembered) - count), None))
