"""Embeddings are transformers' hidden states, however the prompts were computed."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, RequestError
from octavo.errors import ContextLengthError, RequestFailedError
from octavo.pooling import Pooling
from octavo.request import RequestContext
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM, assert_idle
from tests.engine.tiny_engine import MAX_MODEL_LEN, POISON, poison, tiny_model

LENGTHS = (1, 2, 16, 17, 50, 33)


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 300) for _ in range(length)] for length in LENGTHS]


@cache
def hidden_states() -> list[torch.Tensor]:
    """[tokens, hidden_size] of each prompt, by transformers."""
    model = transformers.AutoModel.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts()]


def expected(pooling: str) -> torch.Tensor:
    pooled = [states[-1] if pooling == "last" else states.mean(0) for states in hidden_states()]
    return torch.nn.functional.normalize(torch.stack(pooled))


def embed(llm: LLM, pooling: str, given: list[list[int]] | None = None) -> list[Any]:
    wanted = [{"prompt_token_ids": ids} for ids in given or prompts()]
    outputs = llm.embed(wanted, pooling=pooling, use_tqdm=False)
    assert_idle(llm.core)
    return outputs


def vectors(outputs: list[Any]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole"),
        pytest.param({"max_num_batched_tokens": 7, "block_size": 16}, id="in chunks"),
        pytest.param({"attention_backend": "reference"}, id="the Python decoder"),
        pytest.param({"num_blocks": 8, "max_num_batched_tokens": 24, "preemption_mode": "swap"}, id="little room"),
    ],
)
def test_embeddings_are_transformers_hidden_states(pooling: str, options: Any, make_llm: MakeLLM) -> None:
    llm = make_llm(tiny_model(), **options)
    torch.testing.assert_close(vectors(embed(llm, pooling)), expected(pooling), atol=2e-5, rtol=0)


def test_the_last_tokens_state_needs_nothing_that_is_cached_and_the_mean_computes_all(make_llm: MakeLLM) -> None:
    """Cached blocks hold keys and values, and no hidden states."""
    llm = make_llm(tiny_model())
    for pooling in ("last", "mean"):
        cold, warm = embed(llm, pooling), embed(llm, pooling)
        cached = [(length - 1) // 16 * 16 for length in LENGTHS]
        assert [output.num_cached_tokens for output in warm] == (cached if pooling == "last" else [0] * len(LENGTHS))
        torch.testing.assert_close(vectors(warm), vectors(cold), atol=1e-6, rtol=0)
    # What an embedding computed, a completion finds.
    (after,) = llm.generate({"prompt_token_ids": prompts()[4]}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert after.num_cached_tokens == 48


def test_what_was_pooled_before_a_preemption_is_not_pooled_again(make_llm: MakeLLM) -> None:
    llm = make_llm(tiny_model(), max_num_batched_tokens=8)
    core, params = llm.core, SamplingParams()
    request = core.inputs.make(prompts()[4], params, RequestContext(pooling=Pooling.MEAN))
    core.add(request)
    for _ in range(3):
        core.step()
    core.scheduler.restart()
    outputs: list[Any] = []
    while core.has_work:
        outputs += core.step()
    torch.testing.assert_close(torch.tensor(outputs[-1].embedding), expected("mean")[4], atol=2e-5, rtol=0)
    assert_idle(core)


def test_embeddings_are_computed_with_streams_and_scores(make_llm: MakeLLM) -> None:
    llm = make_llm(tiny_model(), max_num_batched_tokens=40)
    core = llm.core
    tokens: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    others = [core.inputs.make(ids, SamplingParams(**tokens, prompt_logprobs=1)) for ids in prompts()]
    alone = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], SamplingParams(**tokens), use_tqdm=False)
    pooled = [core.inputs.make(ids, SamplingParams(), RequestContext(pooling=Pooling.MEAN)) for ids in prompts()]
    for request in (x for pair in zip(others, pooled, strict=True) for x in pair):
        core.add(request)
    done: dict[str, Any] = {}
    while core.has_work:
        done |= {output.request_id: output for output in core.step() if output.finished}
    found = [done[request.request_id].embedding for request in pooled]
    torch.testing.assert_close(torch.tensor(found), expected("mean"), atol=2e-5, rtol=0)
    texts = [done[request.request_id].outputs[0].token_ids for request in others]
    assert texts == [output.outputs[0].token_ids for output in alone]
    assert_idle(core)


def test_a_prompt_may_fill_the_context_and_one_token_more_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(tiny_model(), max_model_len=64, num_blocks=5)
    longest = [prompts()[4] + prompts()[4]][0][:64]
    (output,) = embed(llm, "mean", [longest])
    assert len(output.outputs.embedding) == llm.core.info.hidden_size
    with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens, but 65 were requested"):
        llm.embed({"prompt_token_ids": [*longest, 5]}, use_tqdm=False)
    with pytest.raises(RequestError, match="pooling must be one of last, mean, got 'cls'"):
        llm.embed("a", pooling="cls")
    assert MAX_MODEL_LEN > 64


def test_an_embedding_that_is_no_number_fails_its_request(make_llm: MakeLLM) -> None:
    llm = make_llm(tiny_model())
    poison(llm.core)
    with pytest.raises(RequestFailedError):
        llm.embed([{"prompt_token_ids": [5, POISON, 6]}], use_tqdm=False)
    assert_idle(llm.core)
