"""Layers below 8 bits read their first and most recent blocks in int8, by the query's position alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from octavo.attention.reference import ReferenceAttention, attend_dense
from octavo.kvcache.spec import LayerKVSpec
from octavo.storage.codec import CODECS
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


@pytest.mark.parametrize("codec", ["int4", "k8v4", "nvfp4"])
@pytest.mark.parametrize("kept", [(0, 1), (1, 1), (1, 3), (4, 2)])
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
