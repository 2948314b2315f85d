"""The arena's views hold what was written, where the layout says, and nothing of one block lies in another."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import BlockLayout, KVArena, independent, pair_width, zero_pages
from octavo.storage.host import HostTier

FULL_AND_SLIDING = [LayerKVSpec(2, 8, 6), LayerKVSpec(2, 8, 6, 16), LayerKVSpec(2, 8, 6), LayerKVSpec(1, 4, 4, 16)]


def arena(block_size: int = 4, dtype: str = "float32", num_blocks: int = 6) -> KVArena:
    return KVArena(KVCacheSpec.build(FULL_AND_SLIDING, block_size, dtype), num_blocks)


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 3, 8, 16]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    num_tokens=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_what_is_written_through_slots_is_gathered_through_the_table(
    block_size: int, dtype: str, num_tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_tokens // block_size)
    pool = arena(block_size, dtype, num_blocks + 3)
    table = torch.randperm(num_blocks + 2, generator=generator)[:num_blocks] + 1
    positions = torch.randperm(num_tokens, generator=generator)
    slots = table[positions // block_size] * block_size + positions % block_size
    written = []
    for layer, spec in zip(pool.layers, FULL_AND_SLIDING, strict=True):
        key = torch.randn(num_tokens, spec.num_kv_heads, spec.key_dim, generator=generator)
        value = torch.randn(num_tokens, spec.num_kv_heads, spec.value_dim, generator=generator)
        # Groups have their own blocks: two layers of different groups may not use one block at a time.
        if layer.group == 0:
            layer.write(key[positions], value[positions], slots)
            written.append((layer, key, value))
    for layer, key, value in written:
        gathered_key, gathered_value = layer.gather(table, num_tokens)
        assert torch.equal(gathered_key, key.to(getattr(torch, dtype)))
        assert torch.equal(gathered_value, value.to(getattr(torch, dtype)))


def test_half_types_lie_in_pairs() -> None:
    layer = arena(block_size=4, dtype="bfloat16").float_layers[0]
    key, value = torch.arange(8.0).expand(2, 2, 8), torch.tensor([1.0, 2.0])[:, None, None].expand(2, 2, 6)
    layer.write(key, value, torch.tensor([4, 5]))
    # K [dim / 2][token][2]: dimensions 2 and 3 of token 0, then of token 1; V [token / 2][dim][2]: token 0, token 1.
    assert layer.key[1, 0].flatten()[8:12].tolist() == [2, 3, 2, 3]
    assert layer.value[1, 0].flatten()[:4].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("block_size", "key_dim", "element_bytes", "width"), [(16, 64, 2, 2), (16, 64, 4, 1), (1, 64, 2, 1), (16, 63, 2, 1)]
)
def test_only_even_half_types_are_paired(block_size: int, key_dim: int, element_bytes: int, width: int) -> None:
    assert pair_width(block_size, key_dim, element_bytes) == width


def test_a_block_is_one_contiguous_run_of_bytes() -> None:
    pool = arena()
    assert pool.nbytes == 6 * pool.spec.block_bytes
    for group in (0, 1):
        layers = [layer for layer in pool.float_layers if layer.group == group]
        for layer in layers:
            layer.key[2] = 1.0
            layer.value[2] = 1.0
        touched = pool._bytes.view(torch.float32).ne(0).any(dim=1)
        assert touched.tolist() == [False, False, True, False, False, False]
        used = sum(layer.key[2].nbytes + layer.value[2].nbytes for layer in layers)
        assert pool._bytes[2].view(torch.float32).count_nonzero() * 4 == used
        pool._bytes.zero_()


def test_copies_read_all_sources_before_they_write() -> None:
    pool = arena()
    for block in range(6):
        pool._bytes[block] = block
    pool.copy_blocks([(1, 2), (2, 3), (4, 1)])
    assert [int(row[0]) for row in pool._bytes] == [0, 4, 1, 2, 4, 5]
    assert torch.equal(pool._bytes, pool._bytes[:, :1].expand_as(pool._bytes))
    pool.copy_blocks([])


class Operations(TorchDispatchMode):
    """Notes what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_blocks_are_moved_as_whole_rows_and_not_byte_by_byte() -> None:
    pool, tier = arena(), HostTier(4, arena().spec.block_bytes)
    with Operations() as seen:
        pool.copy_blocks([(1, 2), (1, 3)])
        tier.write([2, 0], pool.rows([2, 3]))
        tier.write([1], pool.read_blocks([1]))
        pool.write_blocks([4, 5], tier.rows([0, 2]))
    assert "copy_" in seen.names
    assert not {"index", "index_put_", "_index_put_impl_"} & seen.names


def test_copies_in_a_row_are_told_from_independent_ones() -> None:
    assert independent([(2, 4), (2, 5)])
    assert not independent([(2, 4), (4, 5)])


def test_a_fresh_pool_is_zero_and_takes_no_memory_until_it_is_written() -> None:
    before = resident_bytes()
    pool = KVArena(KVCacheSpec.build([LayerKVSpec(8, 128, 128)], 16, "bfloat16"), 8192)
    assert pool.nbytes == 512 << 20
    assert not pool.float_layers[0].key[-1].any()
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        pytest.skip("the resident size is read from /proc")


def test_a_pool_without_a_block_to_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 blocks .* got 1"):
        arena(num_blocks=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_layouts_hold_the_same_tokens(dtype: str) -> None:
    spec = KVCacheSpec.build([LayerKVSpec(2, 6, 4), LayerKVSpec(2, 6, 4)], 8, dtype)
    slots, table = torch.tensor([19, 8, 30, 17]), torch.tensor([2, 1, 3])
    key, value = torch.randn(4, 2, 6), torch.randn(4, 2, 4)
    found = []
    for layout in BlockLayout:
        kv = KVArena(spec, 5, layout=layout).layers[1]
        kv.write(key, value, slots)
        found.append(kv.gather(table, 20))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    tokens_major = KVArena(spec, 5, layout=BlockLayout.TOKENS).float_layers[1]
    assert (tokens_major.key.stride(2), tokens_major.value.stride(3)) == (1, 1), "a head's dimensions are adjacent"


def test_memory_that_the_system_refuses_is_an_error_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"cannot reserve 4194304.00 TiB of memory for the KV cache"):
        zero_pages(2**62, "the KV cache")
