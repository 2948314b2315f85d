"""Verified drafts change no bit of any output."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.engine.core import EngineCore
from octavo.engine.live import _counters
from octavo.engine.outputs import CompletionOutput
from octavo.observe.metrics import MetricsPage
from octavo.request import GAP, RequestContext, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.drafts import Draft
from octavo.scheduler.speculation import Speculator
from octavo.scheduler.step_time import StepTimeModel
from octavo.server.answers.generation import Usage
from octavo.server.bodies.prompts import EncodedPrompt
from octavo.structured_outputs import StructuredOutputsParams, json_outline
from tests.engine.preempting import thrash
from tests.engine.speculating import Adversary, Outputs, speculate
from tests.engine.tiny_engine import VOCAB_SIZE, assert_drained, tiny_core

Job = tuple[list[int], SamplingParams]


def run(core: EngineCore, jobs: list[Job]) -> list[list[CompletionOutput]]:
    """Return each request's completions; all arrive at once."""
    requests = [
        core.inputs.make(prompt, params, RequestContext(request_id=str(i))) for i, (prompt, params) in enumerate(jobs)
    ]
    for request in requests:
        core.add(request)
    outputs: dict[str, list[CompletionOutput]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None
            outputs[output.request_id] = output.outputs
    assert_drained(core)
    return [outputs[str(i)] for i in range(len(jobs))]


def tokens_of(completions: list[list[CompletionOutput]], jobs: list[Job], seed: int) -> Outputs:
    """What the adversary expects, with some tokens more, which would follow those that are cut."""
    rng = random.Random(seed)
    return {
        (RequestId(str(i)), output.index): [*output.token_ids, *(rng.randrange(VOCAB_SIZE) for _ in range(8))]
        for i, outputs in enumerate(completions)
        for output in outputs
    }


def assert_drafts_change_nothing(jobs: list[Job], seed: int = 0, **options: Any) -> EngineCore:
    with tiny_core(**options) as core:
        if options.get("calculate_kv_scales"):
            run(core, jobs[:1])  # chooses the scales
            core.reset_prefix_cache()
        expected = run(core, jobs)
        core.reset_prefix_cache()
        speculator = speculate(core, Adversary(tokens_of(expected, jobs, seed), seed))
        assert run(core, jobs) == expected
    counters = speculator.counters
    assert counters.num_draft_tokens > counters.num_accepted_tokens > 0
    return core


def make_jobs(seed: int, count: int, **params: Any) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        how: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": i}
        how |= {"max_tokens": rng.randint(12, 40), "ignore_eos": True, "logprobs": 2} | params
        jobs.append(([rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))], SamplingParams(**how)))
    return jobs


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    """Any way of sampling that may verify drafts."""
    some_ids = st.lists(st.integers(3, VOCAB_SIZE - 2), min_size=1, max_size=4)
    max_tokens = draw(st.integers(2, 30))
    return SamplingParams(
        n=draw(st.integers(1, 3)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        top_k=draw(st.sampled_from([0, 20])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        seed=draw(st.integers(0, 9)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.one_of(st.none(), some_ids.map(lambda ids: dict.fromkeys(ids, 6.0)))),
        bad_words=draw(st.sampled_from([(), ("the", "a b")])),
        stop=draw(st.sampled_from([(), ("a",), ("e", "the")])),
        stop_token_ids=draw(st.one_of(st.just(()), some_ids.map(tuple))),
        include_stop_str_in_output=draw(st.booleans()),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(3, VOCAB_SIZE - 2), min_size=1, max_size=40), sampling()), max_size=6),
    st.integers(0, 2**16),
)
def test_drafts_change_no_output_whatever_the_sampling(jobs: list[Job], seed: int) -> None:
    with tiny_core(deterministic=kernels.available()) as core:
        expected = run(core, jobs)
        speculate(core, Adversary(tokens_of(expected, jobs, seed), seed))
        assert run(core, jobs) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["auto", "int8", "int4", "k8v4", "fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_drafts_change_no_output_with_any_codec(codec: str, dtype: str) -> None:
    options = {"calculate_kv_scales": True} if codec in ("fp8_e4m3", "nvfp4") else {}
    # With tiles, plain blocks are rounded otherwise for several rows than for one.
    options["deterministic"] = codec == "auto" and kernels.available()
    assert_drafts_change_nothing(make_jobs(3, 8), dtype=dtype, kv_cache_dtype=codec, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "reference"},
        {"enable_prefix_caching": False},
        {"block_size": "max"},
        {"block_size": 1},
        {"max_num_batched_tokens": 9},
        {"scheduling_policy": "vtc"},
    ],
    ids=str,
)
def test_drafts_change_no_output_in_any_mode(options: dict[str, Any]) -> None:
    # Without log-probabilities: only the kernels, in blocks of 16 tokens, compute the same bits alone and together.
    assert_drafts_change_nothing(make_jobs(4, 6, logprobs=None), **options)


