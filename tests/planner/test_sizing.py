from __future__ import annotations

import logging
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.cli import build_parser
from octavo.commands.options import given_options
from octavo.config import SERVER_DEFAULTS, EngineConfig
from octavo.engine.builder import build_engine
from octavo.errors import ConfigError
from octavo.kvcache.spec import eviction_bytes
from octavo.option import options_of
from octavo.planner.calculator import REMOTE_BLOCKS, REMOTE_THREADS
from octavo.planner.machine import CPU_MEMORY_SHARE, MEMORY_LIMIT_VARIABLE, limited_memory
from octavo.planner.sizing import Sizing, serve_command
from octavo.planner.sources import find_shape
from octavo.sampling_params import SamplingParams
from octavo.tiers.slabs import INDEX_BYTES, most_slots
from octavo.units import parse_bytes
from tests.conftest import runner_of
from tests.models.tiny import write_hf_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("a model")  # a name that the shell must not cut in two
    write_hf_model(folder, "Llama", tokenizer=True, vocab_size=4000)
    return str(folder)


def sizing(available: int, model: str = "llama-3.1-8b", cache_share: float = 1.0, **options: Any) -> Sizing:
    config = EngineConfig(model=model, **options)
    return Sizing(
        config=config,
        shape=find_shape(model),
        dtype=config.dtype if config.dtype != "auto" else "bfloat16",
        available=available,
        cache_share=cache_share,
    )


def suggested_config(error: ConfigError) -> EngineConfig:
    """What the command in an error's message says, read by the command line's own parser."""
    command = re.search(r"This would start: (octavo serve .*)", str(error))
    assert command, str(error)
    program, *argv = shlex.split(command[1])
    assert program == "octavo"
    return EngineConfig.from_options(given_options(build_parser().parse_args(argv), EngineConfig))


def generate_a_token(config: EngineConfig) -> None:
    engine = build_engine(config)
    request = engine.inputs.make([1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0))
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.sequences[0].num_output_tokens == 1
    engine.close()


@pytest.mark.parametrize("gibibytes", [15.0, 15.1, 15.2, 15.5])
@pytest.mark.parametrize("options", [{}, {"block_size": "max"}, {"kv_cache_memory": "20GiB"}, {"num_blocks": 10_000}])
def test_what_is_suggested_fits_and_holds_a_sequence_of_its_full_length(
    gibibytes: float, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        sizing(int(gibibytes * 2**30), **options).pool()
    config = suggested_config(caught.value)
    smaller = sizing(int(gibibytes * 2**30), **{n: getattr(config, n) for n in options_of(EngineConfig)})
    pool = smaller.pool()
    assert pool.usable_blocks >= smaller.spec.peak_blocks(smaller.max_model_len, config.max_num_batched_tokens)
    assert smaller.budget.weights + smaller.budget.activations + pool.num_bytes <= int(gibibytes * 2**30)


def test_weights_that_fit_no_way_get_no_command() -> None:
    with pytest.raises(ConfigError, match=r"weights 14\.96 GiB.*No smaller length or batch.*octavo plan llama-3.1-8b"):
        sizing(10 * 2**30).pool()


def test_an_engine_that_is_refused_names_a_command_that_starts(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "4MiB")
    with pytest.raises(ConfigError, match=r"4\.00 MiB are available") as caught:
        build_engine(EngineConfig(model=tiny_model, device="cpu"))
    config = suggested_config(caught.value)
    assert config.model == tiny_model
    assert config != EngineConfig(model=tiny_model)
    generate_a_token(config)


def test_a_model_is_refused_before_its_weights_are_read(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "octavo.engine.model_loading.open_weights", lambda *args: pytest.fail("the weights were opened")
    )
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "1MiB")
    with pytest.raises(ConfigError, match=r"1\.00 MiB are available"):
        build_engine(EngineConfig(model=tiny_model, device="cpu"))


def test_what_is_planned_is_what_is_allocated(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "64MiB")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 512}
    engine = build_engine(EngineConfig(model=tiny_model, **options))
    predicted = sizing(64 * 2**20, tiny_model, CPU_MEMORY_SHARE, **options)
    assert runner_of(engine).arena.nbytes == predicted.pool().num_bytes
    assert runner_of(engine).model.weight_bytes == predicted.budget.weights
    swap = predicted.num_host_blocks(predicted.pool()) * predicted.spec.block_bytes
    assert runner_of(engine).host.nbytes == swap
    pool = predicted.pool()
    left = predicted.budget.left - pool.num_bytes - predicted.bookkeeping_bytes(pool) - swap
    assert 0 <= left < predicted.spec.block_bytes, "all that is left"
    engine.close()


