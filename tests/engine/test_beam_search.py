"""Beam search gives transformers' beams, in float32, whichever way it was computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CapacityError, RequestError
from octavo.request import FinishReason, sibling_seed
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM, assert_idle
from tests.engine.beams import LOGPROB_ERROR, Beams, assert_same_beams, expected_beams, scored
from tests.models.tiny import make_model

VOCAB = 320


def prompts(seed: int = 1) -> list[list[int]]:
    """Ten prompts of 1 to 40 tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 5, 9, 16, 17, 23, 31, 32, 40)]


@pytest.fixture(scope="module")
def model() -> Any:
    """The model whose weights `tiny_llama` holds."""
    return make_model("Llama")


# Every fifth token ends an output, so that many hypotheses of many lengths are found.
MANY_ENDS = list(range(3, VOCAB, 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        *((width, 1.0, False) for width in (2, 4, 8)),
        *((4, 1.0, True), (8, 0.6, True), (4, 2.0, False), (4, -1.0, False), (4, 0.0, "never"), (2, 2.0, "never")),
    ],
)
def test_beams_that_end_are_those_of_transformers(
    make_llm: MakeLLM, tiny_llama: Path, model: Any, width: int, length_penalty: float, early_stopping: Any
) -> None:
    rules: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    llm = make_llm(tiny_llama, block_size=4)
    params = SamplingParams(
        use_beam_search=True,
        n=width,
        max_tokens=20,
        ignore_eos=True,
        stop_token_ids=MANY_ENDS,
        **rules,
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    lengths = set()
    searches = expected_beams(model, prompts(), width, 20, eos_token_id=MANY_ENDS, **rules)
    for output, expected in zip(outputs, searches, strict=True):
        assert_same_beams(scored(output.outputs, length_penalty), expected, length_penalty)
        lengths |= {len(tokens) for tokens, _ in expected}
    assert len(lengths) > 3 or length_penalty > 1, "the outputs all end alike"


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_that_run_into_their_limit_are_those_of_transformers(
    make_llm: MakeLLM, tiny_llama: Path, model: Any, width: int
) -> None:
    llm = make_llm(tiny_llama)
    params = SamplingParams(use_beam_search=True, best_of=width, n=2, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    searches = expected_beams(model, prompts(), width, 24, eos_token_id=None, num_return_sequences=2)
    for output, expected in zip(outputs, searches, strict=True):
        assert_same_beams(scored(output.outputs), expected)
        assert [c.finish_reason for c in output.outputs] == [FinishReason.LENGTH] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"min_new_tokens": 8}])
def test_penalties_and_minimum_lengths_are_those_of_transformers(
    make_llm: MakeLLM, tiny_llama: Path, model: Any, options: dict[str, Any]
) -> None:
    llm = make_llm(tiny_llama)
    ours = {"min_tokens" if name == "min_new_tokens" else name: value for name, value in options.items()}
    params = SamplingParams(use_beam_search=True, n=4, max_tokens=16, ignore_eos=True, stop_token_ids=MANY_ENDS, **ours)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    for output in outputs:
        # Alone: in a batch transformers would penalise the padding token too.
        (expected,) = expected_beams(model, [output.prompt_token_ids], 4, 16, eos_token_id=MANY_ENDS, **options)
        assert_same_beams(scored(output.outputs), expected)


