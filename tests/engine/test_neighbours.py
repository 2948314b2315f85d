"""Engines that fetch blocks from each other give the tokens that they give cold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.llm import LLM
from octavo.request import Request, RequestContext
from octavo.sampling_params import SamplingParams
from octavo.tiers.base import Reason
from tests.conftest import MakeLLM
from tests.engine.test_tiers import PROMPT
from tests.ports import free_port

pytest.importorskip("redis")

SECRET = "only our servers know"


def options(address: str, **more: Any) -> dict[str, Any]:
    common = {"kv_remote_secret": SECRET, "kv_demotion": "all", "block_size": 16, "kv_host_memory": "64MiB"}
    return {"kv_neighbours": address, **common, **more}


def ask(llm: LLM, hint: str | None = None, tenant: str = "ada", prompt: list[int] = PROMPT) -> Request:
    context, core = RequestContext(tenant=tenant, kv_hint=hint), llm.core
    request = core.inputs.make(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), context)
    core.add(request)
    while core.has_work:
        core.step()
    return request


def tokens(request: Request) -> list[int]:
    return list(request.sequences[0].output_token_ids)


def test_a_prefix_that_a_neighbour_has_is_fetched_and_gives_the_same_tokens(
    make_llm: MakeLLM, tiny_llama: Path
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    first, second, third = (
        make_llm(tiny_llama, **options(address, dtype="bfloat16", deterministic=True)) for address in addresses
    )
    cold = ask(first)
    assert cold.num_cached_tokens == 0
    for core in (first.core, second.core):
        assert core.tiers is not None
    unhinted = ask(second, prompt=PROMPT[::-1])
    assert unhinted.num_cached_tokens == 0, "without a hint nobody is asked"
    warm = ask(second, addresses[0])
    assert warm.cached_by_tier == {"device": 0, "neighbour": 96}
    assert tokens(warm) == tokens(cold)
    passed_on = ask(third, addresses[1])
    assert passed_on.cached_by_tier == {"device": 0, "neighbour": 96}, "what was fetched is handed on"
    assert tokens(passed_on) == tokens(cold)
    for llm in (first, second, third):
        assert list(llm.core.scheduler.kv.hierarchy.check()) == []
        llm.core.close()


def test_another_tenant_model_or_secret_finds_nothing_and_a_dead_neighbour_changes_no_token(
    make_llm: MakeLLM, tiny_llama: Path
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    first, second = (make_llm(tiny_llama, **options(address)) for address in addresses[:2])
    cold = ask(first)
    for tenant in ("eve", ""):
        other = ask(second, addresses[0], tenant)
        assert (other.num_cached_tokens, tokens(other)) == (0, tokens(cold))
    assert second.core.tiers is not None
    (store,) = second.core.tiers.stores
    assert store.counters.read.misses == {Reason.ABSENT: 12}
    changes: list[dict[str, Any]] = [{"block_size": 8}, {"kv_remote_secret": SECRET * 2}]
    for address, change in zip(addresses[2:], changes, strict=True):
        stranger = make_llm(tiny_llama, **options(address, **change))
        asked = ask(stranger, addresses[0])
        assert (asked.num_cached_tokens, tokens(asked)) == (0, tokens(cold))
        stranger.core.close()
    first.core.close()
    left = ask(second, addresses[0])
    assert (left.num_cached_tokens, tokens(left)) == (0, tokens(cold))
    second.core.close()