@pytest.mark.parametrize("swap_space", ["3MiB", "10MiB", 123_456])
def test_the_swap_space_that_is_planned_is_what_is_allocated_within_a_per_cent(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, swap_space: int | str
) -> None:
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "64MiB")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 8}
    swap = {"swap_space": swap_space, "preemption_mode": "swap"}
    engine = build_engine(EngineConfig.from_options({"model": tiny_model, **swap, **options}))
    predicted = sizing(64 * 2**20, tiny_model, CPU_MEMORY_SHARE, swap_space=swap_space, **options)
    assert runner_of(engine).host.nbytes == predicted.budget.swap
    asked = parse_bytes(str(swap_space))
    assert asked - predicted.spec.block_bytes < predicted.budget.swap <= asked
    assert engine.scheduler.kv.hierarchy.host.num_slots == runner_of(engine).host.num_blocks
    rows = torch.ones(1, predicted.spec.block_bytes, dtype=torch.uint8)
    runner_of(engine).host.write([runner_of(engine).host.num_blocks - 1], rows)
    engine.close()


def test_a_swap_space_over_the_memory_is_refused_itemised_with_one_that_would_start(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "64MiB")
    options: dict[str, Any] = {
        "device": "cpu",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "preemption_mode": "swap",
    }
    with pytest.raises(ConfigError, match=r"64\.00 MiB are available: .*, swap space 100\.00 MiB\.") as caught:
        build_engine(EngineConfig.from_options({"model": tiny_model, "swap_space": "100MiB", **options}))
    message = str(caught.value)
    needed = parse_bytes(re.search(r"needs ([\d.]+ [KMG]iB)", message)[1])  # type: ignore[index]
    items = re.findall(r"(?:weights|activations|KV cache at least|swap space) ([\d.]+ [KMG]iB)", message)
    assert needed == pytest.approx(sum(map(parse_bytes, items)), rel=0.01)
    config = suggested_config(caught.value)
    assert config == EngineConfig(model=tiny_model, swap_space=config.swap_space, **options)
    assert config.swap_space == 32 * 2**20
    generate_a_token(config)


def test_a_cache_and_a_swap_space_that_do_not_fit_together_keep_the_cache_as_asked_for() -> None:
    weights = 16_060_522_496
    both: dict[str, Any] = {"kv_cache_memory": "4GiB", "swap_space": "4GiB"}
    with pytest.raises(ConfigError, match=r"KV cache 4\.00 GiB, swap space 4\.00 GiB") as caught:
        sizing(weights + 7 * 2**30, **both).pool()
    config = suggested_config(caught.value)
    assert (config.kv_cache_memory, config.swap_space) == (4 * 2**30, 2**31)
    sizing(weights + 7 * 2**30, kv_cache_memory=config.kv_cache_memory, swap_space=config.swap_space).pool()


def test_prefixes_in_host_memory_that_do_not_fit_are_refused_with_a_size_that_does() -> None:
    weights = 16_060_522_496
    with pytest.raises(ConfigError, match=r"prefixes in host memory 64\.00 GiB") as caught:
        sizing(weights + 7 * 2**30, cache_share=CPU_MEMORY_SHARE, kv_host_memory="64GiB").pool()
    config = suggested_config(caught.value)
    assert config.kv_host_memory == 2**31
    assert str(caught.value).endswith("--kv-host-memory=2GiB")
    sizing(weights + 7 * 2**30, cache_share=CPU_MEMORY_SHARE, kv_host_memory=config.kv_host_memory).pool()


def test_the_default_swap_space_is_no_larger_than_its_sequences_can_use(caplog: pytest.LogCaptureFixture) -> None:
    plan = sizing(64 * 2**30, max_num_seqs=2, max_model_len=1000)
    num_host_blocks = plan.num_host_blocks(plan.pool())
    assert num_host_blocks == plan.pool().usable_blocks == 2 * 63  # of 16 tokens each
    plan.warn_if_swap_is_short(num_host_blocks)
    assert not caplog.text
    wanted = replace(plan, config=plan.config.replace(swap_space=2**30))
    assert wanted.num_host_blocks(plan.pool()) == 2**30 // plan.spec.block_bytes


