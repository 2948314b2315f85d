from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from tests.kvcache.caches import FULL, sliding


def llama(layers: int, kv_heads: int, block_size: int = 16) -> KVCacheSpec:
    layer = LayerKVSpec(num_kv_heads=kv_heads, key_dim=128, value_dim=128)
    return KVCacheSpec.build([layer] * layers, block_size, "float16")


def test_llama_3_1_70b_takes_327680_bytes_a_token() -> None:
    spec = llama(layers=80, kv_heads=8)
    assert spec.bytes_per_token == 327_680
    assert spec.block_bytes * spec.blocks_for_tokens(4096) == 1_342_177_280
    assert 256 * spec.block_bytes * spec.blocks_for_tokens(4096) == 320 * 1024**3


def test_llama_2_7b_takes_524288_bytes_a_token() -> None:
    assert llama(layers=32, kv_heads=32).bytes_per_token == 524_288


def test_gqa_takes_an_eighth_of_64_heads() -> None:
    tokens = 8192 * 32
    assert round(tokens * llama(80, 8).bytes_per_token / 1e9, 1) == 85.9
    assert round(tokens * llama(80, 64).bytes_per_token / 1e9) == 687


def test_150_tokens_are_10_blocks_of_16() -> None:
    assert llama(80, 8).blocks_for_tokens(150) == 10


def test_layers_of_one_kind_are_one_group() -> None:
    spec = KVCacheSpec.build([sliding(8)] * 5, 4, "float32")
    assert [g.layer_indices for g in spec.groups] == [(0, 1, 2, 3, 4)]


def test_mixed_layers_are_dealt_into_groups_of_equal_size_full_attention_first() -> None:
    layers = [sliding(8), sliding(8), FULL] * 2
    spec = KVCacheSpec.build(layers, 4, "float32")
    assert [(g.layer_indices, g.sliding_window) for g in spec.groups] == [((2, 5), None), ((0, 1), 8), ((3, 4), 8)]
    assert spec.block_bytes == 2 * 4 * FULL.elements_per_token * 4


def test_copies_in_int8_are_groups_of_the_layers_of_fewer_bits_that_slide_within_their_windows() -> None:
    layers = [FULL, FULL, sliding(8), sliding(64)] * 2
    spec = KVCacheSpec.build(layers, 4, "int4*4,int8*4;sinks=1,recent=3")
    copies = [(g.layer_indices, g.sliding_window, g.sink_blocks) for g in spec.groups if g.in_int8]
    assert copies == [((0, 1), 9, 1), ((2,), 8, 1), ((3,), 9, 1)]


@pytest.mark.parametrize(
    ("entropies", "groups"),
    [
        ([0.5, 0.1, 0.4, 0.2, 0.3, 0.6], [(1, 3), (2, 4), (0, 5)]),
        ([0.4, 0.3, 0.2, 0.1], [(3,), (2,), (1,), (0,)]),
        ([0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1], [(3, 4), (5, 6), (1, 2), (0,)]),
    ],
)
def test_a_budget_by_entropy_divides_layers_into_groups_of_like_entropy(
    entropies: list[float], groups: list[tuple[int, ...]]
) -> None:
    budget = KVBudget(mode="bounded", tokens=100, layers=tuple(entropies))
    spec = KVCacheSpec.build([FULL] * len(entropies), 4, "float32", budget)
    assert [group.layer_indices for group in spec.groups] == groups
    kept = spec.blocks_kept(budget)
    assert kept == sorted(kept)
    assert sum(kept) == len(groups) * 25
    assert spec.blocks_kept(replace(budget, layers=())) == kept, "it is the server's that divides"
    # Of a prompt, each group keeps all until it is computed.
    assert spec.peak_blocks(4000, 100, budget, num_prompt_tokens=400) == len(groups) * 100
    layers = [FULL] * len(entropies) + [sliding(8)] * 2
    windowed = KVCacheSpec.build(layers, 4, "float32", budget)
    assert max(len(group.layer_indices) for group in windowed.groups) <= 2


def test_entropies_must_be_as_many_as_layers_without_a_window() -> None:
    budget = KVBudget(mode="bounded", tokens=100, layers=(0.5, 0.5))
    with pytest.raises(ConfigError, match="has 2 entropies, but 3 layers have no sliding window"):
        KVCacheSpec.build([FULL] * 3, 4, "float32", budget)


@given(window=st.integers(1, 40), size=st.sampled_from([1, 2, 4, 16]), step=st.integers(1, 64), n=st.integers(1, 300))
def test_peak_blocks_bounds_what_a_sliding_sequence_ever_holds(window: int, size: int, step: int, n: int) -> None:
    spec = KVCacheSpec.build([sliding(window)], size, "float32")
    computed = peak = 0
    while computed < n:
        chunk = min(step, n - computed)
        first_live = max(0, computed - window + 1) // size
        peak = max(peak, spec.blocks_for_tokens(computed + chunk) - first_live)
        computed += chunk
    assert peak <= spec.peak_blocks(n, step)


@pytest.mark.parametrize(
    ("layers", "block_size", "dtype", "message"),
    [([], 16, "float32", "at least one"), ([FULL], 0, "float32", "got 0"), ([FULL], 16, "int3", "int3")],
)
def test_impossible_specs_are_refused(layers: list[LayerKVSpec], block_size: int, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheSpec.build(layers, block_size, dtype)
