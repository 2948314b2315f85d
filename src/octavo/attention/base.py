"""The interface between a model and the code that attends over blocks.

A step's tokens are ragged: the new tokens of all sequences are concatenated.

    tokens        [ s0 s0 s0 | s1 | s2 s2 ]            num_tokens = 6
    query_start   [ 0          3    4       6 ]         int32 [num_seqs + 1]
    context_lens  [ 3          40   18 ]                tokens in the cache after this step, including new ones

The new tokens of sequence i are the last `query_start[i+1] - query_start[i]` of its `context_lens[i]` tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from octavo.storage.arena import BlockLayout
from octavo.storage.layer_kv import LayerKV


@dataclass(slots=True)
class GroupBatch:
    """The cache locations of one group's tokens in this step.

    Attributes:
        block_tables: int32 [rows, max_blocks]; `AttentionBatch.table_rows` maps sequences to rows, and the other rows
            belong to sequences outside this step. Entries past a sequence's last block, and those outside a window, are
            0 or ids of other sequences' blocks: their contents may be NaN and must not affect the result. Blocks that a
            sequence has let go by their attention are left out, so that the others read like a shorter text.
        slot_mapping: int64 [num_tokens]; slots where each new token's key and value are written.
        context_lens: int32 [num_seqs], tokens in the tables if sequences have let go of some, else None.
    """

    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor | None = None


@dataclass(slots=True)
class SinkReads:
    """The sequences of a step that have evicted tokens, and keep the first ones and the last ones (`kv_budget.py`).

    Of a sequence that keeps b tokens, a query at position p >= b sees the sinks, rotated as if it stood at position
    b - 1, and itself and the b - `num_tokens` - 1 tokens before it, rotated for its own position.

    Attributes:
        budgets: int32 [num_seqs]; 0 for a sequence that keeps all.
        num_tokens: number of sinks, the first tokens of a sequence.
        positions: int64 [num_tokens]; where each query stands for the sinks: its own position if it sees none apart.
    """

    budgets: torch.Tensor
    num_tokens: int
    positions: torch.Tensor


@dataclass(slots=True)
class SparseReads:
    """The sequences of a step, of one token each, that read only some blocks of layers with bounds (`kv_budget.py`).

    Attributes:
        num_read: int32 [layers with bounds, num_seqs], blocks that each KV head reads: the first, the most recent ones,
            and those in which a query of the head may score highest; 0 for a sequence that reads all.
        num_recent: int32 [num_seqs]
        completed: int32 per group, blocks whose bounds no step has computed yet for the sequences that read them.
    """

    num_read: torch.Tensor
    num_recent: torch.Tensor
    completed: list[torch.Tensor]


@dataclass(slots=True)
class MeasuredRows:
    """The sequences of a step whose attention is measured, and the mass that their blocks have in it.

    A layer without a sliding window adds to a block's mass, for each row and head, the fourth power of the share that
    the block's tokens have of the attention, in units of 1 / `MASS_UNIT`, each rounded: integers have the same sum in
    any order. Fourth powers, because a few heads that look for one block say more than many that look everywhere.

    Attributes:
        begins: int64 [num_seqs], where the blocks of each sequence's table begin in `mass`; -1: it is not measured.
        mass: int64 [groups, blocks]
    """

    begins: torch.Tensor
    mass: torch.Tensor


MASS_UNIT = 1 << 24


@dataclass(slots=True)
class AttentionBatch:
    """One step's ragged queries, built by `runner/batch.py` and shared by all layers.

    Attributes:
        query_start: int32 [num_seqs + 1]
        context_lens: int32 [num_seqs]
        table_rows: int64 [num_seqs]; each sequence's row in every group's block tables. The tables persist between
            steps and are never gathered, so a long sequence does not slow down short ones in the same step.
        positions: int64 [num_tokens]
        groups: one per group of the KV cache.
        max_query_len, max_context_len: the largest of each, on the host.
        total_decode_len: the sum of `context_lens` of the sequences with one new token, or more; on the host.
        sinks, sparse: for layers with full attention, what sequences with a budget see; None if all see everything.
        measured: the sequences whose attention is measured; None if there are none.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    table_rows: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupBatch, ...]
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_context_len: int
    total_decode_len: int
    sinks: SinkReads | None = None
    sparse: SparseReads | None = None
    measured: MeasuredRows | None = None

    def lengths(self, group: int) -> torch.Tensor:
        """Return how many tokens each sequence has in the tables of a group: int32 [num_seqs]."""
        kept = self.groups[group].context_lens
        return self.context_lens if kept is None else kept


class AttentionBackend(ABC):
    """Writes new keys and values into blocks and attends over block tables.

    Attributes:
        layout: the layout of the arena's blocks that it reads fastest.
    """

    name: str
    layout = BlockLayout.PAIRS

    def write(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        """Store a step's keys [num_tokens, kv_heads, key_dim] and values [num_tokens, kv_heads, value_dim]."""
        for part in kv.parts:
            part.write(key, value, batch.groups[part.group].slot_mapping)

    @abstractmethod
    def attend(
        self,
        kv: LayerKV,
        query: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        sink_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute causal attention of each new token over its sequence's blocks, which already hold its key and value.

        Args:
            query: [num_tokens, num_heads, key_dim]; query head h reads KV head h // (num_heads // kv_heads).
            scale: multiplies the scores before the softmax.
            softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
            sinks: [num_heads] extra logits in each softmax's denominator (gpt-oss).
            sink_query: the query rotated for `batch.sinks.positions`; None with a sliding window, or without
                `batch.sinks`.

        With `kv.sliding_window`, a query sees itself and the window - 1 tokens before it.

        Returns:
            [num_tokens, num_heads, value_dim] in the query's dtype.
        """
