from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.checkpoint.model_source import load_model_config, resolve_model
from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.models.decoder import Decoder
from octavo.models.linear import PackedLinear, PlainLinear
from octavo.models.loader import open_weights
from octavo.models.transformers_bridge import TransformersModel
from octavo.planner.calculator import (
    MemoryBudget,
    SequenceCost,
    activation_bytes,
    block_tokens,
    pool_for_memory,
    smallest_pool,
    weight_bytes,
)
from octavo.planner.sources import find_shape, shape_of_source
from octavo.storage.arena import KVArena
from tests.attention.batches import PagedSequences
from tests.kvcache.caches import FULL, admit_and_compute, make_manager, make_sequence, sliding
from tests.models.tiny import FAMILIES, write_hf_model


def peak_of_a_step(model: Decoder, num_tokens: int, num_rows: int) -> int:
    """Bytes of tensors alive at once, at most, while one prompt is computed; oneDNN's and numpy's own not counted."""
    paged = PagedSequences(model.kv_layers, 16, 1, num_tokens, dtype="float32", seed=0)
    batch = paged.step({0: num_tokens})
    token_ids, rows = torch.ones(num_tokens, dtype=torch.int64), torch.arange(num_rows)
    with torch.inference_mode():
        model.forward(token_ids, batch, paged.kv, NativeAttention(), rows)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model.forward(token_ids, batch, paged.kv, NativeAttention(), rows)
    alive = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def test_a_budget_bounds_a_sequences_blocks_whatever_its_length() -> None:
    spec = KVCacheSpec.build([LayerKVSpec(2, 64, 64)] * 2, 16, "bfloat16")
    budget = KVBudget(mode="sinks", tokens=64)
    assert SequenceCost.of(spec, 64, 1, budget) == SequenceCost.of(spec, 64, 1)
    # 64 tokens, of which the window's may begin and end within a block.
    assert {SequenceCost.of(spec, length, 1, budget).blocks for length in (200, 10**6)} == {64 // 16 + 1}
    bounded = KVBudget(mode="bounded", tokens=64)
    cost = SequenceCost.of(spec, 10**6, 512, bounded)
    assert (cost.blocks, cost.prefill_blocks) == (64 // 16, 10**6 // 16)  # the prompt, until it is computed
    assert spec.peak_blocks(10**6, 512, bounded, 100) == -(-100 // 16)


def test_sparse_reads_keep_all_tokens_and_the_bounds_of_keys_after_the_second_layer() -> None:
    layers, budget = [LayerKVSpec(2, 64, 64)] * 4, KVBudget(mode="sparse_read", tokens=64)
    spec = KVCacheSpec.build(layers, 16, "bfloat16", budget)
    assert spec.block_bytes == 4 * 8192 + 2 * 512  # a sixteenth of two layers
    cost = SequenceCost.of(spec, 200, 1, budget)
    assert (cost.blocks, KVArena(spec, 3).nbytes) == (13, 3 * spec.block_bytes)
    assert SequenceCost.of(spec, 160, 1, budget).waste == 0


@given(
    layers=st.lists(st.sampled_from([FULL, sliding(7), sliding(12)]), min_size=1, max_size=7),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_tokens=st.integers(1, 60),
    concurrency=st.integers(1, 5),
)
def test_the_cache_manager_takes_as_many_sequences_as_the_calculator_says(
    layers: list[LayerKVSpec], block_size: int, num_tokens: int, concurrency: int
) -> None:
    spec = KVCacheSpec.build(layers, block_size, "float32")
    cost = SequenceCost.of(spec, num_tokens, num_tokens)
    blocks = cost.blocks_for(concurrency)
    assert cost.sequences_in(blocks) == concurrency
    assert cost.sequences_in(blocks - 1) == concurrency - 1
    manager = make_manager(blocks + 1, block_size, tuple(layers), prefix_caching=False)
    for _ in range(concurrency):
        admit_and_compute(manager, make_sequence([1] * num_tokens))
    manager.audit()
    if all(layer.sliding_window is None for layer in layers):
        assert manager.pool.num_available == 0


@given(
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    budget=st.integers(3_000, 60_000),
    layers=st.lists(st.sampled_from([FULL, sliding(8)]), min_size=1, max_size=5),
)
def test_the_pool_takes_the_very_bytes_it_says_and_no_more_than_given(
    dtype: str, budget: int, layers: list[LayerKVSpec]
) -> None:
    spec = KVCacheSpec.build(layers, 4, dtype)
    if smallest_pool(spec).num_bytes > budget:
        with pytest.raises(ConfigError, match=f"at least {1 + len(spec.groups)} are needed"):
            pool_for_memory(spec, budget, max_num_seqs=64, max_model_len=512, max_step=64)
        return
    pool = pool_for_memory(spec, budget, max_num_seqs=64, max_model_len=512, max_step=64)
    assert KVArena(spec, pool.num_blocks).nbytes == pool.num_bytes <= budget < pool.num_bytes + spec.block_bytes


def test_a_pool_is_no_larger_than_its_sequences_can_use() -> None:
    spec = KVCacheSpec.build([FULL], 4, "float32")
    assert pool_for_memory(spec, 2**30, max_num_seqs=3, max_model_len=10, max_step=64).usable_blocks == 9


def test_a_contiguous_block_is_max_model_len_rounded_up_to_a_tile() -> None:
    assert [block_tokens(32, 100), block_tokens("max", 100), block_tokens("max", 4096)] == [32, 112, 4096]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_decoders_weights_take_the_predicted_bytes(family: str, tied: bool, dtype: str, tmp_path: Path) -> None:
    write_hf_model(tmp_path, family, tie_word_embeddings=tied)
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    shape = shape_of_source(source, config)
    torch_dtype = getattr(torch, dtype)
    copied = PackedLinear.supports(torch.empty(0, dtype=torch_dtype))
    model = Decoder(config, open_weights(source, config), dtype=torch_dtype)
    assert weight_bytes(shape, dtype, tied_head_copied=copied) == model.weight_bytes
    plain = Decoder(config, open_weights(source, config), dtype=torch_dtype, linear=PlainLinear)
    assert weight_bytes(shape, dtype, tied_head_copied=False) == plain.weight_bytes
    assert shape.kv_layers == model.kv_layers


@pytest.mark.slow
def test_the_packaged_models_weights_take_the_predicted_bytes() -> None:
    source = resolve_model("smollm2")
    config = load_model_config(source)
    model = Decoder(config, open_weights(source, config), dtype=torch.bfloat16)
    copied = PackedLinear.supports(torch.empty(0, dtype=torch.bfloat16))
    assert weight_bytes(find_shape("smollm2"), "bfloat16", tied_head_copied=copied) == model.weight_bytes
    assert find_shape("smollm2").kv_layers == find_shape("smollm2-135m").kv_layers


def test_weights_through_transformers_take_the_predicted_bytes_within_a_per_cent(tmp_path: Path) -> None:
    write_hf_model(
        tmp_path, "Gemma2", head_dim=16, sliding_window=32, vocab_size=2000, hidden_size=128, tie_word_embeddings=True
    )
    model = TransformersModel.load(tmp_path, dtype=torch.bfloat16)
    predicted = weight_bytes(find_shape(str(tmp_path)), "bfloat16", tied_head_copied=False)
    assert predicted == pytest.approx(model.weight_bytes, rel=0.01)


@pytest.mark.skipif(not kernels.available(), reason="the reference attention's scores are not counted")
@pytest.mark.parametrize("max_rows", [1, 64])
def test_a_steps_tensors_take_what_is_estimated(max_rows: int, tmp_path: Path) -> None:
    """By torch's own count of allocations, in a model whose layers are wider than its logits."""
    write_hf_model(
        tmp_path, "Llama", hidden_size=256, intermediate_size=1024, num_attention_heads=8, max_position_embeddings=512
    )
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    model = Decoder(config, open_weights(source, config), dtype=torch.float32)
    measured = peak_of_a_step(model, num_tokens=256, num_rows=max_rows)
    estimate = activation_bytes(find_shape(str(tmp_path)), "float32", max_step=256, max_rows=max_rows)
    assert measured == pytest.approx(estimate, rel=0.02)


def test_a_gpus_activations_include_the_partial_results_of_split_decodes() -> None:
    shape = find_shape("llama-3.1-8b")
    sizes = {"max_step": 2048, "max_rows": 256}
    whole = activation_bytes(shape, "bfloat16", **sizes, gpu_context=256)
    assert activation_bytes(shape, "bfloat16", **sizes) == whole + 2048 * 4096 * 2  # a residual in float32
    # Llama 3.1 8B, 32 query heads of 128: at most 64 splits of each sequence, in recorded steps and in others.
    assert activation_bytes(shape, "bfloat16", **sizes, gpu_context=131_072) == whole + 2 * 256 * 64 * 32 * 130 * 4


def test_a_budget_leaves_what_weights_and_activations_leave() -> None:
    assert MemoryBudget(1000, 400, 100).for_cache == 500
    assert MemoryBudget(1000, 400, 100, cache_share=0.4).for_cache == 240
    assert MemoryBudget(1000, 400, 500, cache_share=0.4).for_cache == 100
    assert MemoryBudget(1000, 990, 100).for_cache == 0