@pytest.mark.parametrize("num_going_on", [1, 2, 3])
def test_fewer_continuations_than_beams_are_those_of_transformers(
    make_llm: MakeLLM, tiny_llama: Path, model: Any, num_going_on: int
) -> None:
    """Until 6 tokens are there all others end an output and are masked: a search of 4 begins narrower than that."""
    llm = make_llm(tiny_llama, block_size=4, limits={"max_stop_token_ids": VOCAB})
    enders = [token for token in range(VOCAB) if not 3 <= token < 3 + num_going_on]
    params = SamplingParams(
        use_beam_search=True, n=4, max_tokens=12, min_tokens=6, ignore_eos=True, stop_token_ids=enders
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    searches = expected_beams(model, prompts(), 4, 12, eos_token_id=enders, min_new_tokens=6)
    for output, expected in zip(outputs, searches, strict=True):
        assert_same_beams(scored(output.outputs), expected)
        for completion in output.outputs:
            last = completion.token_ids[-1]
            ended = last in enders
            assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert completion.stop_reason == (last if ended else None)
    assert_idle(llm.core)


WAYS: dict[str, dict[str, Any]] = {
    "a token a step for each beam": {"max_num_batched_tokens": 4},
    "just enough places": {"max_num_seqs": 4},
    "blocks of 1": {"block_size": 1},
    "one block a sequence": {"block_size": "max"},
    "no prefix cache": {"enable_prefix_caching": False},
    "radix prefix cache": {"prefix_cache": "radix"},
    "preempted": {"block_size": 2, "num_blocks": 32, "max_num_seqs": 12},
    "preempted, no prefix cache": {"block_size": 2, "num_blocks": 32, "enable_prefix_caching": False},
    "room for one beam": {"block_size": 4, "num_blocks": 18, "enable_prefix_caching": False},
}


def run(llm: Any) -> list[Beams]:
    params = SamplingParams(
        use_beam_search=True, n=4, max_tokens=20, ignore_eos=True, stop_token_ids=MANY_ENDS, length_penalty=0.5
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    return [scored(output.outputs, 0.5) for output in outputs]


# What the beams are without any of these ways, by model.
_PLAIN: dict[Path, list[Beams]] = {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("tiny_llama", way) for way in WAYS),
        *(("tiny_mistral", way) for way in ("blocks of 1", "preempted", "room for one beam")),
    ],
)
def test_the_batch_the_blocks_and_preemption_change_no_beam(
    make_llm: MakeLLM, request: pytest.FixtureRequest, family: str, way: str
) -> None:
    folder = request.getfixturevalue(family)
    llm = make_llm(folder, **WAYS[way])
    if folder not in _PLAIN:
        _PLAIN[folder] = run(make_llm(folder))
    for got, expected in zip(run(llm), _PLAIN[folder], strict=True):
        assert_same_beams(got, expected, 0.5)
    if "num_blocks" in WAYS[way] and family == "tiny_llama":
        assert llm.core.scheduler.counters.num_preemptions > 0


def test_beams_run_beside_samples_and_change_nothing_for_them(make_llm: MakeLLM, tiny_llama: Path) -> None:
    beams = SamplingParams(use_beam_search=True, n=3, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True, logprobs=2)
    each = [{"prompt_token_ids": p} for p in prompts()[:6]]
    together = make_llm(tiny_llama).generate(each, [beams, drawn] * 3, use_tqdm=False)
    alone = make_llm(tiny_llama)
    for prompt, params, output in zip(each, [beams, drawn] * 3, together, strict=True):
        (expected,) = alone.generate(prompt, params, use_tqdm=False)
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]


