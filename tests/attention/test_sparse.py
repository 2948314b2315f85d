"""Sparse reads: blocks chosen by the bounds of their keys, as Quest defines them (Tang et al. 2024, section 3.3)."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend, AttentionBatch, SparseReads
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.kvcache.spec import LayerKVSpec
from tests.attention.batches import PagedSequences
from tests.levels import LEVELS

SIZE, HEADS, KV_HEADS, DIM = 16, 6, 2, 64
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def paper(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, read: int, recent: int) -> torch.Tensor:
    """What the last query gives of the blocks that it reads: [heads, dim]. Float64."""
    outputs, blocks = [], [slice(begin, begin + SIZE) for begin in range(0, len(key), SIZE)]
    for head in range(HEADS):
        of_head = key[:, head // (HEADS // KV_HEADS)].double()
        scores = []
        for block in blocks[1:-recent]:
            high, low = of_head[block].amax(0), of_head[block].amin(0)
            group = slice(head // 3 * 3, head // 3 * 3 + 3)
            scores.append(torch.maximum(query[group].double() * high, query[group].double() * low).sum(1).max().item())
        best = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[: read - 1 - recent])
        chosen = [blocks[0], *(blocks[1 + i] for i in best), *blocks[-recent:]]
        keys = torch.cat([of_head[block] for block in chosen])
        values = torch.cat([value[block, head // 3].double() for block in chosen])
        outputs.append((keys @ query[head].double() * DIM**-0.5).softmax(0) @ values)
    return torch.stack(outputs)


def problem(length: int) -> Tensors:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return query, key, value


def decoded(
    backend: AttentionBackend, dtype: str, tensors: list[Tensors], read: int, recent: int
) -> tuple[torch.Tensor, AttentionBatch]:
    """What a step of one token gives for each of these sequences, whose other tokens are stored already."""
    layer, longest = LayerKVSpec(KV_HEADS, DIM, DIM, bounded=True), max(len(query) for query, _, _ in tensors)
    paged = PagedSequences([layer], SIZE, len(tensors), longest, dtype=dtype)
    stored = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    written = paged.step({i: len(query) - 1 for i, (query, _, _) in enumerate(tensors)})
    for part, counts in ((slice(0, -1), None), (slice(-1, None), dict.fromkeys(range(len(tensors)), 1))):
        batch = written if counts is None else paged.step(counts)
        key, value = (torch.cat([each[i][part] for each in tensors]).to(stored) for i in (1, 2))
        backend.write(paged.kv[0], key, value, batch)
    ends = [-(-length // SIZE) - recent for length in batch.context_lens.tolist()]
    full = [table[:end] for table, end in zip(batch.groups[0].block_tables, ends, strict=True)]
    of_each = torch.full((len(tensors),), read, dtype=torch.int32)
    batch.sparse = SparseReads(of_each[None], torch.full_like(of_each, recent), [torch.cat(full)])
    query = torch.stack([query[-1] for query, _, _ in tensors]).to(stored)
    return backend.attend(paged.kv[0], query, batch, scale=DIM**-0.5), batch


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


LENGTHS = (700, 40, 333, 1040)


def test_the_reference_reads_the_blocks_that_the_paper_chooses() -> None:
    tensors = [problem(length) for length in LENGTHS]
    actual, _ = decoded(ReferenceAttention(), "float32", tensors, 6, 2)
    for row, (query, key, value) in zip(actual, tensors, strict=True):
        read = min(6, -(-len(key) // SIZE))
        assert error(row, paper(query[-1], key, value, read, 2)) < 1e-5


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
@pytest.mark.usefixtures("restore_kernels")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_level_agrees_with_the_reference_and_gives_the_same_bits_in_any_batch(level: str, dtype: str) -> None:
    kernels.force_isa(level)
    tensors = [problem(length) for length in LENGTHS]
    actual, _ = decoded(NativeAttention(), dtype, tensors, 12, 3)
    expected, _ = decoded(ReferenceAttention(), dtype, tensors, 12, 3)
    assert error(actual, expected) < (1e-5 if dtype == "float32" else 1e-2)
    for row, alone in zip(actual, tensors, strict=True):
        assert torch.equal(row, decoded(NativeAttention(), dtype, [alone], 12, 3)[0][0])
    everything, batch = decoded(NativeAttention(), dtype, tensors, 66, 3)
    batch.sparse = None
    assert error(actual, everything) > 0.1


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
def test_what_cannot_be_read_sparsely_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="more than its most recent ones, got 3 and 3"):
        decoded(NativeAttention(), "float32", [problem(100)], 3, 3)
