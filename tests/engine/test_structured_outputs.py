"""Structured outputs through the engine: valid, the same whichever way they were computed, and nothing left behind."""

from __future__ import annotations

import gc
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import SamplingParams, StructuredOutputsParams
from octavo.dialect.constraint import calls_grammar
from octavo.dialect.formats import CALL_FORMATS
from octavo.engine.outputs import GRAMMAR_TOO_COMPLEX, CompletionOutput, RequestOutput
from octavo.errors import ContextLengthError, RequestError
from octavo.grammar.state import live_states
from octavo.request import FinishReason, sibling_seed
from octavo.sampling import structured
from tests.conftest import MakeLLM, assert_idle, runner_of
from tests.engine.preempting import thrash

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["reader", "writer"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
READ = {"name": "read", "parameters": {"type": "object", "properties": {"page": {"type": "integer", "maximum": 99}}}}
CLOSE = {"name": "close"}
# No white space: a random model would write little else.
DESCRIPTIONS = [
    StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    StructuredOutputsParams(regex="[a-f]{2,8}-[0-9]{3}"),
    StructuredOutputsParams(choice=["no", "not", "none of these"]),
    StructuredOutputsParams(grammar='start: "(" start ")" | "x"'),
    StructuredOutputsParams(
        json={"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 9}
    ),
    StructuredOutputsParams(grammar=calls_grammar(CALL_FORMATS[0], [READ, CLOSE], parallel=False)),
    None,
]


def workload() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(24)]
    prompts, params = [], []
    for i in range(24):
        own = [rng.randrange(3, 320) for _ in range(rng.randint(1, 12))]
        prompts.append({"prompt_token_ids": shared[: rng.choice([0, 16, 24])] + own})
        ways: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
            {"temperature": 1.2, "frequency_penalty": 0.5, "logit_bias": {40: 2.0}},
        ]
        how = ways[i % len(ways)]
        wanted = DESCRIPTIONS[i % len(DESCRIPTIONS)]
        params.append(SamplingParams(max_tokens=64, seed=i, structured_outputs=wanted, **how))
    return prompts, params


def told(outputs: list[RequestOutput]) -> list[tuple[list[int], str, FinishReason | None]]:
    return [(c.token_ids, c.text, c.finish_reason) for output in outputs for c in output.outputs]


def assert_fits(wanted: StructuredOutputsParams | None, completion: CompletionOutput) -> None:
    if wanted is None or completion.finish_reason is FinishReason.LENGTH:
        return
    assert completion.finish_reason is FinishReason.STOP
    if isinstance(wanted.json, str):
        validator = jsonschema.Draft202012Validator
        schema = json.loads(wanted.json)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(completion.text))
    elif wanted.choice is not None:
        assert completion.text in wanted.choice


def assert_nothing_left(llm: Any) -> None:
    assert_idle(llm.core)
    gc.collect()
    assert len(live_states) == 0
    assert len(runner_of(llm.core)._batches.sequences) == 0


_REFERENCE: list[Any] = []


def alone(make_llm: MakeLLM, folder: Path) -> list[Any]:
    """Each request by itself, a token a step: with logprobs asked for, none is forced ahead of its draw."""
    if not _REFERENCE:
        llm = make_llm(folder, enable_prefix_caching=False)
        for prompt, params in zip(*workload(), strict=True):
            fields = {name: getattr(params, name) for name in params.__slots__}
            (output,) = llm.generate(prompt, SamplingParams(**{**fields, "logprobs": 0}), use_tqdm=False)
            assert_fits(params.structured_outputs, output.outputs[0])
            _REFERENCE.extend(told([output]))
    return _REFERENCE


