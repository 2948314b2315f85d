"""The C++ attention against an fp64 reference at every instruction-set level, and its promise about bits."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.attention.base import AttentionBatch
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.kvcache.spec import LayerKVSpec
from octavo.storage.layer_kv import LayerKV
from tests.attention.batches import PagedSequences
from tests.attention.oracle import oracle_attention
from tests.levels import HAS_BOTH_TILES, LEVELS

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def exact(kv: LayerKV, query: torch.Tensor, batch: AttentionBatch, **options: Any) -> torch.Tensor:
    """The textbook's answer in float64 for each sequence of the batch; nothing of it is shared with any backend."""
    tables, bounds, contexts = batch.groups[kv.group].block_tables, batch.query_start.tolist(), batch.context_lens
    outputs = []
    for i in range(batch.num_seqs):
        key, value = kv.gather(tables[batch.table_rows[i]].long(), int(contexts[i]))
        asked = query[bounds[i] : bounds[i + 1]]
        outputs.append(oracle_attention(asked, key, value, window=kv.sliding_window, **options))
    return torch.cat(outputs)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def fill(sequences: PagedSequences, batch: AttentionBatch, heads: int, seed: int = 0) -> torch.Tensor:
    """Writes random keys and values for the step's tokens; returns random queries."""
    generator = torch.Generator().manual_seed(seed)
    for kv, layer in zip(sequences.kv, sequences.spec.layers, strict=True):
        key = torch.randn(batch.num_tokens, layer.num_kv_heads, layer.key_dim, generator=generator)
        value = torch.randn(batch.num_tokens, layer.num_kv_heads, layer.value_dim, generator=generator)
        kv.write(key, value, batch.groups[kv.group].slot_mapping)
    dim = sequences.spec.layers[0].key_dim
    return torch.randn(batch.num_tokens, heads, dim, generator=generator).to(sequences.arena.float_layers[0].key.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=12, deadline=None)
