"""The engine step by step: faults of one request, aborts, and what stays behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.engine import processor
from octavo.engine.core import EngineCore
from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.errors import RequestError
from octavo.request import FinishReason, Request, RequestContext
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import IncrementalDetokenizer
from tests.conftest import MakeLLM, assert_idle
from tests.engine.tiny_engine import POISON, assert_drained, poison, tiny_core

WAYS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16},
    {"block_size": 4, "num_blocks": 30, "enable_prefix_caching": False},
    {"attention_backend": "reference"},
]


def prompts(count: int = 6) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, POISON) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def add_all(core: EngineCore, token_ids: list[list[int]]) -> list[Request]:
    requests = []
    for i, prompt in enumerate(token_ids):
        params = SamplingParams(temperature=i % 2, seed=i, n=1 + i % 3, max_tokens=10, ignore_eos=True)
        requests.append(core.inputs.make(prompt, params))
        core.add(requests[-1])
    return requests


def drain(core: EngineCore) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while core.has_work:
        outputs |= {output.request_id: output for output in core.step()}
    return outputs


def tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("options", WAYS)
def test_unusable_logits_end_their_request_alone_and_the_others_keep_their_tokens(
    make_llm: MakeLLM, tiny_llama: Path, options: dict[str, Any]
) -> None:
    sound = make_llm(tiny_llama, **options).core
    requests = add_all(sound, prompts())
    expected = drain(sound)
    core = make_llm(tiny_llama, **options).core
    poison(core)
    ailing = [p if i not in (1, 4) else [*p, POISON] for i, p in enumerate(prompts())]
    got_requests = add_all(core, ailing)
    got = drain(core)
    for i, (request, twin) in enumerate(zip(requests, got_requests, strict=True)):
        output = got[twin.request_id]
        if i in (1, 4):
            assert {c.finish_reason for c in output.outputs} == {FinishReason.ERROR}
            assert tokens(output) == [[]] * twin.params.n
        else:
            assert tokens(output) == tokens(expected[request.request_id])


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
@pytest.mark.parametrize("options", WAYS)
def test_blocks_that_held_nan_do_not_taint_their_next_owner(
    make_llm: MakeLLM, request: pytest.FixtureRequest, model: str, options: dict[str, Any]
) -> None:
    core = make_llm(request.getfixturevalue(model), **{"num_blocks": 30, **options}).core
    expected = [tokens(drain(core)[r.request_id]) for r in add_all(core, prompts(1))]
    poison(core)
    for _ in range(3):
        core.add(core.inputs.make([POISON] * 80, SamplingParams(max_tokens=2)))
        assert [c.finish_reason for c in next(iter(drain(core).values())).outputs] == [FinishReason.ERROR]
        core.scheduler.kv.reset_prefix_cache()
        assert [tokens(drain(core)[r.request_id]) for r in add_all(core, prompts(1))] == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"block_size": 4}, {"block_size": 16}, {"attention_backend": "reference"}])
def test_a_block_that_slid_out_of_a_window_is_not_read_whatever_its_next_holder_writes(
    make_llm: MakeLLM, tiny_mistral: Path, options: dict[str, Any]
) -> None:
    core = make_llm(tiny_mistral, num_blocks=40, enable_prefix_caching=False, **options).core
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    alone = core.inputs.make([5, 6, 7], params)
    core.add(alone)
    expected = tokens(drain(core)[alone.request_id])
    poison(core)
    request = core.inputs.make([5, 6, 7], params)
    core.add(request)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(12):
        core.add(core.inputs.make([POISON] * 40, SamplingParams(max_tokens=2)))
        for _ in range(5):
            outputs |= {output.request_id: output for output in core.step()}
    outputs |= drain(core)
    assert [c.finish_reason for c in outputs[request.request_id].outputs] == [FinishReason.LENGTH]
    assert tokens(outputs[request.request_id]) == expected


def test_a_request_that_fails_late_keeps_what_it_said(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama).core
    prompt = [5, 6, 7]
    # A bias makes it say the poisonous token after a few others of its own.
    first = core.inputs.make(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    core.add(first)
    free = tokens(drain(core)[first.request_id])[0]
    core.runner.model._embedding[free[2]] = float("nan")
    expected = free[: free.index(free[2]) + 1]
    request = core.inputs.make(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0))
    core.add(request)
    (completion,) = drain(core)[request.request_id].outputs
    assert (completion.token_ids, completion.finish_reason) == (expected, FinishReason.ERROR)
    assert len(completion.logprobs or ()) == len(expected)


def test_an_abort_frees_the_blocks_at_once_and_returns_what_was_said(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama).core
    request = core.inputs.make([5, 6, 7], SamplingParams(temperature=0, n=2, max_tokens=50, ignore_eos=True))
    core.add(request, prompt="five six seven")
    for _ in range(4):
        assert core.step() == []
    output = core.abort(request.request_id)
    assert output is not None
    assert output.finished
    assert output.prompt == "five six seven"
    assert [(len(c.token_ids), c.finish_reason) for c in output.outputs] == [(4, "abort"), (4, "abort")]
    assert_idle(core)
    assert core.abort(request.request_id) is None
    assert core.abort("unheard of") is None


def test_what_has_never_run_is_aborted_without_output(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama, max_num_seqs=1).core
    running, waiting = (core.inputs.make([5], SamplingParams(max_tokens=5, ignore_eos=True)) for _ in range(2))
    core.add(running)
    core.add(waiting)
    core.step()
    output = core.abort(waiting.request_id)
    assert output is not None
    assert tokens(output) == [[]]
    assert output.num_cached_tokens == 0
    assert list(drain(core)) == [running.request_id]


def test_closing_aborts_whatever_waits_or_runs(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama, max_num_seqs=3).core
    add_all(core, prompts())
    core.step()
    core.close()
    assert_idle(core)
    assert core.step() == []


def test_deltas_of_parallel_samples_carry_their_index_and_only_what_is_new(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama).core
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    request = core.inputs.make([5, 6, 7], params)
    core.add(request, kind=OutputKind.DELTA)
    deltas = []
    while core.has_work:
        deltas += core.step()
    assert [[c.index for c in delta.outputs] for delta in deltas] == [[0, 1, 2]] * 6
    assert [len(c.token_ids) for delta in deltas for c in delta.outputs] == [1] * 18
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * 5
    assert [delta.finished for delta in deltas] == [False] * 5 + [True]


def test_an_id_in_use_is_refused_before_anything_changes(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama).core
    first, twin = (
        core.inputs.make([5], SamplingParams(max_tokens=3), RequestContext(request_id="x")) for _ in range(2)
    )
    core.add(first)
    with pytest.raises(RequestError, match="request id 'x' is in use"):
        core.add(twin)
    assert list(drain(core)) == ["x"]
    core.add(twin)
    assert list(drain(core)) == ["x"]


def test_chunks_sized_by_time_change_no_token_and_every_step_is_measured(make_llm: MakeLLM, tiny_llama: Path) -> None:
    add_all(plain := make_llm(tiny_llama).core, prompts())
    expected = {name: tokens(output) for name, output in drain(plain).items()}
    core = make_llm(tiny_llama, itl_slo_ms=1e-3).core
    add_all(core, prompts())
    steps = 0
    outputs: dict[str, RequestOutput] = {}
    while core.has_work:
        steps += 1
        outputs |= {output.request_id: output for output in core.step()}
    assert {name: tokens(output) for name, output in outputs.items()} == expected
    latency = core.scheduler._latency
    assert latency is not None
    assert latency.model.num_observed == steps
    assert_idle(core)


def test_what_a_prompt_ends_in_is_looked_up_once_for_all_its_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[IncrementalDetokenizer] = []

    def making(*args: Any) -> IncrementalDetokenizer:
        made.append(IncrementalDetokenizer(*args))
        return made[-1]

    monkeypatch.setattr(processor, "IncrementalDetokenizer", making)
    with tiny_core() as core:
        request = core.inputs.make([5, 6, 7], SamplingParams(n=8, max_tokens=2))
        core.add(request)
        while core.has_work:
            core.step()
        assert len(made) == 1
        assert_drained(core)
