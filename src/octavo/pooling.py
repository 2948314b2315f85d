"""Pools the last hidden states of a prompt's tokens into an embedding, summing them as they are computed."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Pooling(StrEnum):
    """The tokens whose last hidden states make the embedding."""

    LAST = "last"  # the last token; the others may come from the prefix cache
    MEAN = "mean"  # the mean over all tokens, which must all be computed: the cache keeps no hidden states


class PooledStates:
    """The hidden states of a prompt that have been pooled so far.

        position   0 ……………… next_position ……… num_tokens
                   pooled or not wanted    still to be computed

    The state survives preemption: positions that have been pooled are not pooled again.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self.next_position = num_tokens - 1 if pooling is Pooling.LAST else 0
        self._num_tokens = num_tokens
        self._count = 0
        self._total: npt.NDArray[np.float64] | None = None

    def add(self, count: int, total: bytes) -> None:
        """Add the sum of the next `count` positions' hidden states: float64 in the machine's byte order."""
        import numpy as np  # imported here, because `octavo --help` does not need it

        states = np.frombuffer(total, dtype=np.float64)
        self._total = states if self._total is None else self._total + states
        self._count += count
        self.next_position += count

    def embedding(self) -> list[float] | None:
        """Return the normalised mean, in float32 precision; None if the prompt was not computed to its end."""
        if self._total is None or self.next_position < self._num_tokens:
            return None
        import numpy as np

        mean = self._total / self._count
        unit: list[float] = (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32).tolist()
        return unit