WAYS: dict[str, dict[str, Any]] = {
    "a batch of 24": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "block_size": 4},
    "five at a time": {"max_num_seqs": 5, "prefix_cache": "radix"},
    "recomputed": {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 24, "preemption_mode": "recompute"},
    "swapped": {
        "block_size": 4,
        "num_blocks": 40,
        "max_num_batched_tokens": 24,
        "preemption_mode": "swap",
        "swap_space": "16MiB",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_batch_the_chunks_and_preemption_change_no_token(make_llm: MakeLLM, tiny_llama: Path, way: str) -> None:
    expected = alone(make_llm, tiny_llama)
    llm = make_llm(tiny_llama, **WAYS[way])
    if "preemption_mode" in WAYS[way]:
        thrash(llm.core)
    prompts, params = workload()
    for _ in range(2):  # the second time over a warm prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert told(outputs) == expected
    assert ("preemption_mode" in WAYS[way]) == (llm.core.scheduler.counters.num_preemptions > 0)
    assert_nothing_left(llm)


@pytest.mark.slow
def test_masks_that_are_made_beside_the_step_change_no_token(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(make_llm, tiny_llama)
    monkeypatch.setattr(structured, "_MOST_TO_FORCE", 0)  # as with more than 32 streams
    llm = make_llm(tiny_llama, **WAYS["swapped"])
    thrash(llm.core)
    prompts, params = workload()
    assert told(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert llm.core.scheduler.counters.num_preemptions > 0
    how: dict[str, Any] = {"max_tokens": 40, "structured_outputs": DESCRIPTIONS[0]}
    (together,) = llm.generate("x", SamplingParams(n=5, seed=70, **how), use_tqdm=False)
    separate = [llm.generate("x", SamplingParams(seed=sibling_seed(70, i), **how), use_tqdm=False)[0] for i in range(5)]
    assert told([together]) == told(separate)
    assert_nothing_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True, "block_size": 16}])
def test_64_streams_follow_32_grammars_at_once(make_llm: MakeLLM, tiny_llama: Path, options: dict[str, Any]) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=64, **options)
    schemas = [{"type": "array", "items": {"enum": [i, f"n{i}", None]}, "maxItems": 9} for i in range(32)]
    params = [
        SamplingParams(max_tokens=120, seed=i, structured_outputs=StructuredOutputsParams(json=schemas[i % 32]))
        for i in range(64)
    ]
    outputs = llm.generate(["x"] * 64, params, use_tqdm=False)
    for each, output in zip(params, outputs, strict=True):
        assert_fits(each.structured_outputs, output.outputs[0])
    assert [o.outputs[0].finish_reason for o in outputs].count(FinishReason.STOP) > 32
    (again,) = llm.generate("x", params[33], use_tqdm=False)
    assert again.outputs[0].token_ids == outputs[33].outputs[0].token_ids
    assert_nothing_left(llm)


def test_forced_tokens_take_no_step_of_their_own(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    wanted = StructuredOutputsParams(choice=["the scheduler takes what fits and leaves the rest"])
    (output,) = llm.generate("x", SamplingParams(max_tokens=99, structured_outputs=wanted), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text == wanted.choice[0]  # type: ignore[index]
    assert completion.finish_reason is FinishReason.STOP
    assert llm.core.stats.num_steps < len(completion.token_ids) / 4


TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 30, "max_num_batched_tokens": 16}


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "options"), [*zip(DESCRIPTIONS[:4], [{}, TIGHT, {}, TIGHT], strict=True)])
def test_parallel_samples_follow_the_grammar_each_for_itself(
    make_llm: MakeLLM, tiny_llama: Path, wanted: StructuredOutputsParams, options: dict[str, Any]
) -> None:
    llm = make_llm(tiny_llama, **options)
    prompt = {"prompt_token_ids": list(range(10, 31))}
    how: dict[str, Any] = {"max_tokens": 40, "structured_outputs": wanted}
    (together,) = llm.generate(prompt, SamplingParams(n=5, seed=70, **how), use_tqdm=False)
    separate = [
        llm.generate(prompt, SamplingParams(seed=sibling_seed(70, i), **how), use_tqdm=False)[0] for i in range(5)
    ]
    assert told([together]) == told(separate)
    for completion in together.outputs:
        assert_fits(wanted, completion)
    assert_nothing_left(llm)


