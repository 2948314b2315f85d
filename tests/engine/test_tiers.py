"""Prefixes that come back from host memory give the same tokens as those computed cold."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.kvcache.host_cache import HostCache
from tests.conftest import MakeLLM, runner_of
from tests.engine.test_same_tokens import alone, assert_same, workload
from tests.engine.test_swapping import tight


def host_of(llm: Any) -> HostCache:
    host = llm.core.scheduler.kv.host_cache
    assert host is not None
    assert host.num_held == 0
    return host


NUM_REQUESTS = 10


def serve(llm: Any) -> Any:
    prompts, params = workload()
    return llm.generate(prompts[:NUM_REQUESTS], params[:NUM_REQUESTS], use_tqdm=False)


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
    expected = alone(make_llm, folder)[:NUM_REQUESTS]
    for _ in range(3):
        assert_same(serve(llm), expected)
    counters = host_of(llm).counters
    assert counters.stored > 0
    assert counters.loaded > 0
    llm.core.scheduler.kv.audit()


def test_a_host_memory_of_a_few_blocks_evicts_and_changes_no_token(make_llm: MakeLLM, tiny_llama: Any) -> None:
    llm = make_llm(tiny_llama, kv_host_memory=20_000, kv_demotion="on_evict", **tight(preemption_mode="swap"))
    for _ in range(2):
        assert_same(serve(llm), alone(make_llm, tiny_llama)[:NUM_REQUESTS])
    host = host_of(llm)
    assert 2 <= host.num_slots < 20
    assert host.counters.evicted > 0


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
        assert_same(serve(llm), alone(make_llm, tiny_llama)[:NUM_REQUESTS])
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
    from octavo.request import RequestContext
    from octavo.sampling_params import SamplingParams

    llm = make_llm(tiny_llama, kv_host_memory="2MiB", kv_demotion="all", block_size=4)
    core, cached = llm.core, []
    for tenant in ("a", "b", "b"):
        request = core.make_request(list(range(3, 43)), SamplingParams(max_tokens=1), RequestContext(tenant=tenant))
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
