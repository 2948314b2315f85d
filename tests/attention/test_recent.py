"""Layers below 8 bits read their first and most recent blocks in int8, by the query's position alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention, attend_dense
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import KVArena
from octavo.storage.codec import CODECS
from octavo.storage.recent_kv import RecentKV
from tests.attention.batches import PagedSequences

SIZE = 16


def round_trip(codec: str, side: int, x: torch.Tensor) -> torch.Tensor:
    one = torch.ones(x.shape[1])
    return CODECS[codec][side].decode(CODECS[codec][side].encode(x, one), x.shape[2], one)


def expected_at(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: int, codec: str, kept: tuple[int, int]
) -> torch.Tensor:
    """Attention of the query [1, heads, dim] at `position` over keys and values [tokens, kv_heads, dim]."""
    blocks = torch.arange(position + 1) // SIZE
    in_int8 = ((blocks < kept[0]) | (blocks > position // SIZE - kept[1]))[:, None, None]
    read = [
        torch.where(in_int8, round_trip("int8", side, x[: position + 1]), round_trip(codec, side, x[: position + 1]))
        for side, x in enumerate((key, value))
    ]
    dense = read[0].permute(1, 2, 0), read[1].transpose(0, 1)
    return attend_dense(query, *dense, scale=0.25, window=None, softcap=None, sinks=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "kept"), [("int4", (0, 1)), ("k8v4", (1, 1)), ("nvfp4", (1, 3)), ("int4", (4, 2)), ("k8v4", (4, 2))]
)
def test_each_query_reads_its_own_first_and_most_recent_blocks_in_int8(codec: str, kept: tuple[int, int]) -> None:
    torch.manual_seed(3)
    lengths = {0: 150, 1: 23}
    key, value = ({seq: torch.randn(count, 2, 64) * 4 for seq, count in lengths.items()} for _ in range(2))
    query = {seq: torch.randn(count, 4, 64) for seq, count in lengths.items()}
    dtype = f"{codec};sinks={kept[0]},recent={kept[1]}"
    for steps in (({0: 150, 1: 23},), ({0: 1, 1: 20}, {0: 63, 1: 1}, {0: 70}, {0: 1, 1: 1}, {0: 15, 1: 1})):
        paged = PagedSequences([LayerKVSpec(2, 64, 64)], SIZE, 2, 160, dtype=dtype)
        (kv,) = paged.kv
        done = dict.fromkeys(lengths, 0)
        for step in steps:
            batch = paged.step(step)
            new = [(seq, slice(done[seq], done[seq] + count)) for seq, count in step.items()]
            backend = ReferenceAttention()
            keys, values = (torch.cat([x[seq][piece] for seq, piece in new]) for x in (key, value))
            backend.write(kv, keys, values, batch)
            found = backend.attend(kv, torch.cat([query[seq][piece] for seq, piece in new]), batch, scale=0.25)
            rows = itertools.count()
            for seq, piece in new:
                for position in range(piece.start, piece.stop):
                    expected = expected_at(
                        query[seq][position : position + 1], key[seq], value[seq], position, codec, kept
                    )
                    torch.testing.assert_close(found[next(rows)], expected[0], atol=2e-4, rtol=2e-4)
                done[seq] = piece.stop


def test_a_sliding_window_ends_what_is_read_of_the_copies_too() -> None:
    torch.manual_seed(4)
    results = []
    for dtype in ("int8", "int4;sinks=2,recent=2"):
        paged = PagedSequences([LayerKVSpec(1, 32, 32, sliding_window=9)], SIZE, 1, 100, dtype=dtype)
        (kv,) = paged.kv
        torch.manual_seed(5)
        for count in (40, 1, 30):
            batch = paged.step({0: count})
            backend = ReferenceAttention()
            backend.write(kv, torch.randn(count, 1, 32), torch.randn(count, 1, 32), batch)
            results.append(backend.attend(kv, torch.randn(count, 1, 32), batch, scale=1.0))
    for int8, recent in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(int8, recent)  # nine tokens are all recent


needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("codec", "kept"), [("int4", (0, 1)), ("k8v4", (1, 3)), ("int4", (14, 10))])
def test_the_kernels_read_the_copies_as_the_reference_does(level: str, codec: str, kept: tuple[int, int]) -> None:
    torch.manual_seed(1)
    dtype = f"{codec};sinks={kept[0]},recent={kept[1]}"
    for dim, group, window, softcap in ((64, 3, None, None), (32, 1, 70, 20.0)):
        paged = PagedSequences([LayerKVSpec(2, dim, dim, window)], SIZE, 3, 550, dtype=dtype)
        (kv,) = paged.kv
        assert NativeAttention.supports(kv)
        sinks = torch.randn(2 * group) if window else None
        for count, step in enumerate(({0: 450, 1: 40, 2: 5}, {0: 1, 1: 1, 2: 1}, {1: 19, 2: 1})):
            batch = paged.step(step)
            key, value = (torch.randn(batch.num_tokens, 2, dim) for _ in range(2))
            NativeAttention().write(kv, key, value, batch)
            for query_dtype, error in ((torch.float32, 2e-3), (torch.bfloat16, 4e-2)):
                query = torch.randn(batch.num_tokens, 2 * group, dim).to(query_dtype)
                how: dict[str, Any] = {"scale": dim**-0.5, "softcap": softcap, "sinks": sinks}
                found = NativeAttention(exact=count % 2 == 0).attend(kv, query, batch, **how)
                expected = ReferenceAttention().attend(kv, query, batch, **how)
                assert torch.allclose(found.float(), expected.float(), atol=error, rtol=error)


@needs_kernels
@pytest.mark.parametrize(("codec", "dtype"), [("int4", torch.bfloat16), ("k8v4", torch.float32)])
def test_chunks_and_batches_change_no_bit(level: str, codec: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    total = 660
    key, value, query = (torch.randn(total, heads, 64).to(dtype) for heads in (2, 2, 6))
    outputs = []
    for steps in ((660,), (1, 63, 1, 500, 1, 30, 64), (512, 1, 147)):
        paged = PagedSequences([LayerKVSpec(2, 64, 64)], SIZE, 2, 700, dtype=f"{codec};sinks=2,recent=4")
        (kv,) = paged.kv
        rows, start = [], 0
        for count in steps:
            beside = count % 2  # a second sequence in some batches
            batch = paged.step({0: count, 1: 1} if beside else {0: count})
            piece = slice(start, start + count)
            new = [torch.cat((x[piece], x[:beside])) for x in (key, value, query)]
            backend = NativeAttention()
            backend.write(kv, new[0], new[1], batch)
            rows.append(backend.attend(kv, new[2], batch, scale=0.125)[:count])
            start += count
        outputs.append(torch.cat(rows))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@needs_kernels
@pytest.mark.parametrize("codec", ["int4", "k8v4"])
def test_own_codes_and_copies_are_encoded_on_the_way_to_the_bit(level: str, codec: str) -> None:
    torch.manual_seed(1)
    spec = KVCacheSpec.build([LayerKVSpec(2, 64, 96)], SIZE, f"{codec};sinks=1,recent=2")
    found, expected = (KVArena(spec, 8) for _ in range(2))
    tokens = 37
    qkv = torch.randn(tokens, 6 * 64 + 2 * (64 + 96)).bfloat16()
    slots = torch.randperm(48)[:tokens] + 16
    # The same places in other blocks; no two tokens share one, since threads write them in any order.
    copied = torch.tensor([0, 6, 4, 5])[slots // SIZE] * SIZE + slots % SIZE
    layer = found.layers[0]
    assert isinstance(layer, RecentKV)
    still, flat = torch.ones(1, 32), torch.zeros(1, 32)
    kernels.rope_write(
        qkv.clone(), *layer.for_kernels, still, flat, torch.zeros(tokens).long(), slots,
        copies=(*layer.copies.for_kernels, copied),
    )  # fmt: skip
    for part, places in zip(expected.layers[0].parts, (slots, copied), strict=True):
        part.write(qkv[:, 384:512].view(-1, 2, 64), qkv[:, 512:].view(-1, 2, 96), places)
    assert torch.equal(found._bytes, expected._bytes)


@needs_kernels
def test_copies_that_do_not_fit_their_layer_are_refused() -> None:
    (kv,) = KVArena(KVCacheSpec.build([LayerKVSpec(2, 64, 64)], SIZE, "int4;sinks=1,recent=2"), 4).layers
    (small,) = KVArena(KVCacheSpec.build([LayerKVSpec(1, 64, 64)], SIZE, "int8"), 4).coded_layers
    assert isinstance(kv, RecentKV)
    query, one = torch.zeros(1, 4, 64), torch.zeros(1, dtype=torch.int32)
    tables = (one.view(1, 1), one.long(), torch.tensor([0, 1]).int(), one + 1)
    for copied, block, first, recent, message in (
        (small.for_kernels, 0, 1, 1, "must have the heads and the block size"),
        (kv.copies.for_kernels, 0, 0, 0, "0 to 1048576 first blocks and 1 to 1048576 recent ones, got 0 and 0"),
        (kv.copies.for_kernels, 0, -1, 1, "got -1 and 1"),
        (kv.copies.for_kernels, 4, 0, 1, "refers to block 4 of 4"),
    ):
        copies = (*copied, one.view(1, 1) + block, first, recent)
        with pytest.raises(ValueError, match=message):
            kernels.attend(*kv.for_kernels, query, *tables, out=query, scale=1.0, copies=copies)
