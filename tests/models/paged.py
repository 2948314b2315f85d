"""Runs a model over paged keys and values, for comparison with transformers' own forward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.reference import ReferenceAttention
from octavo.models.base import CausalLM
from tests.attention.batches import PagedSequences


def paged_logits(
    model: CausalLM,
    sequences: Sequence[torch.Tensor],
    *,
    block_size: int = 16,
    longest_chunk: int = 7,
    num_decoded: int = 4,
    attention: AttentionBackend | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> list[torch.Tensor]:
    """float32 [len(sequence), vocab] for each of `sequences` (int64 ids), all computed in one ragged batch.

    Prompts go in chunks of 1 to `longest_chunk` tokens, the last `num_decoded` tokens of each one at a time. A random
    part of the sequences takes part in each step, in random order.
    """
    rng = random.Random(seed)
    paged = PagedSequences(
        model.kv_layers, block_size, len(sequences), max(map(len, sequences)), dtype=dtype, seed=seed
    )
    attention = attention or ReferenceAttention()
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    with torch.inference_mode():
        while unfinished := [i for i, ids in enumerate(sequences) if paged.lengths[i] < len(ids)]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            starts = {i: paged.lengths[i] for i in chosen}
            counts = {i: _chunk(rng, len(sequences[i]) - starts[i], num_decoded, longest_chunk) for i in chosen}
            batch = paged.step(counts)
            token_ids = torch.cat([sequences[i][starts[i] : paged.lengths[i]] for i in chosen])
            indices = torch.arange(batch.num_tokens)
            rows = model.forward(token_ids, batch, paged.kv, attention, indices).clone()
            for i, part in zip(chosen, rows.split(list(counts.values())), strict=True):
                logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def whole_logits(model: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each sequence's logits [tokens, vocab] by the transformers model itself, without a cache."""
    with torch.inference_mode():
        return [model(ids[None], use_cache=False).logits[0].float() for ids in sequences]


def _chunk(rng: random.Random, remaining: int, num_decoded: int, longest: int) -> int:
    return 1 if remaining <= num_decoded else min(rng.randint(1, longest), remaining - num_decoded)


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length,), generator=generator) for length in lengths]


def assert_same_logits(paged: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], tolerance: float = 1e-4) -> None:
    """Each logit within `tolerance`, and the same token wherever the two top logits differ by more than that."""
    for ours, theirs in zip(paged, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
        first, second = theirs.topk(2).values.unbind(-1)
        decided = first - second > tolerance
        assert torch.equal(ours.argmax(-1)[decided], theirs.argmax(-1)[decided])
