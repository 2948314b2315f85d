"""Attention sinks: queries rotated twice over stored keys, against keys rotated for their places in the cache, as
StreamingLLM defines it (Xiao et al. 2024, section 3.2)."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.checkpoint.model_config import RopeConfig
from octavo.kvcache.spec import LayerKVSpec
from octavo.models.rotary import RotaryTable, RotaryTables
from tests.attention.batches import PagedSequences
from tests.levels import LEVELS

BLOCK_SIZE, HEADS, DIM = 16, 6, 64


def rotate(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates heads [tokens, heads, dim] for `positions` [tokens], in float64."""
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    half = heads.double().split(DIM // 2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((half[0] * cos - half[1] * sin, half[1] * cos + half[0] * sin), dim=-1)


def paper(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, budget: int) -> torch.Tensor:
    """Every query attends over a cache of at most `budget` tokens, rotated for their places in it. Float64."""
    outputs = []
    for position in range(len(query)):
        end = position + 1
        kept = torch.arange(end)
        if end > budget:
            kept = torch.cat((kept[:BLOCK_SIZE], kept[end - budget + BLOCK_SIZE :]))
        places = torch.arange(len(kept))
        asked = rotate(query[position:end], places[-1:])[0]
        keys = rotate(key[kept], places).repeat_interleave(HEADS // key.shape[1], dim=1)
        values = value[kept].double().repeat_interleave(HEADS // key.shape[1], dim=1)
        weights = (torch.einsum("hd,thd->ht", asked, keys) * DIM**-0.5).softmax(dim=-1)
        outputs.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(outputs)


def streamed(
    backend: AttentionBackend, dtype: str, budget: int, chunks: list[int], tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """What a backend gives for a sequence that comes in chunks; blocks that are let go turn NaN."""
    query, key, value = tensors
    paged = PagedSequences([LayerKVSpec(key.shape[1], DIM, DIM)], BLOCK_SIZE, 1, len(query), dtype=dtype, budget=budget)
    stored, parts, start = torch.bfloat16 if dtype != "float32" else torch.float32, [], 0
    for count in chunks:
        span, batch = slice(start, start + count), paged.step({0: count})
        backend.write(paged.kv[0], rotate(key[span], batch.positions).to(stored), value[span].to(stored), batch)
        parts.append(attend(backend, paged, query[span].to(stored), batch))
        start += count
    return torch.cat(parts)


def attend(
    backend: AttentionBackend, paged: PagedSequences, query: torch.Tensor, batch: AttentionBatch
) -> torch.Tensor:
    apart = None if batch.sinks is None else rotate(query, batch.sinks.positions).to(query.dtype)
    asked = rotate(query, batch.positions).to(query.dtype)
    return backend.attend(paged.kv[0], asked, batch, scale=DIM**-0.5, sink_query=apart)


def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, 2, 2))
    return query, key, value


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


CHUNKS = [60, 50, 1, 1, 40, 8]  # the second crosses the budget


def test_the_reference_agrees_with_keys_rotated_for_their_places_in_the_cache() -> None:
    problem = tensors(sum(CHUNKS))
    assert error(streamed(ReferenceAttention(), "float32", 80, CHUNKS, problem), paper(*problem, 80)) < 1e-5


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
@pytest.mark.usefixtures("restore_kernels")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_every_level_agrees_with_the_reference_and_gives_the_same_bits_by_any_chunks(level: str, dtype: str) -> None:
    kernels.force_isa(level)
    budget, problem = 80, tensors(sum(CHUNKS))
    actual = streamed(NativeAttention(), dtype, budget, CHUNKS, problem)
    assert error(actual, streamed(ReferenceAttention(), dtype, budget, CHUNKS, problem)) < (
        1e-5 if dtype == "float32" else 2e-2
    )
    assert torch.equal(actual, streamed(NativeAttention(), dtype, budget, [100, 1, 9, 50], problem))
    dense = streamed(NativeAttention(), dtype, 0, CHUNKS, problem)
    assert torch.equal(actual[:budget], dense[:budget])  # nothing has been evicted there


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
def test_a_window_of_several_splits_agrees_with_the_reference() -> None:
    chunks, problem = [1500, 1, 20], tensors(1521)
    actual = streamed(NativeAttention(), "bfloat16", 1200, chunks, problem)
    assert error(actual, streamed(ReferenceAttention(), "bfloat16", 1200, chunks, problem)) < 1e-2


def test_angles_beyond_the_context_are_those_of_float64_in_tables_that_do_not_grow() -> None:
    rope = RopeConfig(rotary_dim=DIM)
    tables = RotaryTables([rope], torch.device("cpu"), 1000)
    for first in (0, 900, 999_983, *range(1000, 200_000, 1900)):
        positions = torch.tensor([5, first, first + 300, 999_999])
        batch = PagedSequences([LayerKVSpec(2, DIM, DIM)], BLOCK_SIZE, 1, 32).step({0: 4})
        batch.positions, batch.max_context_len = positions, 1_000_000
        (table,), rows, _ = tables.of_step(batch)
        # Frequencies are float32, as transformers has them; angles of large positions need more.
        angles = positions[:, None].double() * tables[rope].inv_freq.double()
        for cosines, expected in zip(table, (angles.cos(), angles.sin()), strict=True):
            torch.testing.assert_close(cosines[rows].double(), expected, atol=1e-4, rtol=1e-5)
    assert len(table[0]) <= 1024 + 128 * RotaryTable.CHUNK
