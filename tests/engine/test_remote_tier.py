"""Engines that share prefixes through Redis. That tokens are those given cold: test_restored_tokens.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.request import RequestContext
from octavo.sampling_params import SamplingParams
from octavo.tiers.base import Reason
from tests.conftest import MakeLLM
from tests.engine.test_tiers import PROMPT, ask, host_of
from tests.redis_server import RedisServer

pytestmark = pytest.mark.integration

SECRET = "only our servers know"


def options(server: RedisServer, **more: Any) -> dict[str, Any]:
    return {"kv_remote": server.url, "kv_remote_secret": SECRET, "kv_demotion": "all", "block_size": 16, **more}


def test_what_redis_lacks_takes_no_host_memory_and_another_tenant_finds_nothing(
    make_llm: MakeLLM, tiny_llama: Path, redis_server: RedisServer
) -> None:
    first = make_llm(tiny_llama, **options(redis_server))
    ask(first, PROMPT)
    first.core.close()
    second = make_llm(tiny_llama, **options(redis_server, kv_demotion="on_second_use"))
    core, (store,) = second.core, second.core.tiers.stores
    for tenant, salt in (("eve", ""), ("eve", "forged")):
        context = RequestContext(tenant=tenant, cache_salt=salt)
        request = core.inputs.make(PROMPT, SamplingParams(max_tokens=1), context)
        core.add(request)
        while core.has_work:
            core.step()
        assert request.num_cached_tokens == 0
    assert store.counters.read.misses == {Reason.ABSENT: 12}
    core.close()
    assert host_of(second).pool.num_free == host_of(second).num_slots


def test_the_disk_is_asked_before_redis(
    make_llm: MakeLLM, tiny_llama: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    both = options(redis_server, kv_disk=str(tmp_path), kv_disk_size="4MiB")
    first = make_llm(tiny_llama, **both)
    cold = ask(first, PROMPT[:64])
    first.core.close()
    elsewhere = make_llm(tiny_llama, **options(redis_server))
    ask(elsewhere, PROMPT)
    elsewhere.core.close()
    second = make_llm(tiny_llama, **both)
    warm = ask(second, PROMPT)
    assert cold.num_cached_tokens == 0
    assert warm.cached_by_tier == {"device": 0, "disk": 64, "remote": 32}
    report = second.core.kv_report()["tiers"]["remote"]
    assert (report["loaded"], report["open"]) == (2, True)
    assert [store.counters.read.blocks for store in second.core.stats.stores] == [4, 2]
    second.core.close()
    assert host_of(second).counters.filled == 6


def test_a_redis_that_stands_still_or_dies_changes_no_token(
    make_llm: MakeLLM, tiny_llama: Path, redis_server: RedisServer
) -> None:
    quick = {"kv_remote": redis_server.url.replace("socket_timeout=60", "socket_timeout=0.1")}
    first = make_llm(tiny_llama, **options(redis_server))
    prompts = [PROMPT, PROMPT[::-1]]
    cold = [ask(first, prompt) for prompt in prompts]
    first.core.close()
    second = make_llm(tiny_llama, **options(redis_server, **quick, kv_demotion="on_second_use"))
    redis_server.stand_still()
    try:
        slow = ask(second, prompts[0])
    finally:
        redis_server.go_on()
    redis_server.kill()
    try:
        dead = ask(second, prompts[1])
    finally:
        redis_server.start()
    for output, expected in zip((slow, dead), cold, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.num_cached_tokens == 0
    second.core.close()
    assert second.core.tiers.stores[0].counters.read.misses == {Reason.IO_ERROR: 12}
