"""An embedding of a prompt: one or all of its tokens' last hidden states, summed as they are computed."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Pooling(StrEnum):
    """Of which prompt tokens the last hidden states make the embedding."""

    LAST = "last"  # the last token's; the others may come from the prefix cache
    MEAN = "mean"  # the mean of all tokens', so that all are computed: the cache keeps no hidden states


class PooledStates:
    """The hidden states of a prompt that have been pooled so far.

        position   0 ……………… next_position ……… num_tokens
                   pooled or not wanted    still to be computed

    It survives preemption: what has been pooled is not wanted again.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self.next_position = num_tokens - 1 if pooling is Pooling.LAST else 0
        self._num_tokens = num_tokens
        self._count = 0
        self._total: npt.NDArray[np.float64] | None = None

    def add(self, count: int, total: bytes) -> None:
        """Take in the sum of the next `count` positions' hidden states: float64 in the machine's byte order."""
        import numpy as np  # `octavo --help` does without

        states = np.frombuffer(total, dtype=np.float64)
        self._total = states if self._total is None else self._total + states
        self._count += count
        self.next_position += count

    def embedding(self) -> list[float] | None:
        """Their mean, of length 1, in float32's precision; None where the prompt was not computed to its end."""
        if self._total is None or self.next_position < self._num_tokens:
            return None
        import numpy as np

        mean = self._total / self._count
        unit: list[float] = (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32).tolist()
        return unit
