"""Sequences with a budget of keys and values: what they hold, what they compute, and what is refused."""

from __future__ import annotations

import atexit
import random
import shutil
import statistics
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.inspection import budget_fields
from octavo.errors import ConfigError, RequestError
from octavo.kv_budget import KVBudget
from octavo.planner.calculator import SequenceCost
from octavo.request import GAP, RequestContext
from octavo.runner.batch import BatchBuilder, StepBatch
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan
from tests.conftest import assert_idle
from tests.engine.preempting import thrash
from tests.engine.tiny_engine import MAX_MODEL_LEN, VOCAB_SIZE, tiny_core
from tests.models.tiny import write_hf_model

BUDGET = 64
EVICTING = ("sinks", "bounded")
MODES = pytest.mark.parametrize("mode", [*EVICTING, "groups", "sparse_read", "entropy"])
# By entropy: a bounded budget in groups of layers, and sparse reads.
ENTROPIES = {"groups": [0.2, 0.8, 0.3, 0.5], "entropy": [0.8, 0.3]}
_RANDOM = random.Random(1)
PROMPTS = [[_RANDOM.randrange(3, VOCAB_SIZE - 1) for _ in range(length)] for length in (150, 40, 60)]


def params(tokens: int | None = BUDGET, mode: str = "sinks", **more: Any) -> SamplingParams:
    budget: Any = (
        None
        if tokens is None
        else {"mode": {"entropy": "sparse_read", "groups": "bounded"}.get(mode, mode), "tokens": tokens}
    )
    return SamplingParams(**{"max_tokens": 120, "temperature": 0, "ignore_eos": True, **more}, kv_budget=budget)


@cache
def deep_model() -> str:
    """A model with two layers besides the first two, which read everything."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-deep-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_hf_model(folder, "Llama", tokenizer=True, max_position_embeddings=MAX_MODEL_LEN, num_hidden_layers=4)
    return str(folder)


def of_mode(mode: str, **options: Any) -> dict[str, Any]:
    """Options of an engine whose requests may have budgets of a mode; without one, they have everything."""
    if mode in EVICTING:
        return options
    budget: dict[str, Any] = {"mode": "bounded" if mode == "groups" else "sparse_read", "tokens": MAX_MODEL_LEN}
    if mode in ENTROPIES:
        budget["layers"] = ENTROPIES[mode]
    return {"model": deep_model(), "kv_budget": budget, **options}


def generate(core: EngineCore, sampling: SamplingParams) -> tuple[list[list[list[int]]], int]:
    """The output of each prompt's sequences, and the most blocks that were held at once."""
    requests = [core.inputs.make(prompt, sampling) for prompt in PROMPTS]
    for request in requests:
        core.scheduler.add(request)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.scheduler.kv.pool.num_active)
    assert_idle(core)
    assert not core.stats.num_failed_steps
    return [[list(seq.output_token_ids) for seq in request.sequences] for request in requests], most


def outputs(sampling: SamplingParams, mode: str = "sinks", **options: Any) -> tuple[list[list[list[int]]], int]:
    with tiny_core(deterministic=True, **of_mode(mode, **options)) as core:
        if options.get("preemption_mode"):
            thrash(core)
        found = generate(core, sampling)
        assert generate(core, sampling)[0] == found[0]  # with what the first left in the cache
        assert bool(options.get("preemption_mode")) == bool(core.scheduler.counters.num_preemptions)
        return found


@cache
def expected_of(mode: str) -> tuple[list[list[list[int]]], int]:
    """What an engine without further options gives under a budget of a mode."""
    return outputs(params(BUDGET, mode), mode)


@MODES
def test_a_budget_that_is_never_exceeded_changes_no_token(mode: str) -> None:
    dense = {} if mode in EVICTING else {"model": deep_model()}
    assert outputs(params(800, mode), mode)[0] == outputs(params(None), **dense)[0]


def test_a_model_of_two_layers_reads_everything_under_a_budget_of_sparse_reads() -> None:
    with tiny_core(kv_budget={"mode": "sparse_read", "tokens": BUDGET}) as core:
        found = generate(core, params(BUDGET, "sparse_read"))[0]
    assert found == outputs(params(None))[0]