def test_text_logprobs_and_reasons_belong_to_the_beam(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    params = SamplingParams(
        use_beam_search=True, n=4, max_tokens=12, ignore_eos=True, stop_token_ids=MANY_ENDS, logprobs=3
    )
    (output,) = llm.generate({"prompt_token_ids": prompts()[5]}, params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert FinishReason.STOP in {c.finish_reason for c in output.outputs}
    for completion in output.outputs:
        ids, logprobs = completion.token_ids, completion.logprobs
        assert logprobs is not None
        stopped = completion.finish_reason is FinishReason.STOP
        assert completion.stop_reason == (ids[-1] if stopped else None)
        assert completion.text == llm.tokenizer.decode(ids[:-1] if stopped else ids)
        # The search's own log-softmax and that of the report round each token's log-probability differently.
        rounding = LOGPROB_ERROR * len(ids)
        total = sum(entry.logprob for entry in logprobs)
        assert completion.cumulative_logprob == pytest.approx(total, rel=0, abs=rounding)
        # Scored as a prompt, the same tokens have the same log-probabilities.
        full = {"prompt_token_ids": output.prompt_token_ids + ids}
        (again,) = llm.generate(full, SamplingParams(max_tokens=1, prompt_logprobs=3), use_tqdm=False)
        for ours, theirs in zip(logprobs, again.prompt_logprobs[-len(ids) :], strict=True):
            assert (ours.rank, [t for t, _ in ours.top]) == (theirs.rank, [t for t, _ in theirs.top])
            assert ours.logprob == pytest.approx(theirs.logprob, rel=0, abs=LOGPROB_ERROR)


def test_the_end_of_sequence_token_ends_a_beam_without_a_stop_reason(
    make_llm: MakeLLM, tiny_llama: Path, model: Any
) -> None:
    llm = make_llm(tiny_llama)
    params = SamplingParams(use_beam_search=True, n=8, max_tokens=40, logit_bias={2: 3.0})
    (output,) = llm.generate({"prompt_token_ids": prompts()[3]}, params, use_tqdm=False)
    ended = [c for c in output.outputs if c.finish_reason is FinishReason.STOP]
    assert ended
    assert all(c.token_ids[-1] == 2 and c.stop_reason is None for c in ended)


@pytest.mark.slow
def test_an_aborted_search_leaves_nothing_behind(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama, block_size=2, num_blocks=128, max_num_batched_tokens=6).core
    for num_steps in range(12):
        params = SamplingParams(use_beam_search=True, best_of=5, n=2, max_tokens=20, ignore_eos=True)
        request = core.inputs.make(prompts()[4], params)
        core.add(request)
        for _ in range(num_steps):
            core.step()
        output = core.abort(request.request_id)
        assert [c.finish_reason for c in output.outputs] == [FinishReason.ABORT] * 2
        core.scheduler.kv.audit()
        assert (core.scheduler.num_running, core.scheduler.kv.pool.num_active) == (0, 0)


def test_a_search_is_counted_once(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    params = SamplingParams(use_beam_search=True, best_of=4, n=2, max_tokens=7, ignore_eos=True)
    llm.generate({"prompt_token_ids": prompts()[2]}, params, use_tqdm=False)
    stats = llm.core.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (5, 14)
    assert stats.time_to_first_token.count == sum(stats.finished.values()) == 1


def test_more_beams_than_run_at_once_are_refused_with_the_numbers(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=4)
    with pytest.raises(CapacityError, match="best_of is 5, but at most 4 sequences run at once"):
        llm.generate("x", SamplingParams(use_beam_search=True, best_of=5))


def test_the_best_of_many_samples_are_those_likeliest_per_token(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    how: dict[str, Any] = {"seed": 3, "max_tokens": 10, "ignore_eos": True, "stop_token_ids": MANY_ENDS}
    prompt = {"prompt_token_ids": prompts()[6]}
    (every,) = llm.generate(prompt, SamplingParams(n=12, logprobs=0, **how), use_tqdm=False)
    (best,) = llm.generate(prompt, SamplingParams(n=3, best_of=12, **how), use_tqdm=False)
    ranked = sorted(scored(every.outputs), key=lambda beam: -beam[1])
    assert_same_beams(scored(best.outputs), ranked[:3])
    assert [(c.index, c.logprobs) for c in best.outputs] == [(0, None), (1, None), (2, None)]


def test_sixty_four_samples_of_one_prompt_share_its_blocks(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, block_size=4, max_num_seqs=64)
    how: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    core = llm.core
    request = core.inputs.make(prompts()[8], SamplingParams(n=64, seed=9, **how))
    core.add(request)
    core.step()
    assert core.scheduler.num_running == 64
    assert core.scheduler.kv.pool.num_active == 8, "32 tokens lie in eight blocks, for all of them"
    outputs = []
    while core.has_work:
        outputs += core.step()
    (output,) = outputs
    for i in (0, 31, 63):
        (alone,) = llm.generate(
            {"prompt_token_ids": prompts()[8]}, SamplingParams(seed=sibling_seed(9, i), **how), use_tqdm=False
        )
        assert output.outputs[i].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"best_of": 1, "n": 2}, "best_of must be at least 2, got 1"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature must be 0 or 1 with use_beam_search, got 0.7"),
        ({"use_beam_search": True, "top_p": 0.9}, "top_p must be 1 with use_beam_search"),
        ({"use_beam_search": True, "stop": "x"}, "use stop_token_ids"),
        ({"use_beam_search": 1}, "use_beam_search must be true or false"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "must be true or false or never, got 'soon'"),
        ({"use_beam_search": True, "length_penalty": 99}, "length_penalty must be between -10.0 and 10.0, got 99"),
        ({"length_penalty": 2.0}, "length_penalty needs use_beam_search"),
        ({"early_stopping": True}, "early_stopping needs use_beam_search"),
    ],
)
def test_what_cannot_be_combined_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)
