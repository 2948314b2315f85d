"""A model split among ranks gives the tokens and logits of one rank, bit for bit, and survives the loss of a rank."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, kernels
from octavo.checkpoint.model_source import resolve_model
from octavo.config import ALLOWED_CPUS
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import RequestOutput
from octavo.errors import ConfigError
from octavo.kvcache.formats import kv_dtype
from octavo.models.kv_scale_file import Origin, write_scales
from octavo.planner.machine import FollowedCores, UsableCores
from octavo.runner.ranks import ANSWER_S, RankGroup
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM, assert_idle, runner_of, swapping_is_cheaper, without_deadlines
from tests.engine.preempting import thrash
from tests.engine.test_same_tokens import workload
from tests.engine.tiny_engine import tiny_model
from tests.models.test_kv_scales import with_scales
from tests.models.tiny import write_hf_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
]

# Little room, so that prompts come in chunks, and sequences are swapped out and find prefixes.
TIGHT: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 13,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
    "preemption_mode": "swap",
    "swap_space": "16MiB",
    "num_threads": 1,
    "dtype": "bfloat16",
}
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 320,
}
AHEAD = {"dtype": "float32", "async_scheduling": True}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "query_pre_attn_scalar": 16}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


def made(folder: Path, **options: Any) -> LLM:
    with swapping_is_cheaper():
        llm = LLM(str(folder), **{**TIGHT, **options})
    thrash(without_deadlines(llm.core))
    return llm


def pids_of(group: RankGroup) -> list[int]:
    return [process.pid for process in group._processes]


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(c.token_ids, [one.logprob for one in c.logprobs or []]) for output in outputs for c in output.outputs]


@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "options"),
    [
        # KV heads 3 over 2 are 1 and 2; 2 over 3 are replicated.
        pytest.param("Llama", 2, {}, {"kv_cache_dtype": "int8"}, id="Llama, uneven, int8"),
        pytest.param("Llama", 3, {"num_key_value_heads": 2}, AHEAD, id="Llama, replicated KV heads"),
        pytest.param("Gemma3", 2, GEMMA, {"quantization": "q8_0", "num_blocks": 25}, id="Gemma 3, quantised"),
        pytest.param("Qwen3Moe", 2, MIXTURE, {"speculative_config": {"method": "ngram"}}, id="a mixture, drafts"),
    ],
)
def test_ranks_give_the_bits_of_one(
    tmp_path: Path, family: str, ranks: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    write_hf_model(tmp_path, family, **{**SIZES, **sizes})
    prompts, params = workload()
    expected = None
    for count in (1, ranks):
        with made(tmp_path, tensor_parallel_size=count, **options) as llm:
            found = [bits(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)]
            assert llm.core.scheduler.counters.num_preemptions > 0
            assert llm.core.scheduler.kv.hierarchy.swapped.blocks_in > 0
            found.append(bits(llm.generate(prompts[:2], SamplingParams(prompt_logprobs=1, max_tokens=1))))
            assert_idle(llm.core)
        assert expected is None or found == expected
        expected = found


def test_smollm2_with_nine_heads_over_two_ranks_gives_the_bits_of_one() -> None:
    prompts: Any = [{"prompt_token_ids": list(range(first, first + 30))} for first in (100, 2000)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    found = []
    for count in (1, 2):
        with made(Path("smollm2"), tensor_parallel_size=count, max_model_len=256) as llm:
            found.append(bits(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]


def test_ranks_keep_a_budget(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Llama", **SIZES)
    prompts: Any = [{"prompt_token_ids": list(range(3, 60))}]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"kv_budget": {"mode": "sinks", "tokens": 48}, "max_num_batched_tokens": 16}
    found = []
    for count in (1, 2):
        with made(tmp_path, tensor_parallel_size=count, **options) as llm:
            found.append(bits(llm.generate(prompts, params, use_tqdm=False)))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LLM]:
    with made(tiny_model(), tensor_parallel_size=2, dtype="float32") as llm:
        yield llm
        assert_idle(llm.core)


def test_embeddings_are_those_of_one_rank(two_ranks: LLM, make_llm: MakeLLM) -> None:
    prompts, _ = workload()
    for pooling in ("last", "mean"):
        here, there = (
            [output.outputs.embedding for output in llm.embed(prompts, pooling=pooling, use_tqdm=False)]
            for llm in (make_llm(tiny_model()), two_ranks)
        )
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize(
    "params",
    [
        {"n": 5, "temperature": 1.0, "seed": 3, "logprobs": 1},
        {"n": 3, "best_of": 5, "use_beam_search": True, "logprobs": 2},
        {"n": 2, "temperature": 0.8, "seed": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"n": 3, "use_beam_search": True, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 0.0, "prompt_logprobs": 2, "min_tokens": 5, "logit_bias": {7: 3.0}},
    ],
    ids=["samples", "beams", "penalised samples", "penalised beams", "scored prompts"],
)
def test_forks_beams_and_scores_are_the_same(two_ranks: LLM, make_llm: MakeLLM, params: dict[str, Any]) -> None:
    rng = random.Random(2)
    prompts: Any = [{"prompt_token_ids": [rng.randrange(3, 320) for _ in range(20)]} for _ in range(6)]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, **params)

    def generated(llm: LLM) -> tuple[Any, list[float]]:
        outputs: list[RequestOutput] = llm.generate(prompts, sampling, use_tqdm=False)
        completions = [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]
        scores = [s.logprob for output in outputs for s in (output.prompt_logprobs or [])[1:] if s is not None]
        return completions, scores

    (ours, our_scores), (theirs, their_scores) = generated(two_ranks), generated(make_llm(tiny_model()))
    assert ours == theirs
    assert our_scores == pytest.approx(their_scores, abs=1e-4)


def test_an_aborted_request_leaves_the_others_their_tokens(two_ranks: LLM, make_llm: MakeLLM) -> None:
    core = two_ranks.core
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    leaving, staying = (
        core.inputs.make(list(range(3, 20)), params),
        core.inputs.make(list(range(30, 50)), params),
    )
    core.add(leaving)
    core.add(staying)
    for _ in range(4):
        core.step()
    core.abort(leaving.request_id)
    while core.has_work:
        core.step()
    expected = make_llm(tiny_model()).generate({"prompt_token_ids": list(range(30, 50))}, params, use_tqdm=False)
    assert staying.sequences[0].output_token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_ends_the_running_requests_and_the_group_restarts(two_ranks: LLM, how: int) -> None:
    core, params = two_ranks.core, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=1)
    prompt = list(range(3, 40))
    expected = bits(two_ranks.generate({"prompt_token_ids": prompt}, params, use_tqdm=False))
    running = core.inputs.make(prompt, params)
    core.add(running)
    for _ in range(5):
        core.step()
    group = runner_of(core)._ranks
    assert group is not None
    os.kill(pids_of(group)[0], how)
    until = time.monotonic() + 30
    while not group.failure and time.monotonic() < until:
        time.sleep(0.01)
    assert group.failure, "the rank has not ended"
    waiting = core.inputs.make(prompt, params)
    core.add(waiting)
    outputs = []
    while core.has_work:
        outputs += core.step()
    ended = [output for output in outputs if output.request_id == running.request_id]
    assert [output.error for output in ended] == ["rank_lost"]
    assert ended[0].error_reason is not None
    assert f"exit code {-how}" in ended[0].error_reason
    assert bits([outputs[-1]]) == expected, "the waiting request is computed by the new group, from nothing"
    core.scheduler.kv.audit()


def test_ranks_end_with_rank_0_however_it_ends_and_leave_no_shared_memory(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_hf_model(folder, "Llama", **SIZES)
    script = (
        "import sys, time; from octavo import LLM; from tests.conftest import runner_of\n"
        f"llm = LLM({str(folder)!r}, tensor_parallel_size=2, num_threads=1, num_blocks=13, dtype='float32')\n"
        "print(*(p.pid for p in runner_of(llm.core)._ranks._processes), flush=True); time.sleep(600)"
    )
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(ranks) == 1
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in ranks):
        assert time.monotonic() < until, "a rank outlives rank 0"
        time.sleep(0.01)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "octavo" in name}


def _state(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return "Z"


def test_a_rank_that_stops_is_given_up(two_ranks: LLM) -> None:
    group = runner_of(two_ranks.core)._ranks
    assert group is not None
    group.native.timeout_seconds = 1.0
    os.kill(pids_of(group)[0], signal.SIGSTOP)
    began = time.monotonic()
    (output,) = two_ranks.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4), use_tqdm=False)
    group.native.timeout_seconds = ANSWER_S
    assert time.monotonic() - began < ANSWER_S
    assert output.error_reason == "rank 1 has not answered rank 0 for 1 s"
    assert two_ranks.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4), use_tqdm=False)


def test_auto_is_a_rank_for_each_numa_node_bound_to_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(ALLOWED_CPUS)
    nodes = [frozenset(cpus[:1]), frozenset(cpus[-1:])]
    for module in ("model_loading", "ranks"):
        monkeypatch.setattr(f"octavo.engine.{module}.numa_nodes", lambda **_: nodes)
    monkeypatch.setattr("octavo.engine.model_loading.usable_cores", lambda _: UsableCores(frozenset({0, 1}), 2, None))
    write_hf_model(tmp_path, "Llama", **SIZES)
    with made(tmp_path, tensor_parallel_size="auto") as llm:
        group = runner_of(llm.core)._ranks
        assert group is not None
        assert [os.sched_getaffinity(pid) for pid in (0, *pids_of(group))] == nodes
    assert os.sched_getaffinity(0) == ALLOWED_CPUS
    with made(tmp_path, tensor_parallel_size="auto", attention_backend="reference") as llm:
        assert runner_of(llm.core)._ranks is None, "that backend is not split"


def test_every_rank_follows_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, quota = [0.0], [2.0]
    read = lambda: UsableCores(frozenset(range(8)), 8, quota[0])  # noqa: E731
    monkeypatch.setattr("octavo.engine.runner_builder.FollowedCores", lambda _: FollowedCores(read, lambda: now[0]))
    monkeypatch.setattr("octavo.engine.ranks.num_cores", lambda _: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_hf_model(tmp_path, "Llama", **SIZES)
    with made(tmp_path, tensor_parallel_size=2, num_threads=None) as llm:
        group = runner_of(llm.core)._ranks
        assert group is not None
        other = Path(f"/proc/{pids_of(group)[0]}/task")

        def threads_after_a_prompt() -> tuple[int, int, int]:
            llm.generate({"prompt_token_ids": list(range(3, 23))}, SamplingParams(max_tokens=2), use_tqdm=False)
            return kernels.num_threads(), group.native.num_threads, len(list(other.iterdir()))

        own, told, before = threads_after_a_prompt()
        assert (own, told) == (1, 1)
        quota[0], now[0] = 6.0, 10.0
        assert threads_after_a_prompt() == (3, 3, before + 2)
        quota[0], now[0] = 4.0, 20.0
        assert threads_after_a_prompt() == (2, 2, before + 2), "the third thread sleeps"


def test_a_rank_that_dies_while_the_engine_is_idle_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.runner.ranks.RESTARTED_AFTER_S", 0.0)
    write_hf_model(tmp_path, "Llama", **SIZES)
    core = made(tmp_path, tensor_parallel_size=2).core
    group = runner_of(core)._ranks
    assert group is not None
    (before,) = pids_of(group)

    async def lose_a_rank() -> None:
        engine = AsyncEngine(core, "tiny")
        await engine.start()
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(60):
            while group.failure or pids_of(group) in ([], [before]):
                await asyncio.sleep(0.01)
        outputs = [output async for output in engine.generate([3, 4, 5], SamplingParams(max_tokens=4))]
        assert outputs[-1].finished
        assert outputs[-1].error is None
        await engine.shutdown(0)

    asyncio.run(lose_a_rank())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 7}, "has only 6 heads"),
        ({"tensor_parallel_size": 4}, "has hidden_size 96, too few for at least 32 outputs in each rank"),
        (
            {"tensor_parallel_size": 2, "kv_disk": "x"},
            "kv_disk, kv_remote and kv_neighbours would store one rank's share",
        ),
        (
            {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "calculate_kv_scales": True},
            "calculate_kv_scales chooses scales in one process only",
        ),
        ({"tensor_parallel_size": 2, "attention_backend": "reference"}, "'reference' runs in one process only"),
    ],
)
def test_what_ranks_do_not_support_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_hf_model(tmp_path, "Llama", **SIZES)
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, **options)


@pytest.mark.parametrize("where", ["checkpoint", "file"])
def test_each_rank_takes_the_scales_of_its_heads(tmp_path: Path, where: str) -> None:
    write_hf_model(folder := tmp_path / "plain", "Llama", **SIZES)
    rng = torch.Generator().manual_seed(1)
    scales = {layer: {side: 0.002 + 0.01 * torch.rand(3, generator=rng) for side in "kv"} for layer in (0, 1)}
    options: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    if where == "checkpoint":
        tensors = {f"model.layers.{n}.self_attn.{side}_scale": scales[n][side] for n in scales for side in "kv"}
        folder = with_scales(folder, tmp_path / "scaled", tensors)
    else:
        (table := tmp_path / "codecs.toml").write_text('keys = ["fp8", "int8"]\nvalues = ["fp8", "int8"]')
        options = {"kv_cache_dtype": str(table), "kv_scales": str(tmp_path / "scales.toml")}
        dtype, source = kv_dtype(str(table), "bfloat16", 2), resolve_model(str(folder))
        write_scales(tmp_path / "scales.toml", source, dtype, {0: scales[0]}, Origin("max", "a text", 9))
    prompts, params = workload()
    found = []
    for count in (1, 2):
        with made(folder, tensor_parallel_size=count, **options) as llm:
            keys = bytes(llm.core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys)
            found.append((keys, bits(llm.generate(prompts, params, use_tqdm=False))))
    assert found[0] == found[1]