def test_more_drafts_than_places_fail_no_step_after_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    assert_drafts_change_nothing(make_jobs(8, 5, logprobs=None), max_num_seqs=2)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
def test_drafts_change_no_output_deterministically() -> None:
    assert_drafts_change_nothing(make_jobs(5, 8), deterministic=True, kv_cache_dtype="int8", dtype="bfloat16")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_drafts_change_no_output_of_requests_that_are_preempted(mode: str) -> None:
    jobs = make_jobs(6, 10, frequency_penalty=0.3)
    with tiny_core() as core:
        expected = run(core, jobs)
    with tiny_core(num_blocks=14, preemption_mode=mode) as core:
        thrash(core)
        speculate(core, Adversary(tokens_of(expected, jobs, 6), 6))
        assert run(core, jobs) == expected
        assert core.scheduler.counters.num_preemptions > 0


def any_params(rng: random.Random, number: int) -> SamplingParams:
    """Sampling of any kind that may verify drafts, with structured outputs in one request of four."""
    structured = None
    if rng.random() < 0.25:
        structured = rng.choice(
            [StructuredOutputsParams(choice=("yes indeed", "no never")), StructuredOutputsParams(regex="(ab|cd){4}e*")]
        )
    return SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=rng.choice((0.0, 0.7, 1.3)),
        top_p=rng.choice((1.0, 0.8)),
        top_k=rng.choice((0, 20)),
        min_p=rng.choice((0.0, 0.05)),
        seed=number,
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.6)),
        frequency_penalty=rng.choice((0.0, 0.4)),
        logit_bias=rng.choice((None, {rng.randrange(3, VOCAB_SIZE - 1): 6.0})),
        stop=rng.choice(((), ("a",), ("e", "the"))),
        max_tokens=rng.randint(2, 40),
        ignore_eos=structured is None and rng.random() < 0.5,
        logprobs=rng.choice((None, 0, 3)),
        structured_outputs=structured,
    )


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_drafts_change_no_output_of_a_thousand_requests_of_all_kinds(mode: str) -> None:
    rng = random.Random(7)
    jobs = [
        ([rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))], any_params(rng, i)) for i in range(1000)
    ]
    deterministic = kernels.available()
    with tiny_core(deterministic=deterministic) as core:
        expected = run(core, jobs)
    with tiny_core(deterministic=deterministic, num_blocks=100, preemption_mode=mode) as core:
        thrash(core)
        counters = speculate(core, Adversary(tokens_of(expected, jobs, 7), 7)).counters
        assert run(core, jobs) == expected
        assert core.scheduler.counters.num_preemptions > 50
    assert counters.num_accepted_tokens > 2000
    print(f"{core.scheduler.counters.num_preemptions} preemptions, {counters}")


def test_beams_verify_no_draft() -> None:
    jobs = [([5, 6, 7], SamplingParams(n=2, use_beam_search=True, max_tokens=8))]
    with tiny_core() as core:
        expected = run(core, jobs)
        counters = speculate(core, Adversary(tokens_of(expected, jobs, 1), 1)).counters
        assert run(core, jobs) == expected
    assert counters.num_drafts == 0


@pytest.mark.parametrize("logprobs", [None, 2])
def test_drafts_change_no_structured_output(logprobs: int | None) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    wanted = [
        StructuredOutputsParams(choice=("yes indeed", "no never")),
        StructuredOutputsParams(regex="(ab|cd){4}[0-9]{3}e*"),
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(json_object=True),
    ]
    jobs: list[Job] = []
    for number, structured in enumerate(wanted * 4):
        params = SamplingParams(
            temperature=(0.0, 0.8, 1.3)[number % 3],
            top_k=(0, 0, 5)[number % 3],
            seed=number,
            max_tokens=48,
            structured_outputs=structured,
            logprobs=logprobs,
            frequency_penalty=0.3 * (number % 2),
        )
        jobs.append(([5, 6, 8 + number], params))
    with tiny_core(deterministic=kernels.available()) as core:
        expected = run(core, jobs)
        counters = speculate(core, Adversary(tokens_of(expected, jobs, 2), 2)).counters
        assert run(core, jobs) == expected
    assert counters.num_accepted_tokens > 20
    assert sum(counters.accepted_per_position) == counters.num_accepted_tokens
    assert counters.num_draft_tokens > counters.num_accepted_tokens


