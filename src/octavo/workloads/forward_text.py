"""Run a text through a model with any KV cache, to compare codecs and find scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch, GroupBatch
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.base import CausalLM
from octavo.storage.arena import KVArena

CHUNK = 64


def block_tables(spec: KVCacheSpec, num_tokens: int, first_block: int = 1) -> list[torch.Tensor]:
    """Return one block table per group, with consecutive blocks from `first_block`."""
    per_group = spec.blocks_for_tokens(num_tokens)
    return [torch.arange(per_group) + first_block + group * per_group for group in range(len(spec.groups))]


@torch.inference_mode()
def logits_of_chunks(
    model: CausalLM,
    arena: KVArena,
    attention: AttentionBackend,
    tokens: Sequence[int],
    *,
    first_block: int = 1,
    chunk: int = CHUNK,
    wanted: bool = True,
) -> Iterator[torch.Tensor]:
    """Compute one sequence in chunks, so that all of it except the current chunk is read from the cache, as in decode.

    Yields:
        float32 [chunk, vocab_size], or [0, vocab_size] if logits are not `wanted`; the next chunk may overwrite it.
    """
    spec, device = arena.spec, model.device
    tables = [table.to(device) for table in block_tables(spec, len(tokens), first_block)]
    for first in range(0, len(tokens), chunk):
        positions = torch.arange(first, min(first + chunk, len(tokens)), device=device)
        count = len(positions)
        context = first + count
        slots = [
            table[positions // spec.block_size] * spec.block_size + positions % spec.block_size for table in tables
        ]
        batch = AttentionBatch(
            query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([context], dtype=torch.int32, device=device),
            table_rows=torch.zeros(1, dtype=torch.int64, device=device),
            positions=positions,
            groups=tuple(GroupBatch(t.int()[None], s) for t, s in zip(tables, slots, strict=True)),
            num_seqs=1,
            num_tokens=count,
            max_query_len=count,
            max_context_len=context,
            total_decode_len=context,
        )
        rows = torch.arange(count if wanted else 0, device=device)
        piece = torch.tensor(tokens[first : first + count], device=device)
        yield model.forward(piece, batch, arena.layers, attention, rows)