@pytest.mark.slow
def test_a_grammar_that_cannot_end_stops_at_max_tokens(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    wanted = StructuredOutputsParams(grammar='start: "a" start')
    for n in (1, 20):
        params = SamplingParams(max_tokens=n, structured_outputs=wanted)
        (output,) = llm.generate("x", params, use_tqdm=False)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert len(output.outputs[0].token_ids) == n
        assert set(output.outputs[0].text) == {"a"}
    assert_nothing_left(llm)


@pytest.mark.parametrize("how", [{"min_tokens": 30}, {"ignore_eos": True}, {"ignore_eos": True, "n": 3}])
def test_an_output_goes_on_as_long_as_it_can_and_ends_where_it_must(
    make_llm: MakeLLM, tiny_llama: Path, how: dict[str, Any]
) -> None:
    llm = make_llm(tiny_llama)
    wanted = StructuredOutputsParams(regex="a{0,9}")
    (output,) = llm.generate("x", SamplingParams(max_tokens=60, structured_outputs=wanted, **how), use_tqdm=False)
    for completion in output.outputs:
        assert (completion.text, completion.finish_reason) == ("a" * 9, FinishReason.STOP)


def test_logprobs_are_those_of_the_model_without_the_grammar(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    wanted = StructuredOutputsParams(choice=["b", "c"])
    params = SamplingParams(max_tokens=8, logprobs=3, structured_outputs=wanted, temperature=0.0)
    (output,) = llm.generate("x", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    (free,) = llm.generate("x", SamplingParams(max_tokens=1, logprobs=3, temperature=0.0), use_tqdm=False)
    ours, theirs = dict(completion.logprobs[0].top), dict(free.outputs[0].logprobs[0].top)
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
def test_a_request_aborted_in_mid_grammar_leaves_nothing(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    core = llm.core
    params = SamplingParams(max_tokens=200, n=3, structured_outputs=StructuredOutputsParams(grammar='start: "a" start'))
    requests = [core.inputs.make("x" * i, params) for i in range(1, 4)]
    for request in requests:
        core.add(request)
    for _ in range(5):
        core.step()
    assert len(live_states) == 9
    for request in requests:
        core.abort(request.request_id)
    assert_nothing_left(llm)


@pytest.mark.slow
def test_grammars_are_forgotten_where_the_last_blocks_are_stored_too(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=2, kv_host_memory="1MiB", kv_demotion="all")
    params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    size = llm.core.scheduler.kv.spec.block_size
    for first in range(3):  # one more than the runner has rows; the last step fills a block
        llm.generate({"prompt_token_ids": [first + 3] * size}, params, use_tqdm=False)
        assert_nothing_left(llm)
    assert llm.core.stats.num_failed_steps == 0


def test_a_failed_step_leaves_nothing_and_the_request_goes_on(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    core, execute = llm.core, llm.core.runner.execute
    steps = iter(range(1000))

    def breaking(plan: Any) -> Any:
        if next(steps) in (2, 5):
            raise RuntimeError("a step is lost")
        return execute(plan)

    prompts, params = workload()
    expected = llm.generate(prompts[:6], params[:6], use_tqdm=False)
    core.runner.execute = breaking
    assert told(llm.generate(prompts[:6], params[:6], use_tqdm=False)) == told(expected)
    core.runner.execute = execute
    assert_nothing_left(llm)


# Each run of letters may be read in many ways: the parse grows with the square of the output.
AMBIGUOUS = 'start: "[" s "]"\ns: "a" | s s s s | s s s | s s'


def assert_too_complex_ends_its_own_request_only(llm: Any, how: dict[str, Any]) -> None:
    (letter,) = llm.core.tokenizer.encode("a", add_special_tokens=False)
    wanted = StructuredOutputsParams(grammar=AMBIGUOUS)
    params = SamplingParams(max_tokens=150, structured_outputs=wanted, logit_bias={letter: 100.0}, **how)
    other = SamplingParams(max_tokens=100, temperature=0.0)
    structured = SamplingParams(max_tokens=100, temperature=0.0, structured_outputs=DESCRIPTIONS[0])
    alone = llm.generate(["y", "z"], [other, structured], use_tqdm=False)
    failed, *fine = llm.generate(["x", "y", "z"], [params, other, structured], use_tqdm=False)
    assert (failed.error, failed.outputs[0].finish_reason) == (GRAMMAR_TOO_COMPLEX, FinishReason.ERROR)
    assert re.fullmatch(r"after \d\d output tokens: more than 250 rules .*", failed.error_reason), failed.error_reason
    assert failed.outputs[0].text.startswith("[aaaa")
    assert told(fine) == told(alone)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"top_k": 3, "n": 2}])
def test_a_grammar_that_becomes_too_complex_ends_its_own_request_only(
    make_llm: MakeLLM, tiny_llama: Path, how: dict[str, Any]
) -> None:
    llm = make_llm(tiny_llama)
    assert_too_complex_ends_its_own_request_only(llm, how)
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: unknown_rule"}, "unknown"),
        ({"grammar": "root ::= ("}, "cannot be compiled|not valid GBNF"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys.*not.*strict: false"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "nothing satisfies"),
        ({"json": False}, "Unsatisfiable"),
        ({"regex": "a" * 65_537}, "has 65537 bytes of regex, but at most 65536"),
        ({"regex": "(" * 65 + "a" + ")" * 65}, "nested 65 levels deep, but at most 64"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    make_llm: MakeLLM, tiny_llama: Path, wanted: dict[str, Any], says: str
) -> None:
    llm = make_llm(tiny_llama)
    with pytest.raises(RequestError, match=says) as refusal:
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**wanted)), use_tqdm=False)
    assert refusal.value.param.split(".")[0] == "structured_outputs"