@given(
    key_dim=st.sampled_from([24, 32, 48, 64, 72, 80, 120, 128, 256, 576]),
    value_dim=st.sampled_from([None, 16, 64, 96, 512]),
    kv_heads=st.integers(1, 3),
    share=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 50]),
    block_size=st.sampled_from([16, 32, 48, 128]),
    first=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    more=st.integers(1, 40),
    window=st.sampled_from([None, 1, 7, 64, 100]),
    softcap=st.sampled_from([None, 5.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_level_agrees_with_float64(
    level: str,
    dtype: str,
    key_dim: int,
    value_dim: int | None,
    kv_heads: int,
    share: int,
    block_size: int,
    first: list[int],
    more: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    seed: int,
) -> None:
    kernels.force_isa(level)
    layer = LayerKVSpec(kv_heads, key_dim, value_dim or -(-key_dim // 16) * 16, window)
    sequences = PagedSequences([layer], block_size, len(first), max(first) + more, dtype=dtype, seed=seed)
    heads = kv_heads * share
    sinks = torch.randn(heads) if with_sinks else None
    backend, kv = NativeAttention(), sequences.kv[0]
    assert backend.supports(kv)
    for tokens in (dict(enumerate(first)), {0: more}):
        batch = sequences.step(tokens)
        query = fill(sequences, batch, heads, seed)
        actual = backend.attend(kv, query, batch, scale=key_dim**-0.5, softcap=softcap, sinks=sinks)
        expected = exact(kv, query, batch, scale=key_dim**-0.5, softcap=softcap, sinks=sinks)
        assert actual.dtype == query.dtype
        assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "layer", [LayerKVSpec(2, 64, 64), LayerKVSpec(2, 64, 64, 700), LayerKVSpec(1, 576, 512)], ids=str
)
def test_a_context_of_several_splits_agrees_with_float64(level: str, dtype: str, layer: LayerKVSpec) -> None:
    kernels.force_isa(level)
    sequences = PagedSequences([layer], 16, 1, 2600, dtype=dtype)
    fill(sequences, sequences.step({0: 2570}), 1)
    for count in (1, 20):
        batch = sequences.step({0: count})
        query = fill(sequences, batch, 6, seed=count)
        actual = NativeAttention().attend(sequences.kv[0], query, batch, scale=0.125)
        assert relative_error(actual, exact(sequences.kv[0], query, batch, scale=0.125)) < TOLERANCE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("key_dim", [2, 20, 24, 66, 72, 120])
def test_key_heads_of_any_even_size_are_multiplied_whole_and_have_the_same_bits_by_any_step(
    level: str, key_dim: int
) -> None:
    kernels.force_isa(level)
    sequences = PagedSequences([LayerKVSpec(2, key_dim, 64)], 16, 1, 41, dtype="bfloat16")
    batch, kv = sequences.step({0: 40}), sequences.kv[0]
    query = fill(sequences, batch, 6)
    whole = NativeAttention().attend(kv, query, batch, scale=key_dim**-0.5)
    assert relative_error(whole, exact(kv, query, batch, scale=key_dim**-0.5)) < TOLERANCE["bfloat16"]
    last = replace(batch, query_start=torch.tensor([0, 1], dtype=torch.int32))
    assert torch.equal(NativeAttention().attend(kv, query[39:], last, scale=key_dim**-0.5), whole[39:])


def attend_in_steps(
    dtype: str, window: int | None, steps: list[dict[int, int]], sinks: None = None
) -> dict[int, torch.Tensor]:
    """Every sequence's outputs, token by token, however its tokens were dealt into steps."""
    lengths = {0: 700, 1: 90, 2: 300}
    sequences = PagedSequences([LayerKVSpec(2, 64, 64, window)], 16, 3, 700, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    keys, values, queries = (
        {seq: torch.randn(n, heads, 64, generator=generator) for seq, n in lengths.items()} for heads in (2, 2, 6)
    )
    outputs: dict[int, list[torch.Tensor]] = {seq: [] for seq in lengths}
    for step in steps:
        spans = {seq: slice(sequences.lengths[seq], sequences.lengths[seq] + count) for seq, count in step.items()}
        batch, kv = sequences.step(step), sequences.kv[0]
        key, value, query = (
            torch.cat([source[seq][span] for seq, span in spans.items()]) for source in (keys, values, queries)
        )
        kv.write(key, value, batch.groups[0].slot_mapping)
        out = NativeAttention().attend(kv, query.to(kv.key.dtype), batch, scale=0.125, sinks=sinks)
        for seq, part in zip(step, out.split(list(step.values())), strict=True):
            outputs[seq].append(part)
    assert sequences.lengths == list(lengths.values())
    return {seq: torch.cat(parts) for seq, parts in outputs.items()}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("level", LEVELS)
def test_an_infinite_token_does_not_reach_the_queries_that_do_not_see_it(
    level: str, window: int | None, dtype: str
) -> None:
    kernels.force_isa(level)
    sequences = PagedSequences([LayerKVSpec(1, 64, 64, window)], 16, 1, 80, dtype=dtype)
    batch, kv = sequences.step({0: 70}), sequences.kv[0]
    query = fill(sequences, batch, 3)
    sound = NativeAttention().attend(kv, query, batch, scale=0.125)
    infinite = torch.full((1, 1, 64), float("inf"))
    for token in (21, 22):  # the second and the first of a pair of bf16
        kv.write(infinite, infinite, batch.groups[0].slot_mapping[token : token + 1])
    spoilt = NativeAttention().attend(kv, query, batch, scale=0.125)
    behind = 70 if window is None else 22 + window
    assert torch.equal(spoilt[:21], sound[:21])
    assert torch.equal(spoilt[behind:], sound[behind:])
    assert not spoilt[21:behind].isfinite().any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_whose_score_is_minus_infinity_has_no_weight(level: str, dtype: str) -> None:
    kernels.force_isa(level)
    sequences = PagedSequences([LayerKVSpec(1, 64, 64)], 16, 1, 80, dtype=dtype)
    batch, kv = sequences.step({0: 70}), sequences.kv[0]
    query = fill(sequences, batch, 3).abs()
    key = torch.randn(1, 1, 64)
    key[..., 7] = -torch.inf
    kv.write(key, torch.ones(1, 1, 64), batch.groups[0].slot_mapping[20:21])
    actual = NativeAttention().attend(kv, query, batch, scale=0.125)
    assert relative_error(actual[21:], exact(kv, query, batch, scale=0.125)[21:]) < TOLERANCE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", None), ("bfloat16", 130), ("float32", None)])
def test_a_tokens_bits_do_not_depend_on_batch_chunks_or_threads(level: str, dtype: str, window: int | None) -> None:
    kernels.force_isa(level)
    whole = [{0: 700, 1: 90, 2: 300}]
    alone = [{0: 700}, {1: 90}, {2: 300}]
    chunks = [{0: 137, 2: 1}, {0: 512, 1: 64, 2: 250}, {0: 40, 1: 25, 2: 48}, {0: 10}, {0: 1, 1: 1, 2: 1}]
    kernels.set_num_threads(1)
    expected = attend_in_steps(dtype, window, whole)
    for threads, steps in ((1, alone), (1, chunks), (2, whole), (2, chunks), (3, alone)):
        kernels.set_num_threads(threads)
        actual = attend_in_steps(dtype, window, steps)
        assert all(torch.equal(actual[seq], expected[seq]) for seq in expected), (threads, steps)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", None), ("bfloat16", 7000), ("float32", None)])
def test_a_contexts_parts_are_merged_alike_by_any_number_of_threads(level: str, dtype: str, window: int | None) -> None:
    kernels.force_isa(level)
    sequences = PagedSequences([LayerKVSpec(1, 32, 32, window)], 16, 2, 9300, dtype=dtype)
    fill(sequences, sequences.step({0: 9216, 1: 5000}), 1)
    batch = sequences.step({0: 2, 1: 1})
    query = fill(sequences, batch, 2, seed=1)
    results = []
    for threads in (1, 2, 3, 64):
        kernels.set_num_threads(threads)
        results.append(NativeAttention().attend(sequences.kv[0], query, batch, scale=0.2))
    assert relative_error(results[0], exact(sequences.kv[0], query, batch, scale=0.2)) < TOLERANCE[dtype]
    assert all(torch.equal(result, results[0]) for result in results)


# With the larger scale, maxima grow by so much from tile to tile that states are rescaled.
@pytest.mark.parametrize("scale", [0.125, 2.0])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [51, 96, 192])
@pytest.mark.parametrize("level", [level for level in LEVELS if level.startswith("amx")])
def test_an_item_of_up_to_192_rows_in_tiles_agrees_with_float64_and_has_the_bits_of_small_ones(
    level: str, rows: int, window: int | None, scale: float
) -> None:
    kernels.force_isa(level)
    sequences = PagedSequences([LayerKVSpec(2, 64, 64, window)], 16, 2, 700, dtype="bfloat16")
    fill(sequences, sequences.step({0: 300, 1: 5}), 6)
    # One thread gets four items of as many rows each as there are in all, or 192.
    tokens = rows * 4 // 6
    batch, kv = sequences.step({0: tokens - 9, 1: 9}), sequences.kv[0]
    query, sinks = fill(sequences, batch, 6, seed=1), torch.randn(6)
    kernels.set_num_threads(1)
    large = NativeAttention().attend(kv, query, batch, scale=scale, sinks=sinks)
    kernels.set_num_threads(8)  # items of 48 rows
    small = NativeAttention().attend(kv, query, batch, scale=scale, sinks=sinks)
    assert torch.equal(large, small)
    expected = exact(kv, query, batch, scale=scale, sinks=sinks)
    by_token = (large.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert by_token.max() < TOLERANCE["bfloat16"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BOTH_TILES, reason="this CPU has no AMX, or the emulation is not built")
@pytest.mark.parametrize(
    ("dim", "block_size", "share", "window", "softcap"),
    [(64, 16, 17, None, None), (80, 16, 7, 100, None), (128, 48, 1, None, 5.0), (576, 128, 3, 70, None)],
)
def test_emulated_tiles_attend_with_the_bits_of_the_processors(
    dim: int, block_size: int, share: int, window: int | None, softcap: float | None
) -> None:
    layer = LayerKVSpec(2, dim, dim, window)
    sequences = PagedSequences([layer], block_size, 2, 700, dtype="bfloat16")
    sinks = torch.randn(2 * share)
    for tokens in ({0: 90, 1: 37}, {0: 1, 1: 1}, {0: 580}, {0: 1}):
        batch = sequences.step(tokens)
        query = fill(sequences, batch, 2 * share)
        results = []
        for level in ("amx", "amx_emulated"):
            kernels.force_isa(level)
            results.append(
                NativeAttention().attend(sequences.kv[0], query, batch, scale=dim**-0.5, softcap=softcap, sinks=sinks)
            )
        assert torch.equal(*results)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_any_size_have_finite_weights(level: str, dtype: str, sign: int) -> None:
    """Even where a maximum's last place counts for more than what float32 can hold as a power of two."""
    kernels.force_isa(level)
    for size in (1e3, 3e4, 1e5, 1e8, 1e11):
        sequences = PagedSequences([LayerKVSpec(1, 64, 64)], 16, 1, 700, dtype=dtype)
        batch, kv = sequences.step({0: 650}), sequences.kv[0]
        # One dimension alone, so that a score is a product, and no two of them are near to each other.
        query, key = torch.zeros(650, 3, 64, dtype=kv.key.dtype), torch.zeros(650, 1, 64)
        query[..., 5], key[:, 0, 5] = size, (torch.randperm(650) % 128 + 128) * sign * size
        value = torch.randn(650, 1, 64).to(kv.key.dtype)
        kv.write(key, value, batch.groups[0].slot_mapping)
        scores = (query[:, 0].double() @ kv.gather(batch.groups[0].block_tables[0].long(), 650)[0][:, 0].double().T) / 8
        weights = scores.masked_fill(torch.ones(650, 650).triu(1).bool(), -torch.inf).softmax(-1)
        expected = (weights @ value[:, 0].double())[:, None].expand(650, 3, 64)
        assert relative_error(NativeAttention().attend(kv, query, batch, scale=0.125), expected) < TOLERANCE[dtype]


def test_a_block_of_any_size_gives_the_same_bits() -> None:
    results = []
    for block_size in (16, 64, 1024):
        sequences = PagedSequences([LayerKVSpec(1, 64, 64)], block_size, 1, 1000, dtype="bfloat16")
        fill(sequences, sequences.step({0: 900}), 3)
        batch = sequences.step({0: 30})
        query = fill(sequences, batch, 3)
        results.append(NativeAttention().attend(sequences.kv[0], query, batch, scale=0.125))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_strided_query_out_of_a_fused_product_is_read_in_place() -> None:
    sequences = PagedSequences([LayerKVSpec(1, 64, 64)], 16, 1, 40, dtype="float32")
    batch = sequences.step({0: 40})
    query = fill(sequences, batch, 3)
    fused = torch.cat((query.view(40, -1), torch.full((40, 128), float("nan"))), dim=-1)
    strided = fused[:, : 3 * 64].view(40, 3, 64)
    backend = NativeAttention()
    expected = backend.attend(sequences.kv[0], query, batch, scale=0.125)
    assert torch.equal(backend.attend(sequences.kv[0], strided, batch, scale=0.125), expected)


@pytest.mark.parametrize(
    ("block_size", "dtype", "key_dim", "value_dim"),
    [
        (8, "float32", 64, 64),
        (16, "float16", 64, 64),
        (16, "float32", 64, 40),
        (16, "float32", 592, 64),
        (16, "float32", 64, 592),
    ],
)
def test_what_the_kernels_do_not_reach_falls_back_to_the_reference(
    block_size: int, dtype: str, key_dim: int, value_dim: int
) -> None:
    sequences = PagedSequences([LayerKVSpec(1, key_dim, value_dim)], block_size, 1, 40, dtype=dtype)
    batch = sequences.step({0: 40})
    query = fill(sequences, batch, 2)
    assert not NativeAttention.supports(sequences.kv[0])
    actual = NativeAttention().attend(sequences.kv[0], query, batch, scale=0.1)
    assert torch.equal(actual, ReferenceAttention().attend(sequences.kv[0], query, batch, scale=0.1))


def native_arguments() -> dict:
    return {
        "keys": torch.zeros(5, 2, 32, 16, 2, dtype=torch.bfloat16),
        "values": torch.zeros(5, 2, 8, 64, 2, dtype=torch.bfloat16),
        "query": torch.zeros(3, 4, 64, dtype=torch.bfloat16),
        "block_tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "table_rows": torch.tensor([0]),
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "context_lens": torch.tensor([20], dtype=torch.int32),
        "out": torch.empty(3, 4, 64, dtype=torch.bfloat16),
        "scale": 1.0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 4, 64)}, r"query must be bfloat16, got float32 \[3, 4, 64\]"),
        ({"query": torch.zeros(3, 4, 32, dtype=torch.bfloat16)}, r"query must have shape \[\*, \*, 64\]"),
        (
            {"query": torch.zeros(3, 3, 64, dtype=torch.bfloat16), "out": torch.empty(3, 3, 64).bfloat16()},
            r"query heads \(3\) must be a multiple of KV heads",
        ),
        ({"block_tables": torch.tensor([[1, 5]], dtype=torch.int32)}, "refers to block 5 of 5"),
        ({"block_tables": torch.tensor([[-1, 2]], dtype=torch.int32)}, "refers to block -1 of 5"),
        ({"table_rows": torch.tensor([1])}, r"table_rows\[0\] is 1, must be in \[0, 1\)"),
        ({"table_rows": torch.tensor([0, 0])}, r"table_rows must have shape \[1\]"),
        ({"context_lens": torch.tensor([33], dtype=torch.int32)}, "needs 3 blocks for 33 tokens, its table has 2"),
        ({"context_lens": torch.tensor([2], dtype=torch.int32)}, "has 3 new tokens but a context of 2"),
        ({"context_lens": torch.tensor([20])}, "context_lens must be int32, got int64"),
        ({"query_start": torch.tensor([0, 4], dtype=torch.int32)}, "has tokens 0 to 4 of 3"),
        ({"query_start": torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)}, "tokens 2147483647 to -2147483648"),
        ({"query_start": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)}, "tokens -2147483648 to 2147483647"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\]"),
        ({"values": torch.zeros(5, 2, 8, 40, 2, dtype=torch.bfloat16)}, "value_dim must be a multiple of 16"),
        ({"window": -1}, "window must be positive"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"scale": float("nan")}, "scale must be positive, got nan"),
    ],
)
def test_a_bad_argument_is_a_value_error_with_the_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.attend(**{**native_arguments(), **change})


