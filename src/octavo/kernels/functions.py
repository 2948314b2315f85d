"""Attention and row-wise steps on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.library import native
from octavo.kernels.packed_weight import Activation

if TYPE_CHECKING:
    from octavo import _native
    from octavo.storage.layer_kv import SideArguments


SinksApart = tuple[torch.Tensor, torch.Tensor, int]
"""The queries of the sinks [num_tokens, num_heads, key_dim], budgets int32 [num_seqs], and the number of sinks."""
SparseLayer = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]
"""The bounds of a layer's keys by block, and for each query how many blocks it reads, [1, num_seqs], and how many of
these are recent, [num_seqs], with the blocks of each group that are complete now (`AttentionBatch.sparse`)."""


def make_decoder(
    dtype: torch.dtype,
    *,
    hidden: int,
    vocab: int,
    num_heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    attention_scale: float,
    attention_softcap: float = 0.0,
    logits_scale: float = 1.0,
    logits_softcap: float = 0.0,
) -> _native.Decoder:
    """A decoder without a program, to be filled by `models/native_decoder.py`; whole steps in one call."""
    heads = (num_heads, kv_heads, key_dim, value_dim)
    factors = (attention_scale, attention_softcap, logits_scale, logits_softcap)
    return native.Decoder(str(dtype).removeprefix("torch."), hidden, vocab, *heads, *factors)


def rank_memory(message_bytes: int, slot_bytes: int, logits_bytes: int) -> int:
    """Return the size of the file that ranks share: messages, each register of activations twice, and logits twice."""
    return native.rank_memory_bytes(message_bytes, slot_bytes, logits_bytes)


def step_message_bytes(*, num_tokens: int, num_seqs: int, num_groups: int, max_blocks: int, rotation_bytes: int) -> int:
    """Return the bytes of the longest message about a step of so many tokens and sequences.

    Args:
        rotation_bytes: bytes of one token's angles, in all rotations.
    """
    return native.step_message_bytes(num_tokens, num_seqs, num_groups, max_blocks, rotation_bytes)


def ranks(
    file: int,
    message_bytes: int,
    slot_bytes: int,
    logits_bytes: int,
    rank: int,
    count: int,
    machines: int,
    timeout_s: float,
) -> _native.Ranks:
    """A rank's side of the memory in `file`, a descriptor, which the ranks of one machine share."""
    return native.Ranks(file, message_bytes, slot_bytes, logits_bytes, rank, count, machines, timeout_s)


def attend(
    keys: SideArguments,
    values: SideArguments,
    query: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    exact: bool = True,
    copies: tuple[SideArguments, SideArguments, torch.Tensor, int, int] | None = None,
    apart: SinksApart | None = None,
    sparse: SparseLayer | None = None,
    measured: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention of ragged new tokens over paged keys and values (FlashAttention's online softmax).

    Args:
        keys, values: `LayerKV.for_kernels`. Those in a codec are never decoded into memory.
        query: [num_tokens, num_heads, key_dim] in bfloat16 or float32, that of the cache unless it is in a codec;
            `num_heads` a multiple of the KV heads.
        block_tables: int32 [rows, max_blocks]; table_rows: int64 [num_seqs], each sequence's row of them.
        query_start: int32 [num_seqs + 1]; context_lens: int32 [num_seqs].
        out: [num_tokens, num_heads, value_dim] in the query's dtype, which is written and returned.
        sinks: float32 [num_heads].
        exact: a token's result has the same bits whatever batch, chunk and number of threads it is computed with.
            Without it, where that is faster, a few tokens may be computed otherwise than many.
        copies: the copies of some blocks of a layer in a codec (`storage/recent_kv.py`): keys, values, block tables,
            and how many first and how many recent blocks are read in them.
        apart: for sequences that keep the first tokens and the last ones (`AttentionBatch.budgets`).
        sparse: for sequences that read few blocks of floats, the bounds of keys [num_blocks, kv_heads, 2, key_dim], and
            `AttentionBatch.sparse`.
        measured: for sequences whose attention is measured, where their blocks begin, int64 [num_seqs], and the mass of
            blocks, int64 [1, blocks], which is added to (`AttentionBatch.measured`).

    Raises:
        ValueError: block_size or value_dim is not a multiple of 16, a head over 576 dimensions, a codec without a
            kernel, mismatched shapes or dtypes, a scale that is not positive, or a table with blocks that do not exist.
    """
    native.attend(
        keys,
        values,
        query,
        out,
        block_tables,
        table_rows,
        query_start,
        context_lens,
        scale,
        window or 0,
        softcap or 0.0,
        sinks,
        exact,
        copies,
        apart,
        sparse,
        measured,
    )
    return out


def rope_write(
    qkv: torch.Tensor,
    keys: SideArguments,
    values: SideArguments,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    copies: tuple[SideArguments, SideArguments, torch.Tensor] | None = None,
) -> None:
    """Rotate a step's queries in place; rotate its keys and store them, and the values, in their slots.

    With `query_norm` and `key_norm` (QK-norm, Qwen 3), each head is RMS-normalised before it is rotated. A cache in a
    codec is encoded in the same pass.

    Args:
        qkv: [num_tokens, num_heads * key_dim + kv_heads * (key_dim + value_dim)], the fused product; its queries are
            overwritten, its keys and values may be.
        keys, values: one layer's cache, as in `attend`.
        cos, sin: float32 [max_position, rotary_dim / 2]; dimension i is paired with i + rotary_dim / 2.
        positions, slots: int64 [num_tokens]; a slot is block * block_size + offset.
        query_norm, key_norm: [key_dim], as in `rms_norm`.
        copies: keys, values and slots of the layer's copies, which are written too.

    Raises:
        ValueError: mismatched shapes or dtypes, a position outside the table, a slot outside the cache.
    """
    native.rope_write(qkv, keys, values, cos, sin, positions, slots, query_norm, key_norm, eps, copies)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over rows [rows, width] (Zhang & Sennrich 2019); `out` may be x.

    Float32 inside; rounded to x's dtype before a weight of that dtype multiplies, and after a float32 one does.
    """
    if out is None:
        out = torch.empty_like(x)
    native.rms_norm(x, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x += residual, in place; returns `rms_norm` of the sum. All [rows, width]; `out` may be residual."""
    if out is None:
        out = torch.empty_like(x)
    native.rms_norm(x, residual, weight, out, eps)
    return out


def gate(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None) -> torch.Tensor:
    """activation(gate) * up [rows, width] of gate_up [rows, 2 * width] = | gate | up |, rounded between the two."""
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    native.gated(gate_up, out, activation)
    return out


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [rows]: each row's first largest of logits [rows, vocab]; the first NaN where there is one."""
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
    native.argmax(logits, out)
    return out