def test_a_grammar_that_takes_too_long_to_compile_is_refused(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, limits={"max_grammar_ms": 100})
    # The intersection of these takes minutes.
    patterns = StructuredOutputsParams(json={"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 40)]})
    with pytest.raises(RequestError, match="takes more than 100 ms, the most allowed"):
        llm.generate("x", SamplingParams(structured_outputs=patterns), use_tqdm=False)


def test_lenient_schemas_pass_over_what_cannot_be_enforced(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    wanted = StructuredOutputsParams(json={"enum": [1, 2], "not": {"const": 7}}, strict=False)
    (output,) = llm.generate("x", SamplingParams(structured_outputs=wanted), use_tqdm=False)
    assert output.outputs[0].text.strip() in ("1", "2")


def test_a_prompt_that_does_not_fit_is_refused_before_its_grammar_is_compiled(
    make_llm: MakeLLM, tiny_llama: Path
) -> None:
    llm = make_llm(tiny_llama)
    wanted = StructuredOutputsParams(regex="(?=a)b")
    with pytest.raises(ContextLengthError):
        llm.core.inputs.make([5] * 256, SamplingParams(max_tokens=None, structured_outputs=wanted))


# Schemas whose every output is short: a random model would go on for ever where it may.
_leaves = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 150},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "uuid"},
        {"type": ["string", "null"], "maxLength": 2},
    ]
) | st.lists(st.sampled_from([1, "a", None, True, "é\n"]), min_size=1, max_size=3, unique_by=repr).map(
    lambda values: {"enum": values}
)


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "long name", 'quo"te'])
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties) or ["a"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 1),
    )
    return objects | arrays | st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each})


@pytest.fixture(scope="module")
def shared_llm(tiny_llama: Path) -> Any:
    from octavo import LLM

    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": "16MiB", "block_size": 8}
    options["limits"] = {"max_grammar_ms": 60_000}  # a busy machine may take long over any
    with LLM(str(tiny_llama), **options) as llm:
        yield llm
        assert_nothing_left(llm)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=st.recursive(_leaves, _containers, max_leaves=5), seed=st.integers(0, 2**32), compact=st.booleans())
def test_whatever_a_random_schema_generates_validates(
    shared_llm: Any, schema: dict[str, Any], seed: int, compact: bool
) -> None:
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
    params = SamplingParams(n=3, max_tokens=200, seed=seed, structured_outputs=wanted)
    (output,) = shared_llm.generate("x", params, use_tqdm=False)
    for completion in output.outputs:
        assert_fits(wanted, completion)
