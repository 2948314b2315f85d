"""The same request gives the same tokens, whichever way it was computed (float32, greedy and seeded sampling)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo import kernels
from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.request import RequestContext, sibling_seed
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM
from tests.engine.preempting import thrash

NUM_REQUESTS = 32
VOCAB = 320

_REFERENCE: dict[Path, list[CompletionOutput]] = {}


def workload() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """32 prompts of 1 to 60 tokens, some beginning alike; greedy and sampled in turns, each with its own seed."""
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts, params = [], []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))]
        prompts.append({"prompt_token_ids": shared[: rng.choice([0, 0, 17, 32, 40])] + own})
        how: dict[str, Any] = (
            {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": i}
        )
        params.append(SamplingParams(max_tokens=rng.randint(8, 24), ignore_eos=True, logprobs=2, **how))
    return prompts, params


def alone(make_llm: MakeLLM, folder: Path, count: int = NUM_REQUESTS) -> list[CompletionOutput]:
    """What each of the first requests gives by itself, nothing cached, whole prompts: the reference for the rest."""
    known = _REFERENCE.setdefault(folder, [])
    if len(known) < count:
        llm = make_llm(folder, enable_prefix_caching=False)
        prompts, params = workload()
        for i in range(len(known), count):
            known.append(llm.generate(prompts[i], params[i], use_tqdm=False)[0].outputs[0])
    return known[:count]


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[CompletionOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        (got,) = output.outputs
        assert (got.token_ids, got.text, got.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
        assert got.logprobs is not None
        assert wanted.logprobs is not None
        for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
            assert ours.rank == theirs.rank
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


WAYS: dict[str, dict[str, Any]] = {
    "a batch of 32": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "five at a time": {"max_num_seqs": 5},
    "blocks of 1": {"block_size": 1},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "one block a sequence": {"block_size": "max"},
    "no prefix cache": {"enable_prefix_caching": False},
    "radix prefix cache": {"prefix_cache": "radix"},
    "reference attention": {"attention_backend": "reference"},
    "native attention": {"attention_backend": "native"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(("tiny_llama", way) for way in WAYS),
        *(("tiny_mistral", way) for way in ("a batch of 32", "chunks of 16", "blocks of 1", "blocks of 32")),
        *(("tiny_mistral", way) for way in ("one block a sequence", "radix prefix cache", "native attention")),
    ],
)
def test_the_batch_the_chunks_and_the_blocks_change_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, model: str, way: str
) -> None:
    if WAYS[way].get("attention_backend") == "native" and not kernels.available():
        pytest.skip("the C++ kernels are not compiled")
    folder = request.getfixturevalue(model)
    llm = make_llm(folder, **WAYS[way])
    prompts, params = workload()
    assert_same(llm.generate(prompts, params, use_tqdm=False), alone(make_llm, folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "chunk", "prefix_cache"),
    [
        ("tiny_llama", 2048, "radix"),
        ("tiny_llama", 7, "hashed"),
        ("tiny_mistral", 2048, "hashed"),
        ("tiny_mistral", 7, "radix"),
    ],
)
def test_a_warm_prefix_cache_changes_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, model: str, chunk: int, prefix_cache: str
) -> None:
    folder = request.getfixturevalue(model)
    llm = make_llm(folder, block_size=4, max_num_batched_tokens=chunk, prefix_cache=prefix_cache)
    prompts, params = workload()
    llm.generate(prompts, params, use_tqdm=False)
    warm = llm.generate(prompts, params, use_tqdm=False)
    assert all(out.num_cached_tokens == (len(out.prompt_token_ids) - 1) // 4 * 4 for out in warm)
    assert_same(warm, alone(make_llm, folder))


def test_one_request_preempted_again_and_again_gives_the_same_tokens(make_llm: MakeLLM, tiny_llama: Path) -> None:
    """Requests of higher priority keep arriving while it runs, and each takes the blocks it stands on."""
    llm = make_llm(tiny_llama, block_size=2, num_blocks=22, max_num_batched_tokens=16)
    prompt, sampling = list(range(40, 50)), SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
    expected = make_llm(tiny_llama).generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
    core = llm.core
    thrash(core)
    victim = core.inputs.make(prompt, sampling)
    core.add(victim)
    outputs = []
    for arrival in range(4):
        while not victim.finished and victim.sequences[0].num_output_tokens < 2 + 5 * arrival:
            outputs += core.step()
        urgent = core.inputs.make(
            [5 + arrival] * 30, SamplingParams(max_tokens=4, ignore_eos=True), RequestContext(priority=-1)
        )
        core.add(urgent)
    while core.has_work:
        outputs += core.step()
    assert victim.sequences[0].num_preemptions >= 3
    (output,) = [out for out in outputs if out.request_id == victim.request_id]
    assert output.outputs[0].token_ids == expected.token_ids


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 16}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parallel_samples_are_those_of_separate_requests_with_their_hashed_seeds(
    make_llm: MakeLLM, tiny_llama: Path, options: dict[str, Any], temperature: float
) -> None:
    llm = make_llm(tiny_llama, **options)
    prompt = {"prompt_token_ids": list(range(10, 31))}
    how: dict[str, Any] = {"temperature": temperature, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    (together,) = llm.generate(prompt, SamplingParams(n=5, seed=70, **how), use_tqdm=False)
    if options:
        assert llm.core.scheduler.counters.num_preemptions > 0
    fresh = make_llm(tiny_llama, enable_prefix_caching=False)
    separate = [
        fresh.generate(prompt, SamplingParams(seed=sibling_seed(70, i), **how), use_tqdm=False)[0] for i in range(5)
    ]
    assert [c.index for c in together.outputs] == [0, 1, 2, 3, 4]
    assert [c.token_ids for c in together.outputs] == [out.outputs[0].token_ids for out in separate]
    assert len({tuple(c.token_ids) for c in together.outputs}) == (5 if temperature else 1)
    assert [c.cumulative_logprob for c in together.outputs] == pytest.approx(
        [out.outputs[0].cumulative_logprob for out in separate], abs=1e-3
    )


@pytest.mark.slow
def test_deltas_add_up_to_the_whole(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama).core
    prompts, params = workload()
    for prompt, sampling in zip(prompts, params, strict=True):
        core.add(core.inputs.make(prompt["prompt_token_ids"], sampling), kind=OutputKind.DELTA)
    order = list(core.scheduler.live)
    whole = {request_id: CompletionOutput(0, logprobs=[]) for request_id in order}
    while core.has_work:
        for output in core.step():
            assert output.finished == (output.outputs[0].finish_reason is not None)
            for delta in output.outputs:
                sum_ = whole[output.request_id]
                sum_.text += delta.text
                sum_.token_ids += delta.token_ids
                sum_.logprobs += delta.logprobs or []  # type: ignore[operator]
                sum_.finish_reason = delta.finish_reason
    for request_id, wanted in zip(order, alone(make_llm, tiny_llama), strict=True):
        got = whole[request_id]
        assert (got.text, got.token_ids, got.finish_reason) == (wanted.text, wanted.token_ids, wanted.finish_reason)
        assert len(got.logprobs or []) == len(got.token_ids)
