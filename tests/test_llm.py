"""`LLM`: what a Python caller can ask for, what comes back, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.engine.outputs import RequestOutput
from octavo.errors import CapacityError, ConfigError, ContextLengthError, RequestError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM, assert_idle, runner_of
from tests.engine.preempting import thrash
from tests.models.tiny import make_model, write_gguf

VOCAB = 320
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
IDS = {"prompt_token_ids": [5, 6, 7, 8]}
MESSAGES = [{"role": "user", "content": "who holds the block?"}]


@pytest.fixture
def llm(make_llm: MakeLLM, tiny_llama: Path) -> LLM:
    return make_llm(tiny_llama)


def generate(llm: LLM, prompt: Any = IDS, **params: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}), use_tqdm=False)
    return output


def free_run(llm: LLM, length: int = 40) -> list[int]:
    """What the model says after `IDS` when nothing stops it."""
    return generate(llm, max_tokens=length, ignore_eos=True).outputs[0].token_ids


def interrupt_after(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int, error: BaseException) -> None:
    """Let the runner raise in the step after `steps` more."""
    execute: Callable[..., Any] = llm.core.runner.execute
    left = steps

    def interrupted(plan: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise error
        return execute(plan)

    monkeypatch.setattr(llm.core.runner, "execute", interrupted)


@pytest.mark.parametrize(("stored", "dtype"), [("Q8_0", torch.bfloat16), ("F16", torch.float32)])
def test_a_cpu_without_bf16_computes_in_float32_unless_weights_stay_quantised(
    stored: str, dtype: torch.dtype, make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_model("Llama", hidden_size=64, intermediate_size=64), quantization=stored)
    llm = make_llm(path, dtype="auto")
    assert runner_of(llm.core).model.dtype is dtype


def test_outputs_come_in_the_order_of_the_prompts_whichever_ends_first(llm: LLM) -> None:
    lengths = [20, 3, 11, 1, 7]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = ["a block", {"prompt": "a table"}, IDS, {"prompt_token_ids": [9]}, "the queue"]
    outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == ["a block", "a table", None, None, "the queue"]
    assert [output.prompt_token_ids for output in outputs] == [
        llm.tokenizer.encode("a block"),
        llm.tokenizer.encode("a table"),
        [5, 6, 7, 8],
        [9],
        llm.tokenizer.encode("the queue"),
    ]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_a_single_prompt_and_none_at_all(llm: LLM) -> None:
    assert len(llm.generate("a block", GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert len(llm.generate("a block", use_tqdm=False)[0].outputs[0].token_ids) <= 16, "the default is 16 tokens"


def test_text_is_the_tokens_decoded(llm: LLM) -> None:
    output = generate(llm, "the scheduler takes", max_tokens=30, ignore_eos=True)
    whole = llm.tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
    assert whole == llm.tokenizer.decode(output.prompt_token_ids) + output.outputs[0].text
    silent = generate(llm, "the scheduler takes", max_tokens=30, ignore_eos=True, detokenize=False)
    assert (silent.outputs[0].text, silent.outputs[0].token_ids) == ("", output.outputs[0].token_ids)


def test_the_second_asking_is_answered_from_the_cache_until_it_is_reset(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(3, 60))}
    assert [generate(llm, prompt).num_cached_tokens for _ in range(2)] == [0, 48]
    assert generate(llm, {**prompt, "cache_salt": "another tenant"}).num_cached_tokens == 0
    assert llm.reset_prefix_cache() > 0
    assert generate(llm, prompt).num_cached_tokens == 0


def test_the_progress_bar_is_shown_unless_it_is_not_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(IDS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(IDS, GREEDY)
    assert "Completions: 100%" in capsys.readouterr().err


def test_requests_without_a_seed_differ_and_an_engines_seed_repeats_them(make_llm: MakeLLM, tiny_llama: Path) -> None:
    def draw(seed: int | None) -> list[list[int]]:
        llm = make_llm(tiny_llama, seed=seed)
        return [generate(llm, temperature=1.0, ignore_eos=True).outputs[0].token_ids for _ in range(2)]

    assert draw(0) == draw(0)
    assert len({tuple(tokens) for tokens in draw(0) + draw(1) + draw(None) + draw(None)}) == 8


def test_end_of_sequence_ends_it_unless_ignored(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    tokens = free_run(llm)
    end = next(t for t in tokens[4:] if t not in tokens[:4])
    at = tokens.index(end)
    llm.core.inputs.eos_token_ids = frozenset({end})
    ended = generate(llm, max_tokens=40).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[: at + 1], "stop", None)
    # Its text is not part of the text.
    before = generate(llm, max_tokens=at, ignore_eos=True).outputs[0]
    assert ended.text == before.text
    assert generate(llm, max_tokens=40, ignore_eos=True).outputs[0].token_ids == tokens


def test_a_stop_token_ends_it_and_is_named(llm: LLM) -> None:
    tokens = free_run(llm)
    stop = next(t for t in tokens[3:] if t not in tokens[:3])
    ended = generate(llm, stop_token_ids=[stop], max_tokens=40, ignore_eos=True).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (
        tokens[: tokens.index(stop) + 1],
        "stop",
        stop,
    )


def test_a_stop_string_ends_it_and_is_cut_off(llm: LLM) -> None:
    text = generate(llm, max_tokens=40, ignore_eos=True).outputs[0].text
    stop = text[9:13]
    ended = generate(llm, stop=["no such string", stop], max_tokens=40, ignore_eos=True).outputs[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert len(ended.token_ids) < 40, "it went on computing"


def test_min_tokens_puts_off_every_end(llm: LLM) -> None:
    tokens = free_run(llm)
    llm.core.inputs.eos_token_ids = frozenset({tokens[2]})
    ended = generate(llm, min_tokens=10, stop_token_ids=[tokens[4]], max_tokens=40).outputs[0]
    assert len(ended.token_ids) > 10
    assert not {tokens[2], tokens[4]} & set(ended.token_ids[:10]), "an end may not even be drawn"


def test_without_max_tokens_it_goes_on_to_the_end_of_the_context(llm: LLM) -> None:
    output = generate(llm, max_tokens=None, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == llm.info.max_model_len - 4 == 252
    assert output.outputs[0].finish_reason == "length"


def test_a_bias_forbids_and_forces_tokens(llm: LLM) -> None:
    tokens = free_run(llm, 6)
    assert tokens[0] not in generate(llm, logit_bias={tokens[0]: -100.0}).outputs[0].token_ids
    assert set(generate(llm, logit_bias={77: 100.0}).outputs[0].token_ids) == {77}


def transformers_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab], by transformers: row i scores token i + 1."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def assert_logprobs(ours: Any, token_ids: list[int], rows: torch.Tensor, num_top: int) -> None:
    assert len(ours) == len(token_ids)
    for entry, token, row in zip(ours, token_ids, rows, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        top = row.topk(num_top)
        assert [i for i, _ in entry.top] == top.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_logprobs_are_those_of_transformers_whatever_the_temperature(llm: LLM, tiny_llama: Path) -> None:
    output = generate(llm, max_tokens=20, temperature=1.3, top_k=9, seed=4, ignore_eos=True, logprobs=3)
    (completion,) = output.outputs
    rows = transformers_logprobs(tiny_llama, output.prompt_token_ids + completion.token_ids)[3:-1]
    assert_logprobs(completion.logprobs, completion.token_ids, rows, 3)
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in completion.logprobs or ()))
    assert generate(llm).outputs[0].logprobs is None


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"block_size": 4, "max_num_batched_tokens": 16}]
)
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_those_of_transformers(
    make_llm: MakeLLM, tiny_llama: Path, options: dict[str, Any], warm: bool
) -> None:
    llm = make_llm(tiny_llama, **options)
    prompt = [(i * 37) % 300 + 3 for i in range(45)]
    if warm:
        generate(llm, {"prompt_token_ids": prompt})
    output = generate(llm, {"prompt_token_ids": prompt}, prompt_logprobs=2, n=2)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert_logprobs(output.prompt_logprobs[1:], prompt[1:], transformers_logprobs(tiny_llama, prompt)[:-1], 2)
    assert generate(llm).prompt_logprobs is None


def test_prompt_logprobs_survive_preemption_in_the_middle_of_the_prompt(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, block_size=4, num_blocks=20, max_num_batched_tokens=8)
    prompts = [[(i * k) % 300 + 3 for i in range(40)] for k in (37, 41)]
    core = llm.core
    thrash(core)
    first, second = (
        core.inputs.make(p, SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True))
        for p in prompts
    )
    core.add(second)
    for _ in range(3):
        core.step()
    first.priority = -1
    core.add(first)
    outputs = {}  # type: ignore[var-annotated]
    while core.has_work:
        outputs |= {output.request_id: output for output in core.step()}
    assert second.sequences[0].num_preemptions + first.sequences[0].num_preemptions > 0
    for request, prompt in zip((first, second), prompts, strict=True):
        scored = outputs[request.request_id].prompt_logprobs
        assert scored is not None
        assert_logprobs(scored[1:], prompt[1:], transformers_logprobs(tiny_llama, prompt)[:-1], 0)


def test_a_prompt_of_one_token_has_no_scored_token(llm: LLM) -> None:
    assert generate(llm, {"prompt_token_ids": [9]}, prompt_logprobs=1).prompt_logprobs == [None]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ({"prompt_token_ids": []}, {}, RequestError, "prompt must not be empty"),
        ("", {}, RequestError, "prompt must not be empty"),
        (
            {"prompt_token_ids": [3, VOCAB]},
            {},
            RequestError,
            "prompt must contain token ids from 0 to 319, got 320",
        ),
        ({"prompt_token_ids": [3, -1]}, {}, RequestError, "prompt must contain token ids from 0 to 319, got -1"),
        ({"prompt_token_ids": [3, "4"]}, {}, RequestError, "prompt must contain token ids from 0 to 319, got '4'"),
        (IDS, {"stop_token_ids": [999]}, RequestError, "stop_token_ids must contain token ids from 0 to 319, got 999"),
        (IDS, {"logit_bias": {321: 1.0}}, RequestError, "logit_bias must contain token ids from 0 to 319, got 321"),
        (IDS, {"max_tokens": 253}, ContextLengthError, "256 tokens, but 257 were requested: 4 in the prompt and 253"),
        ({"prompt_token_ids": [3] * 256}, {"max_tokens": None}, ContextLengthError, "the prompt alone has 256"),
        (IDS, {"n": 9}, CapacityError, "n is 9, but at most 8 sequences run at once"),
        (
            {"prompt_token_ids": [3] * 100},
            {"max_tokens": 100},
            CapacityError,
            "100 prompt tokens and 100 output tokens need 13 KV blocks of 16 tokens, but the cache has 11 in all",
        ),
        ({}, {}, RequestError, "needs either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "a", **IDS}, {}, RequestError, "needs either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "a", "salt": "b"}, {}, RequestError, "unknown key 'salt'"),
        ({"prompt": [5]}, {}, RequestError, r"prompt must be a string, got \[5\]"),
        ({"prompt_token_ids": "567"}, {}, RequestError, "prompt_token_ids must be a list of integers, got '567'"),
        ({"prompt_token_ids": 5}, {}, RequestError, "prompt_token_ids must be a list of integers, got 5"),
        ([[5, 6]], {}, RequestError, r"prompt must be a string or a dictionary, got \[5, 6\]"),
        ({**IDS, "priority": "high"}, {}, RequestError, "priority must be an integer, got 'high'"),
        ({**IDS, "cache_salt": 7}, {}, RequestError, "cache_salt must be a string, got 7"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    make_llm: MakeLLM, tiny_llama: Path, prompt: Any, params: dict[str, Any], error: type[Exception], message: str
) -> None:
    llm = make_llm(tiny_llama, num_blocks=12, max_num_seqs=8)
    with pytest.raises(error, match=message):
        generate(llm, prompt, **params)
    assert_idle(llm.core)


def test_the_largest_request_that_fits_is_served(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, num_blocks=12)
    # 11 blocks of 16; the last token's key and value are never needed.
    output = generate(llm, {"prompt_token_ids": [3] * 100}, max_tokens=77, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 77
    with pytest.raises(CapacityError):
        generate(llm, {"prompt_token_ids": [3] * 100}, max_tokens=78)


def test_among_many_prompts_the_faulty_one_is_named_and_none_is_queued(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"^prompt 2: prompt must contain token ids from 0 to 319, got 400"
    ) as caught:
        llm.generate(["a", "b", {"prompt_token_ids": [400]}, "c"], GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"^prompt 1: unknown key 'salt'"):
        llm.generate(["a", {"prompt": "b", "salt": "c"}], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^prompt 1: "):
        llm.chat([MESSAGES, []], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert_idle(llm.core)


def test_an_unknown_option_is_named_with_the_nearest(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_seqs'; did you mean max_num_seqs"):
        LLM(str(tiny_llama), max_seqs=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "max_model_len is 257, but .* supports at most 256 tokens"),
        ({"kv_cache_memory": 1000}, "raise kv_cache_memory or lower block_size"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
    ],
)
def test_options_that_contradict_the_model_are_refused(
    make_llm: MakeLLM, tiny_llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(tiny_llama, **options)


def test_chat_renders_the_template_and_answers(llm: LLM) -> None:
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nwho holds the block?<|im_end|>\n<|im_start|>assistant\n"
    plain = generate(llm, output.prompt, ignore_eos=True)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    several = llm.chat([MESSAGES, MESSAGES + MESSAGES], GREEDY, use_tqdm=False)
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(several[1].prompt_token_ids) > len(several[0].prompt_token_ids)


def test_a_closed_llm_says_so(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    stream = llm.stream_chat(MESSAGES, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert all(delta.finished for delta in stream)
    for use in (
        lambda: llm.generate(IDS, use_tqdm=False),
        lambda: llm.chat(MESSAGES, use_tqdm=False),
        lambda: next(llm.stream_chat(MESSAGES)),
        lambda: llm.embed(IDS, use_tqdm=False),
        lambda: llm.pin_prefix(IDS, 10),
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use()


def test_a_streamed_answer_adds_up_to_the_whole_one(llm: LLM) -> None:
    (whole,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    deltas = list(llm.stream_chat(MESSAGES, GREEDY))
    assert [t for delta in deltas for t in delta.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_an_abandoned_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream_chat(MESSAGES, GREEDY)
    next(stream)
    assert llm.core.scheduler.kv.usage > 0
    stream.close()
    assert_idle(llm.core)
    for _ in llm.stream_chat(MESSAGES, GREEDY):
        break
    assert_idle(llm.core)
    llm.stream_chat(MESSAGES, GREEDY)  # never begun
    assert_idle(llm.core)


def test_streams_and_calls_may_overlap_and_each_gets_its_own(llm: LLM) -> None:
    other = [{"role": "user", "content": "and who waits?"}]
    expected = [llm.chat(m, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for m in (MESSAGES, other)]
    alone = generate(llm, ignore_eos=True).outputs[0].token_ids
    first, second = llm.stream_chat(MESSAGES, GREEDY), llm.stream_chat(other, GREEDY)
    got: list[list[int]] = [[], []]
    for _ in range(4):
        got[0] += next(first).outputs[0].token_ids
        got[1] += next(second).outputs[0].token_ids
    assert generate(llm, ignore_eos=True).outputs[0].token_ids == alone
    for tokens, stream in zip(got, (first, second), strict=True):
        tokens += [t for delta in stream for t in delta.outputs[0].token_ids]
    assert got == expected


def test_a_conversation_without_messages_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.chat([], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("steps", [0, 3])
def test_ctrl_c_frees_every_block(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    expected = generate(llm, n=3, ignore_eos=True)
    interrupt_after(llm, monkeypatch, steps, KeyboardInterrupt())
    params = [GREEDY, SamplingParams(n=3, max_tokens=9, ignore_eos=True)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([IDS, "a block"], params, use_tqdm=False)
    assert_idle(llm.core)
    again = generate(llm, n=3, ignore_eos=True)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in expected.outputs], "it goes on serving"


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_that_fails_once_changes_no_output(llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    prompts: list[Any] = [IDS, "a block"]
    params = [GREEDY, SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=7)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    interrupt_after(llm, monkeypatch, steps, RuntimeError("out of memory"))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[c.token_ids for c in o.outputs] for o in expected]
    assert_idle(llm.core)


def test_ctrl_c_ends_open_streams_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream_chat(MESSAGES, GREEDY)
    next(stream)
    interrupt_after(llm, monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert_idle(llm.core)
    assert [delta.outputs[0].finish_reason for delta in stream] == [None, None, "abort"]


def test_leaving_the_with_block_ends_what_was_open(make_llm: MakeLLM, tiny_llama: Path) -> None:
    with make_llm(tiny_llama) as llm:
        llm.core.add(llm.core.inputs.make([5, 6, 7], GREEDY))
        llm.core.step()
    assert_idle(llm.core)


def test_the_package_offers_llm_by_its_name() -> None:
    assert octavo.LLM is LLM
    assert {"LLM", "SamplingParams", "RequestOutput"} <= set(octavo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        octavo.nothing  # noqa: B018