def test_the_good_arguments_of_that_test_are_good(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert kernels.attend(**native_arguments()).shape == (3, 4, 64)
    assert not caplog.records


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("level", LEVELS)
def test_latents_have_the_bits_of_values_that_are_stored_apart(level: str, dtype: str) -> None:
    kernels.force_isa(level)
    # Contexts of one split, and of several.
    for key_dim, value_dim, group, block_size, first in ((576, 512, 5, 16, 70), (80, 64, 20, 32, 600)):
        outputs = []
        for latent in (False, True):
            torch.manual_seed(key_dim)
            paged = PagedSequences([LayerKVSpec(1, key_dim, value_dim, latent=latent)], block_size, 2, 700, dtype=dtype)
            (kv,) = paged.kv
            for step in ({0: first, 1: 33}, {0: 1, 1: 1}, {1: 19, 0: 1}):
                batch = paged.step(step)
                key = torch.randn(batch.num_tokens, 1, key_dim)
                kv.write(key, key[..., -value_dim:], batch.groups[0].slot_mapping)
                query = torch.randn(batch.num_tokens, group, key_dim).to(kv.key.dtype)
                assert NativeAttention.supports(kv)
                outputs += [NativeAttention(exact=e).attend(kv, query, batch, scale=0.1) for e in (False, True)]
                assert kv.gather(batch.groups[0].block_tables[0].long(), 20)[1].shape == (20, 1, value_dim)
        apart, together = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
        assert all(map(torch.equal, together, apart))
