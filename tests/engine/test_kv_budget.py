"""Sequences with a budget of keys and values: what they hold, what they compute, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.inspection import budget_fields
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams
from tests.conftest import assert_idle
from tests.engine.preempting import thrash
from tests.engine.tiny_engine import VOCAB_SIZE, tiny_core

BUDGET = 64
_RANDOM = random.Random(1)
PROMPTS = [[_RANDOM.randrange(3, VOCAB_SIZE - 1) for _ in range(length)] for length in (150, 40, 60)]


def params(tokens: int | None = BUDGET, **more: Any) -> SamplingParams:
    budget: Any = None if tokens is None else {"mode": "sinks", "tokens": tokens}
    return SamplingParams(**{"max_tokens": 200, "temperature": 0, "ignore_eos": True, **more}, kv_budget=budget)


def generate(core: EngineCore, sampling: SamplingParams) -> tuple[list[list[list[int]]], int]:
    """The output of each prompt's sequences, and the most blocks that were held at once."""
    requests = [core.inputs.make_request(prompt, sampling) for prompt in PROMPTS]
    for request in requests:
        core.scheduler.add(request)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.scheduler.kv.pool.num_active)
    assert_idle(core)
    return [[list(seq.output_token_ids) for seq in request.sequences] for request in requests], most


def outputs(sampling: SamplingParams, **options: Any) -> tuple[list[list[list[int]]], int]:
    with tiny_core(deterministic=True, **options) as core:
        if options.get("preemption_mode"):
            thrash(core)
        found = generate(core, sampling)
        assert generate(core, sampling)[0] == found[0]  # with what the first left in the cache
        assert bool(options.get("preemption_mode")) == bool(core.scheduler.counters.num_preemptions)
        return found


def test_a_budget_that_is_never_exceeded_changes_no_token() -> None:
    assert outputs(params(800)) == outputs(params(None))


def test_a_budget_bounds_the_blocks_and_gives_the_same_tokens_cold_cached_in_chunks_and_preempted() -> None:
    expected, most = outputs(params())
    # Sinks, a window with a partial block at either end, and the tokens of the step in flight.
    assert most <= 3 * (BUDGET // 16 + 1) + sum(map(len, PROMPTS)) // 16
    assert expected != outputs(params(None))[0]
    chunked, most = outputs(params(), max_num_batched_tokens=32)
    assert chunked == expected
    assert most <= 3 * (BUDGET // 16 + 1) + 2
    for mode in ("swap", "recompute"):
        tight = {"num_blocks": 11, "max_num_batched_tokens": 32, "preemption_mode": mode}
        assert outputs(params(), **tight)[0] == expected
    with tiny_core(attention_backend="reference") as core:
        assert generate(core, params())[0] == expected


def test_drafts_plans_made_ahead_and_no_prefix_cache_change_no_token_under_a_budget() -> None:
    expected = outputs(params())[0]
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    for options in (drafting, {"async_scheduling": True}, {"enable_prefix_caching": False}):
        assert outputs(params(), **options)[0] == expected


def test_dense_requests_find_no_block_that_was_computed_after_an_eviction() -> None:
    with tiny_core(deterministic=True) as core:
        dense = generate(core, params(None))[0]
    with tiny_core(deterministic=True) as core:
        kept = generate(core, params())[0]
        assert generate(core, params(None))[0] == dense
        assert generate(core, params())[0] == kept  # and no block of the dense ones beyond the budget


def test_beams_and_parallel_samples_share_the_sinks() -> None:
    beams = params(use_beam_search=True, n=3, max_tokens=60)
    samples = params(n=3, temperature=0.8, seed=1, max_tokens=60)
    for sampling in (beams, samples):
        found, most = outputs(sampling, max_num_batched_tokens=32)
        assert found == outputs(sampling)[0]
        assert most <= len(PROMPTS) * 3 * (BUDGET // 16 + 2)


def test_a_context_beyond_the_models_own_is_computed_in_constant_memory() -> None:
    budget = {"mode": "sinks", "tokens": BUDGET}
    options = {"kv_budget": budget, "max_model_len": 20_000, "num_blocks": 24, "max_num_batched_tokens": 32}
    with tiny_core(**options) as core:
        request = core.inputs.make_request(PROMPTS[0], params(None, max_tokens=2500))
        core.scheduler.add(request)
        most = 0
        while core.has_work:
            core.step()
            most = max(most, core.scheduler.kv.pool.num_active if len(request.sequences[0].output_token_ids) else 0)
        assert len(request.sequences[0].output_token_ids) == 2500
        assert most <= BUDGET // 16 + 1 + len(PROMPTS[0]) // 16
        evicted = len(PROMPTS[0]) + 2500 - 1 - BUDGET
        assert budget_fields(request) == {**budget, "evicted_tokens": evicted}


def test_budgets_that_make_no_sense_are_refused_with_the_numbers() -> None:
    with tiny_core(kv_budget={"mode": "sinks", "tokens": 128}) as core:
        assert core.inputs.make_request([5], params(None)).params.kv_budget == core.config.budget
        for tokens, message in ((256, "within this server's"), (20, "from 32, two KV blocks, to 1024")):
            with pytest.raises(RequestError, match=message):
                core.inputs.make_request([5], params(tokens))
    for wrong in ({"mode": "half", "tokens": 9}, {"mode": "sinks"}, {"mode": "sinks", "tokens": 9, "keep": 1}):
        with pytest.raises(RequestError, match="kv_budget"):
            SamplingParams(kv_budget=wrong)  # type: ignore[arg-type]
    with (
        pytest.raises(ConfigError, match="keeps 4096 tokens, but"),
        tiny_core(kv_budget='{"mode": "sinks", "tokens": 4096}'),
    ):
        pass
