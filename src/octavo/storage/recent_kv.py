"""A layer of fewer than 8 bits whose first blocks and most recent ones are kept in int8 too.

Every token is in the layer's own codes. A query reads the copies in int8 of the first `sink_blocks` blocks and of the
last `recent_blocks`, up to and including its own, and the layer's own codes between them:

    blocks     0 | 1 | 2 | 3 | 4 | 5 | 6 | 7             sink_blocks = 1, recent_blocks = 2
    a query in block 7 reads
    int8       x                       x   x             a group of blocks of its own, which slides
    own            x   x   x   x   x                     the layer's group
    a query in block 5 reads
    int8       x               x   x
    own            x   x   x

What a query reads depends on its position alone, so it is the same however the prompt is cut into chunks, and after a
prefix hit or a preemption: a hit needs the copies that the next token reads (`Window` in `kvcache/spec.py`). KIVI (Liu
et al. 2024) keeps the most recent tokens unquantised, KVQuant (Hooper et al. 2024) the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from octavo.kvcache.formats import Int8Copies
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV, SideArguments


class Span(NamedTuple):
    """Consecutive blocks that a query reads, [first, end), and where."""

    kv: LayerKV
    first: int
    end: int


class RecentKV(LayerKV):
    """One layer's part of every block in its own codes, and its part of the blocks of copies.

    Attributes:
        own: the layer's own codes.
        copies: the copies in int8, in another group of blocks.
        kept: which blocks are read in int8.
    """

    def __init__(self, own: CodedKV, copies: CodedKV, kept: Int8Copies) -> None:
        self.own = own
        self.copies = copies
        self.kept = kept
        self.group = own.group
        self.sliding_window = own.sliding_window

    @property
    def parts(self) -> Sequence[LayerKV]:
        """See `LayerKV.parts`."""
        return self.own, self.copies

    @property
    def for_kernels(self) -> tuple[SideArguments, SideArguments]:
        return self.own.for_kernels

    @property
    def block_size(self) -> int:
        return self.own.block_size

    @property
    def value_dim(self) -> int:
        return self.own.value_dim

    def spans(self, position: int) -> Iterator[Span]:
        """Yield what a query at `position` reads, in order, without regard to a sliding window."""
        own_block = position // self.block_size
        recent = max(0, own_block - self.kept.recent_blocks + 1)
        sinks = min(self.kept.sink_blocks, recent)
        for kv, first, end in (
            (self.copies, 0, sinks), (self.own, sinks, recent), (self.copies, recent, own_block + 1)
        ):  # fmt: skip
            if first < end:
                yield Span(kv, first, end)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        raise TypeError("a layer that is stored twice is written by its parts, whose slots differ")

    def gather_heads(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("a layer that is stored twice is read by `spans`, whose blocks differ")


def without_copies(layer: LayerKV) -> LayerKV:
    """Return the layer's own codes if it has copies, else the layer."""
    return layer.own if isinstance(layer, RecentKV) else layer