@pytest.mark.slow
@MODES
def test_a_budget_gives_the_same_tokens_cold_cached_in_chunks_and_preempted(mode: str) -> None:
    sampling = params(BUDGET, mode)
    expected, most = expected_of(mode)
    assert expected != outputs(params(None), mode)[0]
    chunked, most_in_chunks = outputs(sampling, mode, max_num_batched_tokens=32)
    assert chunked == expected
    if mode == "sinks":
        # Sinks, a window with a partial block at either end, and the tokens of the step in flight.
        assert most <= 3 * (BUDGET // 16 + 1) + sum(map(len, PROMPTS)) // 16
        assert most_in_chunks <= 3 * (BUDGET // 16 + 1) + 2
    if mode in ("bounded", "groups"):  # prompts, until they are computed
        num_tables = 4 if mode == "groups" else 1
        assert max(most, most_in_chunks) <= num_tables * sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    for preemption_mode in ("swap", "recompute"):
        num_blocks = {"sinks": 11, "bounded": 13, "groups": 49}.get(mode, 30)  # the four groups have as many tables
        tight = {"num_blocks": num_blocks, "max_num_batched_tokens": 32}
        assert outputs(sampling, mode, **tight, preemption_mode=preemption_mode)[0] == expected
    with tiny_core(**of_mode(mode, attention_backend="reference")) as core:
        assert generate(core, sampling)[0] == expected


@pytest.mark.slow
@MODES
def test_a_budget_gives_the_same_tokens_restored_from_the_disk_after_a_restart(mode: str, tmp_path: Path) -> None:
    sampling = params(BUDGET, mode)
    expected = expected_of(mode)[0]
    disk: dict[str, Any] = {"kv_disk": str(tmp_path), "kv_disk_size": "4MiB", "kv_demotion": "all"}
    for loaded in (False, True):
        with tiny_core(deterministic=True, **of_mode(mode, **disk)) as core:
            requests = [core.inputs.make(prompt, sampling) for prompt in PROMPTS]
            for request in requests:
                core.scheduler.add(request)
            while core.has_work:
                core.step()
            core.close()
        assert [[list(seq.output_token_ids) for seq in request.sequences] for request in requests] == expected
        assert bool(sum(request.cached_by_tier.get("disk", 0) for request in requests)) == loaded


@pytest.mark.slow
@pytest.mark.parametrize("mode", EVICTING)
@pytest.mark.parametrize("kept", ["int8", "Gemma3"])
def test_codecs_and_models_with_sliding_windows_have_budgets_as_others_do(mode: str, kept: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": kept}
    if kept == "Gemma3":
        layers = ["sliding_attention", "full_attention"]
        shape: dict[str, Any] = {
            "layer_types": layers,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        }
        write_hf_model(tmp_path, kept, tokenizer=True, max_position_embeddings=MAX_MODEL_LEN, **shape)
        options = {"model": str(tmp_path)}
    expected = outputs(params(BUDGET, mode), mode, **options)[0]
    dense = outputs(params(None), mode, **options)[0]
    assert expected != dense
    assert outputs(params(BUDGET, mode), mode, max_num_batched_tokens=32, **options)[0] == expected
    assert outputs(params(400, mode), mode, **options)[0] == dense


@pytest.mark.slow
@MODES
def test_drafts_plans_made_ahead_and_no_prefix_cache_change_no_token_under_a_budget(mode: str) -> None:
    sampling = params(BUDGET, mode)
    expected = expected_of(mode)[0]
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    for options in (drafting, {"async_scheduling": True}, {"enable_prefix_caching": False}):
        assert outputs(sampling, mode, **options)[0] == expected


@pytest.mark.parametrize("mode", ["sparse_read", "entropy"])
def test_bounds_of_a_block_that_a_refused_draft_filled_are_computed_again(mode: str) -> None:
    sampling = params(BUDGET, mode, max_tokens=100)
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}}
    with tiny_core(deterministic=True, **of_mode(mode, **drafting)) as core:

        def ask(predicted: list[int]) -> list[int]:
            request = core.inputs.make(PROMPTS[1], sampling, RequestContext(predicted_ids=tuple(predicted)))
            core.scheduler.add(request)
            while core.has_work:
                core.step()
            return list(request.sequences[0].output_token_ids)

        expected = outputs(sampling, mode)[0][1][0]
        # Blocks end after 8, 24, 40, … tokens of the output.
        wrong = [(token + 1 + index) % 200 for index, token in enumerate(expected)]
        predicted = [*expected[:2]]
        for end in range(8, len(expected), 16):
            predicted += [*expected[end - 6 : end - 2], *wrong[end - 2 : end + 4], GAP]
        assert ask(predicted) == expected


@MODES
def test_dense_requests_find_no_block_that_was_computed_from_fewer_tokens(mode: str) -> None:
    with tiny_core(deterministic=True, **of_mode(mode)) as core:
        dense = generate(core, params(None))[0]
    with tiny_core(deterministic=True, **of_mode(mode)) as core:
        kept = generate(core, params(BUDGET, mode))[0]
        assert generate(core, params(None))[0] == dense
        assert generate(core, params(BUDGET, mode))[0] == kept  # and no block of the dense ones beyond the budget


@pytest.mark.slow
@MODES
def test_beams_and_parallel_samples_share_what_they_keep(mode: str) -> None:
    beams = params(BUDGET, mode, use_beam_search=True, n=3, max_tokens=60)
    samples = params(BUDGET, mode, n=3, temperature=0.8, seed=1, max_tokens=60)
    for sampling in (beams, samples):
        found, most = outputs(sampling, mode, max_num_batched_tokens=32)
        assert found == outputs(sampling, mode)[0]
        assert mode not in EVICTING or most <= len(PROMPTS) * 3 * (BUDGET // 16 + 2)


def test_bounds_are_computed_as_a_prompts_blocks_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[bool, int]] = []  # of each: whether it reads sparsely, and the blocks that it bounds
    build = BatchBuilder.build

    def recorded(self: BatchBuilder, plan: StepPlan) -> StepBatch:
        batch = build(self, plan)
        sparse = batch.attention.sparse
        steps.append((False, 0) if sparse is None else (bool(sparse.num_read.any()), len(sparse.completed[0])))
        return batch

    monkeypatch.setattr(BatchBuilder, "build", recorded)
    with tiny_core(**of_mode("sparse_read", max_num_batched_tokens=32)) as core:
        request = core.inputs.make(PROMPTS[0], params(BUDGET, "sparse_read", max_tokens=30))
        core.scheduler.add(request)
        while core.has_work:
            core.step()
        assert budget_fields(request, core.scheduler.kv.holdings) == {
            "mode": "sparse_read",
            "tokens": BUDGET,
            "skipped_tokens": 150 + 29 - BUDGET,
        }
    prompt = [(False, 0), (False, 0), (False, 5), (False, 2), (False, 2)]  # 150 tokens: the last block is partial
    assert steps[: len(prompt)] == prompt
    assert all(sparse and bounded <= 1 for sparse, bounded in steps[len(prompt) :])
    assert sum(bounded for _, bounded in steps) == (150 + 29) // 16


@pytest.mark.parametrize("mode", ["bounded", "sparse_read"])
def test_a_prompt_that_is_not_read_whole_is_scored_so_in_any_chunks(mode: str) -> None:
    def scores(**options: Any) -> list[float]:
        budget: Any = {"mode": mode, "tokens": BUDGET, "dense_prompt": False}
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, kv_budget=budget)
        with tiny_core(**of_mode(mode, **options)) as core:
            request = core.inputs.make(PROMPTS[0], sampling)
            core.scheduler.add(request)
            while core.has_work:
                core.step()
                assert mode != "bounded" or core.scheduler.kv.pool.num_active <= BUDGET // 16
            assert_idle(core)
            return [entry.logprob for entry in request.prompt_logprobs]

    whole = scores()
    assert scores(max_num_batched_tokens=24) == whole


