"""Prefixes that come back from host memory give the same tokens as those computed cold."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.tiers import tier_identity
from octavo.errors import ConfigError
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.spec import eviction_bytes
from octavo.request import Request, RequestContext
from octavo.sampling_params import SamplingParams
from octavo.tiers.base import Reason
from octavo.units import format_bytes
from tests.conftest import MakeLLM, runner_of
from tests.engine.test_same_tokens import alone, assert_same, workload
from tests.engine.test_swapping import block_bytes, tight
from tests.kvcache.host_tier import num_held


def host_of(llm: Any) -> HostMemory:
    """Return the host memory of an engine that has no work; one with stores must have been closed."""
    host: HostMemory = llm.core.scheduler.kv.hierarchy.host
    assert num_held(host) == 0
    return host


NUM_REQUESTS = 10


def serve(llm: Any) -> Any:
    prompts, params = workload()
    return llm.generate(prompts[:NUM_REQUESTS], params[:NUM_REQUESTS], use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cache", "demotion"),
    [
        ("tiny_llama", "hashed", "on_second_use"),
        ("tiny_llama", "radix", "on_evict"),
        ("tiny_mistral", "hashed", "all"),
        ("tiny_mistral", "radix", "on_second_use"),
    ],
)
def test_blocks_that_come_back_from_host_memory_change_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, model: str, cache: str, demotion: str
) -> None:
    folder = request.getfixturevalue(model)
    llm = make_llm(
        folder, kv_host_memory="2MiB", kv_demotion=demotion, **tight(prefix_cache=cache, preemption_mode="recompute")
    )
    expected = alone(make_llm, folder, NUM_REQUESTS)
    for _ in range(3):
        assert_same(serve(llm), expected)
    counters = host_of(llm).counters
    assert counters.stored > 0
    assert counters.loaded > 0
    llm.core.scheduler.kv.audit()


@pytest.mark.slow
def test_a_host_memory_of_a_few_blocks_evicts_and_changes_no_token(make_llm: MakeLLM, tiny_llama: Any) -> None:
    llm = make_llm(
        tiny_llama, kv_host_memory=20_000, swap_space=20_000, kv_demotion="on_evict", **tight(preemption_mode="swap")
    )
    for _ in range(2):
        assert_same(serve(llm), alone(make_llm, tiny_llama, NUM_REQUESTS))
    host = host_of(llm)
    assert 2 <= host.num_prefix_slots < 20
    assert host.counters.evicted > 0


@pytest.mark.slow
def test_a_step_that_fails_leaves_nothing_unproven_in_host_memory(make_llm: MakeLLM, tiny_llama: Any) -> None:
    llm = make_llm(tiny_llama, kv_host_memory="2MiB", kv_demotion="all", **tight(preemption_mode="recompute"))
    runner = runner_of(llm.core)
    execute, count = runner._compute, iter(range(10**6))

    def fails_at_times(plan: Any) -> Any:
        if next(count) % 7 == 3:
            raise RuntimeError("a step fails")
        return execute(plan)

    runner._compute = fails_at_times
    for _ in range(2):
        assert_same(serve(llm), alone(make_llm, tiny_llama, NUM_REQUESTS))
    assert host_of(llm).counters.lost > 0


def test_cached_tokens_are_told_by_tier(make_llm: MakeLLM, tiny_llama: Any) -> None:
    llm = make_llm(tiny_llama, kv_host_memory="2MiB", kv_demotion="on_evict", block_size=4, num_blocks=32)
    first, other = list(range(3, 43)), list(range(100, 205))
    for prompt in (first, other, first):
        (output,) = llm.generate({"prompt_token_ids": prompt}, use_tqdm=False)
    assert output.num_cached_tokens == 36
    assert sum(output.cached_by_tier.values()) == 36
    assert output.cached_by_tier["host"] > 0


def test_a_reset_of_the_prefix_cache_forgets_host_memory_too(make_llm: MakeLLM, tiny_llama: Any) -> None:
    llm = make_llm(tiny_llama, kv_host_memory="2MiB", kv_demotion="all", block_size=4)
    for _ in range(2):
        (output,) = llm.generate({"prompt_token_ids": list(range(3, 43))}, use_tqdm=False)
        assert output.num_cached_tokens == 0
        llm.core.scheduler.kv.reset_prefix_cache()


def test_another_tenant_finds_nothing_in_host_memory(make_llm: MakeLLM, tiny_llama: Any) -> None:
    llm = make_llm(tiny_llama, kv_host_memory="2MiB", kv_demotion="all", block_size=4)
    core, cached = llm.core, []
    for tenant in ("a", "b", "b"):
        request = core.inputs.make(list(range(3, 43)), SamplingParams(max_tokens=1), RequestContext(tenant=tenant))
        core.add(request)
        while core.has_work:
            core.step()
        cached.append(request.num_cached_tokens)
        core.scheduler.kv.pool.evict_all_cached()
    assert cached == [0, 0, 36]


def test_host_memory_without_a_prefix_cache_or_smaller_than_a_block_is_refused(
    make_llm: MakeLLM, tiny_llama: Any
) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        make_llm(tiny_llama, kv_host_memory="1MiB", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_host_memory is 10 B, but a block and its bookkeeping take"):
        make_llm(tiny_llama, kv_host_memory=10)


def disk_options(folder: Path, **options: Any) -> dict[str, Any]:
    return {"kv_disk": str(folder), "kv_disk_size": "4MiB", "kv_demotion": "all", "block_size": 16, **options}


def ask(llm: Any, prompt: list[int]) -> Any:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output


PROMPT = [3 + i * 7 % 300 for i in range(100)]


def test_a_restart_finds_its_prefixes_on_disk_and_gives_the_same_tokens(
    make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path
) -> None:
    options = disk_options(tmp_path, dtype="bfloat16", deterministic=True)
    first = make_llm(tiny_llama, **options)
    cold = ask(first, PROMPT)
    assert cold.num_cached_tokens == 0
    first.core.close()
    second = make_llm(tiny_llama, **options)
    warm = ask(second, PROMPT)
    assert warm.cached_by_tier == {"device": 0, "disk": 96}
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    tiers = second.core.kv_report()["tiers"]
    assert tiers["disk"]["read_bytes"] == 6 * block_bytes(second.core)
    assert tiers["disk"]["read_by_tenant"] == tiers["disk"]["tenants"] == {"": 6 * block_bytes(second.core)}
    assert tiers["disk"]["open_misses"] == {}
    assert sum(tiers["host"]["tenants"].values()) + tiers["host"]["free_bytes"] == tiers["host"]["space_bytes"]
    second.core.close()
    assert host_of(second).counters.filled == 6


def test_a_burst_after_a_restart_finds_all_its_prefixes_however_few_host_memory_holds_at_once(
    make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path
) -> None:
    prompts = [{"prompt_token_ids": [3 + i * n % 300 for i in range(100)]} for n in range(1, 13)]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    first = make_llm(tiny_llama, **disk_options(tmp_path))
    cold = first.generate(prompts, params, use_tqdm=False)
    slot_bytes = block_bytes(first.core) + HostMemory.bookkeeping_bytes(16) + eviction_bytes("adaptive")
    first.core.close()
    few = disk_options(tmp_path, kv_host_memory=16 * slot_bytes, swap_space=0, max_num_seqs=2)
    second = make_llm(tiny_llama, **few)
    warm = second.generate(prompts, params, use_tqdm=False)
    assert [output.cached_by_tier["disk"] for output in warm] == [96] * len(prompts)
    assert [output.outputs[0].token_ids for output in warm] == [output.outputs[0].token_ids for output in cold]
    second.core.close()
    assert host_of(second).num_slots == 16, "room for one of them in the half that may be held"


@pytest.mark.parametrize("num_slots", [64, 4])
def test_closing_writes_what_was_reused_so_that_a_restart_begins_warm(
    make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path, num_slots: int
) -> None:
    """By default, also when host memory holds fewer blocks than were reused."""
    sizing = make_llm(tiny_llama, block_size=16)
    slot_bytes = block_bytes(sizing.core) + HostMemory.bookkeeping_bytes(16) + eviction_bytes("adaptive")
    few: dict[str, Any] = {"kv_demotion": "on_second_use", "kv_host_memory": num_slots * slot_bytes, "swap_space": 0}
    first = make_llm(tiny_llama, **disk_options(tmp_path, **few))
    once = [5, *PROMPT]
    cold = [ask(first, prompt) for prompt in (PROMPT, PROMPT, once)][1:]
    assert host_of(first).counters.stored == 0
    first.core.close()
    assert host_of(first).counters.stored == 6
    second = make_llm(tiny_llama, **disk_options(tmp_path))
    warm = [ask(second, prompt) for prompt in (PROMPT, once)]
    assert [output.cached_by_tier.get("disk", 0) for output in warm] == [96, 0]
    assert [output.outputs[0].token_ids for output in warm] == [output.outputs[0].token_ids for output in cold]
    second.core.close()


def test_closing_without_time_writes_nothing_more(make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path) -> None:
    llm = make_llm(tiny_llama, **disk_options(tmp_path, kv_demotion="on_evict"))
    ask(llm, PROMPT)
    llm.core.close(0.0)
    assert host_of(llm).counters.stored == 0


def test_a_block_that_is_damaged_on_disk_is_computed_again(make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path) -> None:
    first = make_llm(tiny_llama, **disk_options(tmp_path))
    cold = ask(first, PROMPT)
    first.core.close()
    slab = next(tmp_path.glob("*/slab-00000.kv"))
    content = bytearray(slab.read_bytes())
    written = max(i for i in range(0, len(content), 4096) if any(content[i : i + 4096]))
    content[written + 5] ^= 1
    slab.write_bytes(content)
    second = make_llm(tiny_llama, **disk_options(tmp_path))
    warm = ask(second, PROMPT)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert warm.num_cached_tokens < 96
    assert second.core.tiers.stores[0].counters.read.misses == {Reason.CHECKSUM: 1}
    second.core.close()


def test_a_late_load_is_computed_instead_and_delays_no_other_request(
    make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path
) -> None:
    first = make_llm(tiny_llama, **disk_options(tmp_path))
    cold = ask(first, PROMPT)
    first.core.close()
    second = make_llm(tiny_llama, **disk_options(tmp_path))
    (store,) = second.core.tiers.stores
    read, go = store.medium.read, threading.Event()

    def slowly(*args: Any) -> Any:
        assert go.wait(60.0)
        return read(*args)

    store.medium.read = slowly
    core, finished = second.core, []
    for name, prompt in (("late", PROMPT), ("other", [9, 8, 7])):
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        core.add(core.inputs.make(prompt, params, RequestContext(request_id=name)))
    while core.has_work:
        finished += [output for output in core.step() if output.finished]
        if [output.request_id for output in finished] == ["other"]:
            core.tiers._clock = lambda: float("inf")
    assert [output.request_id for output in finished] == ["other", "late"]
    assert finished[1].outputs[0].token_ids == cold.outputs[0].token_ids
    assert finished[1].num_cached_tokens == 0
    go.set()
    core.close()
    host_of(second)


def test_other_weights_find_nothing_on_disk(make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path) -> None:
    first = make_llm(tiny_llama, **disk_options(tmp_path / "kv"))
    ask(first, PROMPT)
    first.core.close()
    tuned = tmp_path / "tuned"
    shutil.copytree(tiny_llama, tuned)
    weights = next(tuned.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    second = make_llm(tuned, **disk_options(tmp_path / "kv"))
    assert ask(second, PROMPT).num_cached_tokens == 0
    second.core.close()


def ask_as(llm: Any, tenant: str, salt: str) -> Request:
    core = llm.core
    context = RequestContext(tenant=tenant, cache_salt=salt)
    request: Request = core.inputs.make(PROMPT, SamplingParams(max_tokens=1), context)
    core.add(request)
    while core.has_work:
        core.step()
    return request


def test_weights_that_differ_in_any_part_of_a_gguf_file_have_another_identity(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(bytes(3 << 20))
    config = EngineConfig(kv_disk=str(tmp_path))
    identities = {tier_identity(config, parts[0], "layout")}
    for part in parts:
        with part.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"another")
        identities.add(tier_identity(config, parts[0], "layout"))
    assert len(identities) == 3


@pytest.mark.parametrize(("cache", "salt"), [("hashed", ""), ("radix", "pepper")])
def test_after_a_restart_a_tenant_finds_its_prefixes_on_disk_and_no_other_does_whatever_salt_it_forges(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path, cache: str, salt: str
) -> None:
    first = make_llm(tiny_llama, **disk_options(tmp_path, prefix_cache=cache))
    scope = ask_as(first, "alice", salt).cache_scope
    first.core.close()
    second = make_llm(tiny_llama, **disk_options(tmp_path, prefix_cache=cache))
    # Her own salt, her name, and the name of her part of the cache; from another tenant, and from a client of none.
    forged = dict.fromkeys((salt, "alice", "alice" + salt, scope))
    others = [(tenant, forgery) for tenant in ("mallory", "") for forgery in forged]
    found = {other: ask_as(second, *other).num_cached_tokens for other in others}
    assert found == dict.fromkeys(others, 0)
    assert ask_as(second, "alice", salt).num_cached_tokens == 96
    second.core.close()  # a block that is being written to disk is held
    assert host_of(second).counters.filled == 6, "from disk, for her alone"


@pytest.mark.slow
def test_another_dtype_or_codec_finds_nothing_on_disk(make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path) -> None:
    """A coded cache looks alike whatever the model computes in, but holds other keys and values."""
    found = []
    for dtype, codec in [("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "int8"), ("bfloat16", "int4")]:
        llm = make_llm(tiny_llama, dtype=dtype, kv_cache_dtype=codec, **disk_options(tmp_path / "kv"))
        found.append(ask(llm, PROMPT).num_cached_tokens)
        llm.core.close()
    assert found == [0, 0, 96, 0]


def test_stores_need_the_prefix_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        EngineConfig(kv_disk=str(tmp_path), enable_prefix_caching=False)
    assert EngineConfig(kv_disk=str(tmp_path)).kv_host_memory == 256 << 20


@pytest.mark.slow
def test_the_times_of_transfers_and_what_loads_are_weighed_against_are_told(
    make_llm: MakeLLM, tiny_llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.engine.tiers")
    ask(first := make_llm(tiny_llama, **disk_options(tmp_path)), PROMPT)
    first.core.close()
    second = make_llm(tiny_llama, **disk_options(tmp_path))
    ask(second, PROMPT)
    ask(second, [5, *PROMPT])
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.engine.tiers"]
    first_line, second_line = lines
    assert "prefixes are loaded from disk (0 B) if that takes less time" in first_line
    assert f"disk ({format_bytes(6 * block_bytes(second.core))})" in second_line
    stats = second.core.stats
    assert stats.host_loads.count == 1
    assert stats.host_loads.total > 0
    assert first.core.stats.host_stores.total > 0
    assert stats.fetching is not None
    assert stats.fetching.speed is second.core.scheduler.preemption
    assert stats.fetching.speed.seconds_per_token is not None
    assert stats.fetching.speed.seconds_per_block is not None
    second.core.close()