def test_by_default_the_swap_space_takes_what_is_left_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    weights = 16_060_522_496
    plan = sizing(weights + 4 * 2**30, kv_cache_memory="3GiB")
    left = plan.budget.left - plan.pool().num_bytes
    blocks = plan.num_host_blocks(plan.pool())
    assert left - plan.spec.block_bytes < blocks * plan.spec.block_bytes <= left < 2**30
    with caplog.at_level(logging.WARNING, "octavo"):
        plan.warn_if_swap_is_short(blocks)
    assert re.search(r"swap space: \d+\.\d+ MiB instead of 1\.00 GiB", caplog.text)
    roomy = sizing(weights + 40 * 2**30, kv_cache_memory="3GiB")
    assert roomy.num_host_blocks(roomy.pool()) * roomy.spec.block_bytes == 2**30
    recomputing = sizing(weights + 4 * 2**30, preemption_mode="recompute", swap_space="9GiB")
    assert recomputing.num_host_blocks(recomputing.pool()) == 0


def test_beside_a_gpu_the_swap_space_is_held_to_the_hosts_memory() -> None:
    plan = replace(sizing(24 * 2**30, swap_space="8GiB"), host_available=6 * 2**30)
    pool = plan.pool()
    assert pool.num_bytes > 7 * 2**30, "the GPU's memory is the cache's alone"
    with pytest.raises(ConfigError, match=r"8\.00 GiB was asked for, but 6\.00 GiB of host memory are") as caught:
        plan.num_host_blocks(pool)
    config = suggested_config(caught.value)
    assert config.swap_space == 4 * 2**30
    assert replace(plan, config=config).num_host_blocks(pool) * plan.spec.block_bytes == 4 * 2**30
    assert replace(plan, config=EngineConfig(model=config.model)).num_host_blocks(pool) * plan.spec.block_bytes == 2**30


def test_a_pool_too_short_for_max_model_len_starts_with_a_warning(
    tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "octavo"):
        generate_a_token(EngineConfig(model=tiny_model, device="cpu", num_blocks=4, block_size=16))
    assert "fits a sequence of at most 48 tokens, less than max_model_len (256)" in caplog.text
    assert "--max-model-len 48" in caplog.text


def test_a_cache_too_small_for_a_token_is_refused_with_what_it_needs(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="at least 2 are needed: raise kv_cache_memory"):
        build_engine(EngineConfig(model=tiny_model, device="cpu", kv_cache_memory=1000))


def test_max_model_len_over_the_models_own_is_refused(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 300, but .* supports at most 256 tokens"):
        build_engine(EngineConfig(model=tiny_model, device="cpu", max_model_len=300))


def test_a_cpus_cache_takes_its_share_of_what_the_weights_leave_and_more_only_where_it_must() -> None:
    weights = 16_060_522_496
    share = sizing(weights + 10 * 2**30, cache_share=0.4)
    assert share.budget.for_cache == 4 * 2**30
    tight = sizing(weights + 4 * 2**20 + sizing(0).budget.activations, cache_share=0.0)
    assert tight.pool().num_blocks == 2


def test_a_command_leaves_defaults_unsaid_and_quotes_the_rest() -> None:
    config = EngineConfig(model="my model", max_num_seqs=4, enable_prefix_caching=False, kv_cache_dtype="float32")
    assert serve_command(config) == (
        "octavo serve 'my model' --kv-cache-dtype=float32 --no-enable-prefix-caching --max-num-seqs=4"
    )
    assert serve_command(EngineConfig(**SERVER_DEFAULTS, num_threads=2)) == "octavo serve smollm2 --num-threads=2"


def test_the_memory_limit_is_a_ceiling_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "1KiB")
    assert [limited_memory(500), limited_memory(5000)] == [500, 1024]
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "much")
    with pytest.raises(ConfigError, match="cannot read 'much'"):
        limited_memory(500)


def test_a_default_swap_space_leaves_room_for_what_stores_take_in_memory() -> None:
    without = sizing(20 << 30)
    disk = sizing(20 << 30, kv_disk="a folder", kv_disk_size="20GiB")
    both = sizing(20 << 30, kv_disk="a folder", kv_disk_size="20GiB", kv_remote="redis://here")
    block = disk.spec.block_bytes
    pool = disk.pool()
    assert disk.store_bytes == most_slots(20 << 30, block) * (INDEX_BYTES + eviction_bytes("adaptive"))
    assert disk.bookkeeping_bytes(pool) - without.bookkeeping_bytes(pool) == disk.store_bytes
    assert both.store_bytes - disk.store_bytes == REMOTE_THREADS * REMOTE_BLOCKS * block