@pytest.mark.parametrize("seed", range(4))
def test_parallel_samples_verify_drafts_from_their_own_token_on(seed: int) -> None:
    params = SamplingParams(n=3, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab|cd){6}"))
    jobs = [([5, 6, 8 + number], replace(params, seed=10 * seed + number)) for number in range(6)]
    with tiny_core() as core:
        expected = run(core, jobs)
        speculate(core, Adversary(tokens_of(expected, jobs, seed), seed))
        assert run(core, jobs) == expected


def test_blocks_of_refuted_tokens_are_given_back() -> None:
    with tiny_core(block_size=2) as core:
        job = ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        expected = run(core, [job])[0][0].token_ids
        wrong = [(token_id + 1) % VOCAB_SIZE for token_id in expected]
        counters = speculate(core, _Always(wrong)).counters
        request = core.inputs.make(*job)
        core.add(request)
        (seq,) = request.sequences
        while core.has_work:
            core.step()
            if not seq.finished:
                assert len(core.scheduler.kv.tables(seq)[0]) == -(-seq.num_tokens // 2)
        assert seq.output_token_ids == expected
        assert counters.num_draft_tokens > 0
        assert counters.num_accepted_tokens == 0
        assert_drained(core)


class _Always(Adversary):
    """Drafts from a list, right or wrong."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__({}, 0)
        self._token_ids = token_ids

    def draft(self, seq: Any, most: int) -> Any:
        return Draft(tuple(self._token_ids[seq.num_output_tokens :][:most]), "list", 1)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_an_engine_that_speculates_gives_the_same_and_counts_its_drafts(method: str) -> None:
    jobs: list[Job] = [
        (
            [7, 8, 9, 10] * 6,
            SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, logit_bias={60: 20.0, 61: 20.0}),
        )
    ]
    with tiny_core() as core:
        expected = run(core, jobs)
    with tiny_core(speculative_config={"method": method}) as core:
        assert core.scheduler.speculator is not None
        _make_cheap(core.scheduler.speculator)
        assert run(core, jobs) == expected
        assert run(core, jobs) == expected
        counters = core.stats.gauges().speculation
        text = MetricsPage(core.stats, "tiny").render()[0].decode()
        totals = _counters(core.scheduler)
    assert counters is not None
    saved = round(counters.saved_seconds, 1)
    assert totals[-3:] == [counters.num_draft_tokens, counters.num_accepted_tokens, saved]
    assert counters.num_accepted_tokens > 0
    for name, count in (
        ("vllm:spec_decode_num_drafts_total", counters.num_drafts),
        ("vllm:spec_decode_num_draft_tokens_total", counters.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens_total", counters.num_accepted_tokens),
    ):
        assert f'{name}{{model_name="tiny"}} {count}.0' in text
    first = counters.accepted_per_position[0]
    assert f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="tiny",position="0"}} {first}.0' in text
    assert 'octavo:speculation_saved_seconds{model_name="tiny"}' in text


def test_a_prediction_is_drafted_from_its_beginning_and_again_after_it_was_wrong() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with tiny_core(speculative_config={"method": "ngram"}) as core:
        assert core.scheduler.speculator is not None
        _make_cheap(core.scheduler.speculator)
        ((expected,),) = run(core, [([5, 6, 7], params)])
        counters = core.scheduler.speculator.counters
        accepted = counters.num_accepted_tokens
        wrong = [*expected.token_ids[:20], 3, *expected.token_ids[21:]]
        core.add(core.inputs.make([5, 6, 7], params, RequestContext(predicted_ids=tuple(wrong))))
        steps, outputs = 0, []
        while core.has_work:
            outputs += core.step()
            steps += 1
        assert outputs[-1].outputs == [expected]
        assert steps < 30
        assert counters.num_accepted_tokens - accepted > 30


def test_the_outline_of_a_schema_is_a_prediction() -> None:
    home = {"properties": {"city": {"type": "string"}, "floor": {"type": "integer"}, "next": {"$ref": "#/$defs/home"}}}
    schema = {
        "properties": {
            "kind": {"enum": ["a", 1]},
            "homes": {"items": {"$ref": "#/$defs/home"}},
            "rest": {"type": "number"},
        },
        "$defs": {"home": home},
    }
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    pieces = json_outline(json.dumps(schema))
    assert pieces[:4] == ['{"kind": ', ', "homes": [{"city": "', '", "floor": ', ', "next": {"city": "']
    assert pieces[-2].endswith('}], "rest": ')
    assert len(pieces) < 1000
    assert json_outline(json.dumps(schema), indent=2)[1] == ',\n  "homes": [\n    {\n      "city": "'
    assert json_outline('{"items": {"type": "string"}}', compact=True) == ['["', '","', '"]']
    assert len(json_outline('{"items": {"$ref": "#"}}')) < 1000
    for name in ("n", "n" * 5000):
        recursive = {"properties": {f"{name}{i}": {"$ref": "#"} for i in range(50)}}
        assert len("".join(json_outline(json.dumps(recursive)))) < 30_000
    with tiny_core(speculative_config={"method": "ngram"}) as core:
        assert core.tokenizer is not None
        predicted = core.inputs.make([5], params).predicted_ids
        first = core.tokenizer.encode(pieces[0], add_special_tokens=False)
        assert predicted[: len(first) + 1] == (*first, GAP)
        assert core.inputs.make([5], params, RequestContext(predicted_ids=(7,))).predicted_ids == (7,)
    with tiny_core() as core:
        assert not core.inputs.make([5], params).predicted_ids


def test_names_and_numbers_of_a_prompt_are_spelled_as_strings_in_json() -> None:
    prompt = 'the oak table (article T-90) left "Lyon" on 16 May,\nsays Ms Okafor'
    with tiny_core(speculative_config={"method": "ngram"}) as core:
        tokenizer = core.tokenizer
        assert tokenizer is not None

        def quoted(**options: Any) -> list[str]:
            ids = core.inputs.make(prompt, SamplingParams(**options)).quoted_ids
            pieces: list[list[int]] = [[]]
            for token_id in ids:
                pieces[-1].append(token_id) if token_id != GAP else pieces.append([])
            assert not pieces.pop()
            assert all(len(piece) <= 12 for piece in pieces)
            return [tokenizer.decode(piece) for piece in pieces]

        schema = {"type": "object"}
        found = quoted(structured_outputs=StructuredOutputsParams(json=schema))
        wanted = (' "T-90', ' "Lyon" o', ' "16 May,', ' "May,', ' "Ms Oka', ' "Okafor')
        assert [text[: len(begin)] for text, begin in zip(found, wanted, strict=True)] == [*wanted]
        compact = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        assert quoted(structured_outputs=compact)[1].startswith(':"Lyon"')
        assert quoted() == []
    with tiny_core() as core:
        assert not core.inputs.make([5], SamplingParams()).quoted_ids


def test_usage_has_the_accepted_tokens_up_to_a_stop_string() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with tiny_core() as core:
        ((without,),) = run(core, [([5, 6, 7], params)])
        assert core.tokenizer is not None
        stop = core.tokenizer.decode(without.token_ids[20:22])
        job = ([5, 6, 7], replace(params, stop=(stop,)))
        ((expected,),) = run(core, [job])
        assert 1 < len(expected.token_ids) < 40
        speculate(core, _Always(without.token_ids))
        core.add(core.inputs.make(*job))
        outputs = []
        while core.has_work:
            outputs += core.step()
        (output,) = outputs
        assert output.outputs == [expected]
        assert 0 < output.num_accepted_tokens < len(expected.token_ids)
    usage = Usage([EncodedPrompt([5, 6, 7])])
    usage.add(0, output)
    details = usage.report()["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": output.num_accepted_tokens}


def _make_cheap(speculator: Speculator) -> None:
    """Let neither rows nor looking for drafts cost time, so that drafts do not depend on the machine's speed."""
    speculator.times = _Cheap()
    speculator._clock = lambda: (0.0, 0.0)


class _Cheap(StepTimeModel):
    """Step times as if rows cost nothing."""

    def decode_seconds(self, rows: int, context: float) -> float:
        return 1.0
