"""A runner in a process of its own gives the tokens that one in the engine's process does, whatever happens."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine import builder, runner_builder
from octavo.engine.core import EngineCore
from octavo.engine.outputs import RequestOutput
from octavo.errors import ConfigError, ExecutorError
from octavo.request import FinishReason
from octavo.runner.executor import Executor
from octavo.runner.process_executor import ProcessExecutor
from octavo.runner.runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.plan_log import read_facts, read_plans
from octavo.tiers.host import SharedFile
from tests.conftest import MakeLLM, assert_idle, without_deadlines
from tests.engine.preempting import thrash
from tests.engine.test_same_tokens import alone, assert_same, workload
from tests.engine.tiny_engine import tiny_model

pytestmark = pytest.mark.integration

BREAKING, POISON = 318, 319

# Little room, so that sequences are swapped out, computed again, forked and moved.
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 60,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
    "preemption_mode": "swap",
    "swap_space": "16MiB",
}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "executor": "process", **TIGHT}
    options |= {"kv_disk": str(tmp_path_factory.mktemp("kv")), "kv_disk_size": "4MiB", "kv_demotion": "all"}
    with LLM(model=str(tiny_model()), **options) as llm:
        thrash(without_deadlines(llm.core))
        yield llm
        assert_idle(llm.core)


def test_embeddings_come_through_the_pipe(apart: LLM, make_llm: MakeLLM) -> None:
    prompts, _ = workload()
    for pooling in ("last", "mean"):
        here, there = (
            [output.outputs.embedding for output in llm.embed(prompts, pooling=pooling, use_tqdm=False)]
            for llm in (make_llm(tiny_model()), apart)
        )
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(here, there, strict=True))


def test_the_engines_stores_read_and_write_the_runners_host_memory(apart: LLM, make_llm: MakeLLM) -> None:
    prompt, params = list(range(3, 44)), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)

    def ask() -> RequestOutput:
        (output,) = apart.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return output

    tiers, deadline = apart.core.tiers, time.monotonic() + 60.0
    cold = ask()
    while tiers._writing:
        assert time.monotonic() < deadline, "it is not written"
        tiers.wait(0.01)
        tiers.poll()
    apart.reset_prefix_cache()
    warm = ask()
    assert warm.cached_by_tier == {"device": 0, "disk": 40}
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    apart.core.scheduler.kv.audit()


def test_swapped_preempted_and_cached_sequences_have_their_tokens(apart: LLM, make_llm: MakeLLM) -> None:
    prompts, params = workload()
    expected = alone(make_llm, tiny_model())
    for _ in range(2):
        assert_same(apart.generate(prompts, params, use_tqdm=False), expected)
    # In the first round. How many are preempted in the second depends on which have to wait for the disk.
    assert apart.core.scheduler.counters.num_preemptions > 0
    assert apart.core.scheduler.kv.hierarchy.host.swapped.blocks_in > 0


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
def test_forks_beams_penalties_and_scores_are_the_same(apart: LLM, make_llm: MakeLLM, params: dict[str, Any]) -> None:
    rng = random.Random(2)
    prompts: Any = [{"prompt_token_ids": [rng.randrange(3, 320) for _ in range(20)]} for _ in range(6)]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, **params)

    def generated(llm: LLM) -> tuple[Any, list[float]]:
        outputs: list[RequestOutput] = llm.generate(prompts, sampling, use_tqdm=False)
        completions = [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]
        scores = [s.logprob for output in outputs for s in (output.prompt_logprobs or [])[1:] if s is not None]
        return completions, scores

    (ours, our_scores), (theirs, their_scores) = generated(apart), generated(make_llm(tiny_model()))
    assert ours == theirs
    assert our_scores == pytest.approx(their_scores, abs=1e-4)


def test_an_aborted_request_leaves_the_others_their_tokens(apart: LLM, make_llm: MakeLLM) -> None:
    core = apart.core
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    leaving, staying = core.make_request(list(range(3, 20)), params), core.make_request(list(range(30, 50)), params)
    core.add(leaving)
    core.add(staying)
    for _ in range(4):
        core.step()
    core.abort(leaving.request_id)
    while core.has_work:
        core.step()
    expected = make_llm(tiny_model()).generate({"prompt_token_ids": list(range(30, 50))}, params, use_tqdm=False)
    assert staying.sequences[0].output_token_ids == expected[0].outputs[0].token_ids


class _Breaking(Executor):
    """Fails where a step computes `BREAKING`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        if BREAKING in plan.token_ids:
            raise RuntimeError("the step is broken")
        return self._runner.execute(plan)


@cache
def _ailing_options() -> EngineConfig:
    return EngineConfig(model=str(tiny_model()), dtype="float32", num_blocks=100, num_threads=1, executor="process")


def build_ailing_runner(
    config: EngineConfig, *_: SharedFile | bool | None
) -> tuple[Executor, runner_builder.RunnerFacts]:
    runner, facts = runner_builder.build_runner(config)
    runner.model._embedding[POISON] = float("nan")  # type: ignore[attr-defined]
    return _Breaking(runner), facts


def first_error_of(core: EngineCore) -> Exception | None:
    try:
        for _ in range(20):
            core.step()
    except Exception as error:
        return error
    return None


def test_failures_in_the_process_end_who_causes_them_and_its_death_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, make_llm: MakeLLM
) -> None:
    expected = make_llm(tiny_model()).generate(
        {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=12, seed=1, ignore_eos=True), use_tqdm=False
    )
    monkeypatch.setattr(builder, "_build_runner_apart", build_ailing_runner)
    core = builder.build_engine(_ailing_options())
    assert isinstance(core.runner, ProcessExecutor)
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    sound, unusable = core.make_request([5, 6, 7], params), core.make_request([8, POISON], params)
    core.add(sound)
    core.step()
    core.add(unusable)
    while core.has_work:
        core.step()
    assert unusable.sequences[0].finish_reason is FinishReason.ERROR
    assert sound.sequences[0].output_token_ids == expected[0].outputs[0].token_ids
    core.scheduler.kv.audit()

    assert core.runner.pid is not None
    core.runner._process.kill()
    core.add(core.make_request([5, 6, 7], params))
    died = first_error_of(core)
    assert isinstance(died, ExecutorError) or isinstance(died.__cause__, ExecutorError)
    core.close()
    core.scheduler.kv.audit()


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one by one", "planned ahead"])
def test_plans_are_recorded_with_their_seconds(tmp_path: Path, is_ahead: bool) -> None:
    path = tmp_path / "plans"
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 100, "num_threads": 1, "record_plans": str(path)}
    with LLM(model=str(tiny_model()), async_scheduling=is_ahead, **options) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5] * 20}, {"prompt_token_ids": [6] * 3}], params, use_tqdm=False)
    steps = list(read_plans(path))
    assert [step.lengths for step in steps][:2] == [(20, 3), (1, 1)]
    assert [sum(step.starts) + step.num_tokens for step in steps] == [23, 25, 27, 29, 31]
    assert all(step.seconds > 0 for step in steps)
    ends = [step.at + step.seconds for step in steps]
    assert all(step.at >= end for step, end in zip(steps[1:], ends, strict=False)), "no moment counts twice"
    assert read_facts(path)["block_size"] == 16


def test_a_model_that_is_not_there_is_reported_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        builder.build_engine(_ailing_options().replace(max_model_len=10**9))
