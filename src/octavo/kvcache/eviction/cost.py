"""Evicts blocks that are cheap to recompute and unlikely to be used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kvcache.block import NULL_BLOCK, BlockId
from octavo.kvcache.eviction.ranked import BlockNumbers, RankedEviction


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """The cost of recomputing one block, given the blocks before it, in units of a block at position 0 with free
    attention.

    A forward pass takes 2N + 4·L·d·t FLOPs for a token that attends to t others: N parameters, L layers, L·d the
    width of all attention heads (PaLM, Chowdhery et al. 2022, appendix B: 6N + 12·L·H·Q·T for forward and backward,
    of which the forward pass is a third). With N = 12·L·d² (Kaplan et al. 2020, section 2.1) the second term overtakes
    the first at t = 6·d, so the cost of a block is 1 + t / (6·d), with t at its middle.

    Attributes:
        block_size: tokens per block.
        hidden_size: d of the model; the default is that of Llama 3.1 8B.
    """

    block_size: int = 16
    hidden_size: int = 4096

    def of(self, position: int) -> float:
        """Return the cost of the block at this index of its sequence."""
        return 1.0 + (position + 0.5) * self.block_size / (6 * self.hidden_size)


class CostEviction(RankedEviction):
    """GreedyDual-Size-Frequency (Cherkasova 1998, HPL-98-69R1): rank = clock + uses · cost / size.

    All blocks have the same size. The clock is the rank of the last victim, so that a block's past uses count for less
    as others come and go. `uses` estimates the likelihood of reuse: hits since the block was published, plus one.

    Without a block, those behind it in its sequence are useless. A sequence adds its tail first, so a predecessor
    inherits the rank of the block added right before it if that is higher. Equal ranks leave in the order they came.
    """

    def __init__(self, cost: RecomputeCost | None = None) -> None:
        super().__init__()
        self._cost = cost or RecomputeCost()
        self._uses = BlockNumbers()
        self._positions = BlockNumbers("i")
        self._clock = 0.0
        self._last_rank = 0.0
        self._last_position = 0

    def publish(self, block_id: BlockId, position: int, priority: int, key: bytes = b"") -> None:
        self._uses[block_id] = 1
        self._positions[block_id] = position

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        uses = self._uses
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                uses[block_id] += 1

    def rank(self, block_id: BlockId) -> float:
        position = self._positions[block_id]
        rank = self._clock + self._uses[block_id] * self._cost.of(position)
        if position == self._last_position - 1:
            rank = max(rank, self._last_rank)
        self._last_rank, self._last_position = rank, position
        return rank

    def evict(self) -> BlockId:
        block_id = super().evict()
        self._clock = max(self._clock, self._ranks[block_id])
        return block_id