def test_what_had_least_of_the_attention_is_let_go_and_shown() -> None:
    with tiny_core() as core:
        request = core.inputs.make(PROMPTS[0], params(BUDGET, "bounded", max_tokens=60))
        core.scheduler.add(request)
        seq, kv, first = request.sequences[0], core.scheduler.kv, None
        while core.has_work:
            core.step()
            if seq.num_computed == len(PROMPTS[0]) and first is None:
                first = list(kv.tables(seq)[0])
                shown = budget_fields(request, kv.holdings)
            assert seq.finished or sum(map(bool, kv.tables(seq)[0])) <= max(10, BUDGET // 16)
        assert first is not None
        assert shown is not None
    # Of ten blocks four are left: both ends of the prompt, and one by mass.
    assert [bool(block) for block in first].count(True) == BUDGET // 16
    assert all(first[place] for place in (0, 8, 9))
    assert (shown["mode"], shown["evicted_tokens"]) == ("bounded", 150 // 16 * 16 + 16 - BUDGET)
    assert 0 < shown["evicted_mass"] < 0.7


@pytest.mark.parametrize("mode", EVICTING)
def test_as_many_sequences_run_at_once_as_the_calculator_says_and_none_is_preempted(mode: str) -> None:
    num_blocks, max_tokens = 60, 100
    with tiny_core(num_blocks=num_blocks) as core:
        prompt, sampling = PROMPTS[0] * 2, params(BUDGET, mode, max_tokens=max_tokens)
        scheduler, max_step = core.scheduler, core.config.max_num_batched_tokens
        cost = SequenceCost.of(scheduler.kv.spec, len(prompt) + max_tokens, max_step, sampling.kv_budget)
        planned = cost.sequences_in(num_blocks - 1)
        assert planned > (num_blocks - 1) // scheduler.kv.spec.blocks_for_tokens(len(prompt) + max_tokens)
        requests = [core.inputs.make(prompt, sampling) for _ in range(planned + 2)]
        for request in requests:
            scheduler.add(request)
        most = 0
        while core.has_work:
            core.step()
            most = max(most, sum(0 < len(request.sequences[0].output_token_ids) < max_tokens for request in requests))
        assert most >= planned
        assert scheduler.counters.num_preemptions == 0


@pytest.mark.slow
def test_a_context_beyond_the_models_own_is_computed_in_constant_memory() -> None:
    budget = {"mode": "sinks", "tokens": BUDGET}
    options = {"kv_budget": budget, "max_model_len": 20_000, "num_blocks": 24, "max_num_batched_tokens": 32}
    with tiny_core(**options) as core:
        request = core.inputs.make(PROMPTS[0], params(None, max_tokens=2500))
        core.scheduler.add(request)
        most = 0
        while core.has_work:
            core.step()
            most = max(most, core.scheduler.kv.pool.num_active if len(request.sequences[0].output_token_ids) else 0)
        assert len(request.sequences[0].output_token_ids) == 2500
        assert most <= BUDGET // 16 + 1 + len(PROMPTS[0]) // 16
        evicted = len(PROMPTS[0]) + 2500 - 1 - BUDGET
        assert budget_fields(request, core.scheduler.kv.holdings) == {**budget, "evicted_tokens": evicted}


@pytest.mark.soak  # seven minutes each
@pytest.mark.parametrize("mode", EVICTING)
def test_a_million_tokens_take_constant_memory_and_time(mode: str, tmp_path: Path) -> None:
    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) / 256

    budget = {"mode": mode, "tokens": 512}
    options = {"kv_budget": budget, "max_model_len": 1_100_000, "num_blocks": 64, "max_num_batched_tokens": 32}
    if mode == "bounded":  # within its context
        write_hf_model(tmp_path, "Llama", tokenizer=True, max_position_embeddings=1_100_000)
        options["model"] = str(tmp_path)
    with tiny_core(**options) as core:
        core.scheduler.add(core.inputs.make(PROMPTS[0], params(None, max_tokens=1_000_000)))
        seconds, memory = [], []
        while core.has_work:
            started = time.process_time()
            for _ in range(50_000):
                if core.has_work:
                    core.step()
            seconds.append(time.process_time() - started)
            memory.append(resident_mib())
            assert core.scheduler.kv.pool.num_active <= 512 // 16 + 1
        print([(round(spent * 20), round(mib)) for spent, mib in zip(seconds, memory, strict=True)])
        assert statistics.median(seconds[-5:]) < 1.5 * statistics.median(seconds[:5])
        # A bounded sequence keeps its true positions, up to the model's context, so the RoPE tables cover them: 16
        # float32 a position, from 65,536 positions after the first steps to 1,048,576.
        tables = 60 if mode == "bounded" else 0
        assert memory[-1] - memory[0] - tables < 40  # a million token ids, as Python's integers


def test_budgets_that_make_no_sense_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with tiny_core(kv_budget={"mode": "sinks", "tokens": 128}) as core:
        assert core.inputs.make([5], params(None)).params.kv_budget == core.config.budget
        for tokens, message in ((256, "within this server's"), (20, "from 32, two KV blocks, to 1024")):
            with pytest.raises(RequestError, match=message):
                core.inputs.make([5], params(tokens))
    table = tmp_path / "copies.toml"
    table.write_text('keys = "int4"\nvalues = "int4"\nsink_blocks = 1\nrecent_blocks = 2\n')
    copied = {"kv_cache_dtype": str(table)}
    with tiny_core(**copied) as core, pytest.raises(RequestError, match="needs a cache without copies in int8"):
        core.inputs.make([5], params(64, "bounded"))
    for wrong in ({"mode": "half", "tokens": 9}, {"mode": "sinks"}, {"mode": "sinks", "tokens": 9, "keep": 1}):
        with pytest.raises(RequestError, match="kv_budget"):
            SamplingParams(kv_budget=wrong)  # type: ignore[arg-type]
    with (
        pytest.raises(ConfigError, match="keeps 4096 tokens, but"),
        tiny_core(kv_budget='{"mode": "sinks", "tokens": 4096}'),
    ):
        pass
    sparse = {"mode": "sparse_read", "tokens": 64}
    with tiny_core() as core, pytest.raises(RequestError, match="start the server with --kv-budget"):
        core.inputs.make([5], params(64, "sparse_read"))
    write_hf_model(tmp_path, "DeepseekV3", tokenizer=True, max_position_embeddings=MAX_MODEL_LEN)
    with tiny_core(model=str(tmp_path)) as core, pytest.raises(RequestError, match="the cache holds latents"):
        core.inputs.make([5], params(64))
    with tiny_core(**of_mode("entropy")) as core:
        request = core.inputs.make([5], params(64, "entropy"))
        assert request.params.kv_budget == KVBudget(mode="sparse_read", tokens=64, layers=tuple(ENTROPIES["entropy"]))
        with pytest.raises(RequestError, match="can be set for the server only"):
            core.inputs.make([5], SamplingParams(kv_budget={**sparse, "layers": [1, 1]}))  # type: ignore[arg-type]
    for entropies in ([], [0.5, 2], [0.5, True], 3):
        with pytest.raises(RequestError, match=r"kv_budget\.layers"):
            SamplingParams(kv_budget={**sparse, "layers": entropies})  # type: ignore[arg-type]
    for options, message in (
        ({"kv_budget": {**sparse, "layers": [0.5] * 3}, "model": deep_model()}, "has 3 entropies, but 2 layers"),
        ({"max_model_len": 2000}, "supports at most 1024"),
        ({"kv_cache_dtype": "int8"}, "needs a cache of floats, got kv_cache_dtype int8"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 1"),
        ({"tensor_parallel_size": 2, "kv_budget": {"mode": "bounded", "tokens": 64}}, "bounded needs a CPU"),
        ({"max_model_len": 2000, "kv_budget": {"mode": "bounded", "tokens": 64}}, "supports at most 1024"),
    ):
        with pytest.raises(ConfigError, match=message), tiny_core(**{"kv_budget": sparse, **options}):
            pass
