"""The way of a step on a GPU, from end to end: on a GPU where there is one, else by Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine.sizes import _available_on_gpu
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.runner.swapping import make_link
from octavo.storage.arena import BlockLayout
from octavo.structured_outputs import StructuredOutputsParams
from tests.attention.triton_device import DEVICE, ON_GPU, needs_triton
from tests.conftest import MakeLLM, runner_of
from tests.engine.preempting import thrash

pytestmark = needs_triton

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Qwen 3 of one layer, which normalises its heads, and the same as transformers has it."""
    from tests.models.tiny import write_hf_model

    folder = tmp_path_factory.mktemp("small")
    options: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
    return folder, write_hf_model(folder, "Qwen3", tokenizer=True, **options)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral of one layer, with a sliding window of nine tokens."""
    from tests.models.tiny import write_hf_model

    folder = tmp_path_factory.mktemp("windowed")
    options: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
    write_hf_model(folder, "Mistral", tokenizer=True, sliding_window=9, **options)
    return folder


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(i * 31 + j * 7) % 300 for j in range(n)]} for i, n in enumerate(lengths)]


def tokens(llm: LLM, given: Any, params: Any = GREEDY) -> list[list[list[int]]]:
    return [[list(out.token_ids) for out in result.outputs] for result in llm.generate(given, params, use_tqdm=False)]


def by_transformers(model: Any, prompt: dict[str, list[int]], count: int) -> list[int]:
    ids = torch.tensor([prompt["prompt_token_ids"]])
    # With a mask, since it takes tokens equal to the padding's for padding.
    options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return generated[0, ids.shape[1] :].tolist()


@pytest.mark.slow
def test_the_kernels_generate_what_transformers_does(make_llm: MakeLLM, small: tuple[Path, Any]) -> None:
    folder, model = small
    llm = make_llm(folder, device=DEVICE, attention_backend="triton", max_num_batched_tokens=20)
    runner = runner_of(llm.core)
    assert (runner.attention.name, runner.arena.layout) == ("triton", BlockLayout.TOKENS)
    given = prompts(5, 33)
    assert tokens(llm, given) == [[by_transformers(model, prompt, 4)] for prompt in given]


@pytest.mark.slow
def test_the_kernels_see_a_sliding_window(make_llm: MakeLLM, windowed: Path) -> None:
    (prompt,) = prompts(21)
    llm = make_llm(windowed, device=DEVICE, attention_backend="triton")
    reference = make_llm(windowed, attention_backend="reference")
    assert tokens(llm, prompt) == tokens(reference, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["k8v4", "fp8_e4m3"])
def test_the_kernels_write_and_read_quantised_caches(make_llm: MakeLLM, small: tuple[Path, Any], codec: str) -> None:
    from octavo.attention.triton.backend import TritonAttention

    folder, _ = small
    given, options = prompts(5, 33), {"kv_cache_dtype": codec, "max_num_batched_tokens": 20}
    llm = make_llm(folder, device=DEVICE, attention_backend="triton", **options)
    assert all(map(TritonAttention.reads, runner_of(llm.core).arena.layers))
    assert tokens(llm, given) == tokens(make_llm(folder, attention_backend="reference", **options), given)


@pytest.mark.slow
def test_tokens_and_structured_outputs_are_drawn_on_the_device(make_llm: MakeLLM, small: tuple[Path, Any]) -> None:
    from octavo.sampling.sampler import Sampler
    from octavo.sampling.triton_choice import TritonChoice

    folder, _ = small
    params = [
        SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=1.0, top_k=20, presence_penalty=1.0, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
    ]
    if importlib.util.find_spec("llguidance") is not None:  # a GPU machine may lack it
        grammar = StructuredOutputsParams(regex="[a-c]{4,9}")
        params.append(SamplingParams(max_tokens=8, temperature=1.0, seed=3, structured_outputs=grammar))
    given = prompts(5, 6, 7, 8)[: len(params)]
    expected = tokens(make_llm(folder, attention_backend="reference"), given, params)
    llm = make_llm(folder, device=DEVICE, attention_backend="reference")
    runner_of(llm.core)._sampler = Sampler(TritonChoice())
    assert tokens(llm, given, params) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_cached_forked_and_preempted_sequences_get_the_same_tokens(
    make_llm: MakeLLM, small: tuple[Path, Any], mode: str
) -> None:
    folder, _ = small
    given = [*prompts(15, 14), prompts(15)[0]]
    params = [GREEDY, GREEDY, SamplingParams(n=2, max_tokens=3, temperature=1, seed=5, ignore_eos=True)]
    roomy = make_llm(folder, attention_backend="reference")
    expected = tokens(roomy, given, params)
    llm = make_llm(
        folder, device=DEVICE, attention_backend="triton", preemption_mode=mode, num_blocks=5, block_size=16,
        kv_cache_memory=None, max_model_len=64,
    )  # fmt: skip
    thrash(llm.core)
    assert tokens(llm, given, params) == expected
    assert llm.core.scheduler.counters.num_preemptions > 0
    # Prompt and output of before, found in the cache.
    again = {"prompt_token_ids": given[0]["prompt_token_ids"] + expected[0][0] + [9]}
    llm.generate(again, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    (result,) = llm.generate(again, GREEDY, use_tqdm=False)
    assert result.num_cached_tokens == 16
    assert [list(result.outputs[0].token_ids)] == tokens(roomy, again)[0]


def test_deterministic_is_refused_where_products_depend_on_the_batch(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="deterministic cannot be guaranteed on device 'cuda'"):
        make_llm(tiny_llama, device="cuda", deterministic=True)


@pytest.mark.parametrize(("share", "expected"), [(1.0, 60), (0.9, 52), (0.25, 0)])
def test_the_share_of_a_gpus_memory_counts_what_others_have_taken(
    monkeypatch: pytest.MonkeyPatch, share: float, expected: int
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (60 << 30, 80 << 30))
    config = EngineConfig(gpu_memory_utilization=share)
    assert _available_on_gpu(config, torch.device("cuda")) == expected << 30


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_recorded_steps_give_the_tokens_of_launched_ones(make_llm: MakeLLM, small: tuple[Path, Any]) -> None:
    folder, _ = small
    given = prompts(5, 33, 80, 7, 100)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    eager = make_llm(folder, device="cuda", enforce_eager=True)
    assert tokens(make_llm(folder, device="cuda"), given, params) == tokens(eager, given, params)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_rows_cross_on_a_stream_of_their_own_as_they_were_when_they_left() -> None:
    link = make_link(torch.device("cuda"))
    given = torch.randint(0, 256, (64, 1 << 16), dtype=torch.uint8)
    slow = torch.randn(4096, 4096, device="cuda")
    arena = given.cuda()
    for _ in range(20):
        slow = (slow @ slow).clamp(-1, 1)  # the computing stream is busy, so that nothing has arrived by itself
    rows = arena.clone()
    ready = link.ready(rows)
    arena.zero_()  # overwritten as soon as it is copied aside
    assert torch.equal(link.to_host(rows, ready), given)
    slow = (slow @ slow).clamp(-1, 1)
    back = link.to_device(list(given))
    assert isinstance(back, torch.Tensor)
    given.zero_()  # the host's rows are free once the call returns
    assert not torch.equal(back.cpu(), given)
    assert torch.equal(back.cpu(), rows.cpu())
