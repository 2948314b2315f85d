"""Sequences over a shuffled pool of blocks, and the `AttentionBatch` of each step: a runner in miniature."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from octavo.attention.base import AttentionBatch, GroupBatch, SinkReads
from octavo.kv_budget import KVBudget
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import BlockLayout, KVArena
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV


class PagedSequences:
    """`num_seqs` sequences that share one arena, whose blocks are dealt in random order.

    Every block is NaN until it is written, the null block included, and turns NaN again once it slid out of a window:
    what a backend should not have read shows in the result.
    """

    def __init__(
        self,
        layers: Sequence[LayerKVSpec],
        block_size: int,
        num_seqs: int,
        max_tokens: int,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        layout: BlockLayout = BlockLayout.PAIRS,
        seed: int = 0,
        budget: int = 0,
    ) -> None:
        self.budget = budget
        self.spec = KVCacheSpec.build(layers, block_size, dtype)
        num_groups = len(self.spec.groups)
        num_blocks = 1 + num_seqs * num_groups * self.spec.blocks_for_tokens(max_tokens)
        self.arena = KVArena(self.spec, num_blocks, device, layout)
        self.device = device
        self.lengths = [0] * num_seqs
        self.tables: list[list[list[int]]] = [[[] for _ in range(num_seqs)] for _ in range(num_groups)]
        self._free = list(range(1, self.arena.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._poison(range(self.arena.num_blocks))

    @property
    def kv(self) -> list:
        return self.arena.layers

    def step(self, new_tokens: dict[int, int]) -> AttentionBatch:
        """Extend sequence i by `new_tokens[i]` tokens; the batch holds these sequences in the dict's order."""
        starts = {seq: self.lengths[seq] for seq in new_tokens}
        for seq, count in new_tokens.items():
            self.lengths[seq] += count
        positions = [p for seq, start in starts.items() for p in range(start, self.lengths[seq])]
        context_lens = [self.lengths[seq] for seq in new_tokens]
        return AttentionBatch(
            query_start=self._tensor(list(itertools.accumulate(new_tokens.values(), initial=0)), torch.int32),
            context_lens=self._tensor(context_lens, torch.int32),
            table_rows=self._tensor(list(range(len(new_tokens))), torch.int64),
            positions=self._tensor(positions, torch.int64),
            groups=tuple(self._group_batch(group, starts) for group in range(len(self.spec.groups))),
            num_seqs=len(new_tokens),
            num_tokens=len(positions),
            max_query_len=max(new_tokens.values()),
            max_context_len=max(context_lens),
            total_decode_len=sum(self.lengths[seq] for seq, count in new_tokens.items() if count == 1),
            sinks=self._sinks(positions, context_lens),
        )

    def _sinks(self, positions: list[int], context_lens: list[int]) -> SinkReads | None:
        if not 0 < self.budget < max(context_lens):
            return None
        places = [min(position, self.budget - 1) for position in positions]
        budgets = self._tensor([self.budget] * len(context_lens), torch.int32)
        return SinkReads(budgets, self.spec.block_size, self._tensor(places, torch.int64))

    def _group_batch(self, group: int, starts: dict[int, int]) -> GroupBatch:
        budget = KVBudget(mode="sinks", tokens=self.budget) if self.budget else None
        size, window = self.spec.block_size, self.spec.windows(budget)[group]
        slots = []
        for seq, start in starts.items():
            table = self.tables[group][seq]
            while len(table) * size < self.lengths[seq]:
                table.append(self._free.pop())
            if window is not None:
                slid_out = slice(window.sink_blocks, max(window.sink_blocks, window.passed(start, size)))
                self._poison(block for block in table[slid_out] if block)
                table[slid_out] = [0] * len(table[slid_out])
            slots += [table[p // size] * size + p % size for p in range(start, self.lengths[seq])]
        width = max(len(self.tables[group][seq]) for seq in starts)
        rows = [self.tables[group][seq] + [0] * (width - len(self.tables[group][seq])) for seq in starts]
        return GroupBatch(self._tensor(rows, torch.int32), self._tensor(slots, torch.int64))

    def _poison(self, blocks: Iterator[Any] | Any) -> None:
        # All bits set are NaN in every floating type, codecs' scales among them.
        if ids := list(blocks):
            self.arena.write_blocks(ids, torch.full((len(ids), self.spec.block_bytes), 0xFF, dtype=torch.uint8))

    def _tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def set_scales(layer: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Set a calibrated layer's scales, one number or float [kv_heads] each, in place, because kernels hold them."""
    assert isinstance(layer, CodedKV)
    layer.keys.scale.copy_(keys)
    layer.values.scale.copy_(values)
