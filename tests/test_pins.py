"""`LLM.pin_prefix`, `pins` and `unpin`."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import SamplingParams
from octavo.errors import ConfigError, RequestError
from octavo.llm import LLM
from tests.conftest import MakeLLM

PREFIX = {"prompt_token_ids": [(5 * i) % 300 for i in range(100)]}
ONE = SamplingParams(max_tokens=1, temperature=0)


def flood(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [(i * 41 + j * j) % 300 for j in range(200)]} for i in range(8)]
    llm.generate(prompts, ONE, use_tqdm=False)


def cached_tokens(llm: LLM) -> int:
    ((output),) = llm.generate({"prompt_token_ids": [*PREFIX["prompt_token_ids"], 1]}, ONE, use_tqdm=False)
    return output.num_cached_tokens


def test_a_pinned_prefix_stays_until_it_is_let_go(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, num_blocks=60, kv_cache_memory=None)
    receipt = llm.pin_prefix(PREFIX, ttl_seconds=60)
    assert (receipt.num_requested_tokens, receipt.num_pinned_tokens) == (100, 96)
    flood(llm)
    assert cached_tokens(llm) == 96
    (pin,) = llm.pins()
    assert (pin.pin_id, pin.num_tokens, pin.num_blocks) == (receipt.pin_id, 96, 6)
    assert 0 < pin.expires_in <= 60
    report = llm.kv_report()
    assert report["bytes"]["pinned"] == pin.num_bytes
    assert llm.unpin(pin.pin_id)
    assert not llm.unpin(pin.pin_id)
    assert llm.pins() == []
    flood(llm)
    assert cached_tokens(llm) == 0


def test_the_budget_limits_what_is_pinned(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, num_blocks=41, kv_cache_memory=None, pin_budget=0.1)
    assert llm.pin_prefix(PREFIX, 60).num_pinned_tokens == 4 * 16
    nothing = make_llm(tiny_llama, num_blocks=41, kv_cache_memory=None, pin_budget=0.0).pin_prefix(PREFIX, 60)
    assert (nothing.pin_id, nothing.num_pinned_tokens) == (None, 0)


def test_the_answer_is_the_same_from_a_pinned_prefix(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    prompt = {"prompt_token_ids": [*PREFIX["prompt_token_ids"], 9, 8, 7]}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (cold,) = llm.generate(prompt, params, use_tqdm=False)
    llm.pin_prefix(PREFIX, 60)
    (pinned,) = llm.generate(prompt, params, use_tqdm=False)
    assert pinned.outputs[0].token_ids == cold.outputs[0].token_ids
    assert pinned.num_cached_tokens >= 96


def test_a_time_that_is_not_positive_is_refused(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    for ttl in (0, -1, float("nan"), True):
        with pytest.raises(RequestError, match="ttl_seconds must be above 0"):
            llm.pin_prefix(PREFIX, ttl)
    with pytest.raises(ConfigError, match=r"pin_budget must be between 0 and 1, got 1.5"):
        make_llm(tiny_llama, pin_budget=1.5)


def test_a_single_tenant_may_pin_all_of_the_budget_unless_a_share_is_given(make_llm: MakeLLM, tiny_llama: Path) -> None:
    options = {"num_blocks": 41, "kv_cache_memory": None, "pin_budget": 0.1}
    assert make_llm(tiny_llama, **options).pin_prefix(PREFIX, 60).num_pinned_tokens == 4 * 16
    assert make_llm(tiny_llama, **options, tenant_share=0.5).pin_prefix(PREFIX, 60).num_pinned_tokens == 2 * 16
    with pytest.raises(ConfigError, match=r"tenant_share must be above 0 and at most 1, got -0.5"):
        make_llm(tiny_llama, tenant_share=-0.5)
