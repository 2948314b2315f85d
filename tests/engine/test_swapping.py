"""Preempted, and swapped or recomputed in part or whole, a request gives the same tokens (float32, also sampled)."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.kvcache.holdings import RestoreCost
from octavo.llm import LLM
from octavo.runner import runner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.preemption import Preemption
from tests.conftest import MakeLLM
from tests.engine.test_same_tokens import alone, assert_same, thrash, workload  # type: ignore[attr-defined]
from tests.runner.test_swapping import CountingLink

CACHES: list[dict[str, Any]] = [{"enable_prefix_caching": False}, {"prefix_cache": "hashed"}, {"prefix_cache": "radix"}]
WAYS = ["recomputed", "swapped in turn", "swapped while computing"]


def tight(**options: Any) -> dict[str, Any]:
    """A pool that holds the longest request and little more."""
    prompts, params = workload()
    longest = max(len(p["prompt_token_ids"]) + s.max_tokens for p, s in zip(prompts, params, strict=True))  # type: ignore[operator]
    return {"block_size": 4, "num_blocks": longest // 4 + 4, "max_num_batched_tokens": 24, **options}


def block_bytes(core: EngineCore) -> int:
    return core.scheduler.kv.spec.block_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cache", "way"),
    # A model with a window: each cache, and each way.
    [*product(["tiny_llama"], CACHES, WAYS), *zip(["tiny_mistral"] * 3, CACHES, WAYS, strict=True)],
)
def test_preemption_changes_no_token(
    make_llm: MakeLLM,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    cache: dict[str, Any],
    way: str,
) -> None:
    """Blocks are stored before the step computes, as on a CPU, or while it does, as on a GPU."""
    if way == "swapped while computing":
        monkeypatch.setattr(runner, "make_link", lambda device: CountingLink())
    folder, swaps = request.getfixturevalue(model), way != "recomputed"
    llm = make_llm(folder, preemption_mode="swap" if swaps else "recompute", **tight(**cache))
    thrash(llm.core)
    outputs = llm.generate(*workload(), use_tqdm=False)
    swapped, counters = llm.core.scheduler.kv.hierarchy.swapped, llm.core.scheduler.counters
    assert counters.num_preemptions > 0
    assert (swapped.blocks_in > 0) == swaps
    assert (counters.recomputed_tokens > 0) != swaps
    assert llm.core.stats.gauges().swapped_in_bytes == swapped.blocks_in * block_bytes(llm.core)
    assert llm.core.stats.gauges().swapped_out_bytes == swapped.blocks_out * block_bytes(llm.core)
    assert_same(outputs, alone(make_llm, folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cache"), [("tiny_mistral", CACHES[0]), ("tiny_llama", CACHES[1]), ("tiny_mistral", CACHES[2])]
)
def test_a_host_without_room_changes_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, model: str, cache: dict[str, Any]
) -> None:
    folder = request.getfixturevalue(model)
    sizing = make_llm(folder, **tight())
    llm = make_llm(folder, preemption_mode="swap", swap_space=block_bytes(sizing.core), **tight(**cache))
    thrash(llm.core)
    outputs = llm.generate(*workload(), use_tqdm=False)
    assert llm.core.scheduler.kv.hierarchy.host.num_swap_slots == 1
    if not llm.core.config.enable_prefix_caching:
        # With it, little more than the last block of each is to be moved, and one at a time may do.
        assert llm.core.scheduler.counters.recomputed_tokens > 0
    assert_same(outputs, alone(make_llm, folder))


class OftenCheaper(Preemption):
    """Swaps where that costs less at fixed speeds: as measured on this machine, it always does."""

    def swapping_is_cheaper(self, cost: RestoreCost) -> bool:
        return 2 * 1.7 * cost.blocks < cost.tokens


@pytest.mark.slow
def test_auto_changes_no_token_where_it_recomputes_some_and_swaps_others(make_llm: MakeLLM, tiny_llama: Path) -> None:
    # Not by `make_llm`, whose engines swap every preempted sequence.
    llm = LLM(str(tiny_llama), dtype="float32", device="cpu", num_threads=1, **tight(enable_prefix_caching=False))
    thrash(llm.core)
    assert llm.core.scheduler.preemption.mode == "auto"
    measured = llm.core.scheduler.preemption = OftenCheaper(mode="auto")
    outputs = llm.generate(*workload(), use_tqdm=False)
    assert measured.seconds_per_block is not None
    assert 0 < measured.seconds_per_block < 1
    assert measured.seconds_per_token is not None
    assert 0 < measured.seconds_per_token < 1
    assert llm.core.scheduler.counters.recomputed_tokens > 0
    assert llm.core.scheduler.kv.hierarchy.swapped.blocks_in > 0
    assert_same(outputs, alone(make_llm, tiny_llama))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parallel_samples_are_the_same_when_they_are_swapped(
    make_llm: MakeLLM, tiny_llama: Path, cache: dict[str, Any], temperature: float
) -> None:
    prompt = {"prompt_token_ids": list(range(10, 31))}
    params = SamplingParams(n=5, seed=70, temperature=temperature, max_tokens=20, ignore_eos=True)
    llm = make_llm(tiny_llama, block_size=4, num_blocks=20, max_num_batched_tokens=16, preemption_mode="swap", **cache)
    (together,) = llm.generate(prompt, params, use_tqdm=False)
    assert llm.core.scheduler.kv.hierarchy.swapped.sequences_in > 0
    (free,) = make_llm(tiny_llama, enable_prefix_caching=False).generate(prompt, params, use_tqdm=False)
    assert [c.token_ids for c in together.outputs] == [c.token_ids for c in free.outputs]


def test_an_aborted_swapped_request_leaves_nothing_in_host_memory(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama, preemption_mode="swap", **tight(enable_prefix_caching=False)).core
    thrash(core)
    requests = []
    for prompt, params in zip(*workload(), strict=True):
        requests.append(core.inputs.make(prompt["prompt_token_ids"], params))
        core.add(requests[-1])
    while not core.scheduler.num_swapped:
        core.step()
    assert core.stats.gauges().num_swapped == core.scheduler.num_swapped
    for request in requests:
        core.abort(request.request_id)
    assert core.scheduler.kv.hierarchy.num_kept == 0
    assert core.stats.gauges().num_swapped == 0


def test_without_swap_space_auto_recomputes_and_swap_is_refused(make_llm: MakeLLM, tiny_llama: Path) -> None:
    core = make_llm(tiny_llama, swap_space=0).core
    assert core.scheduler.preemption.mode == "recompute"
    assert core.runner.host is None or core.runner.host.num_blocks == 0
    with pytest.raises(ConfigError, match="preemption_mode is 'swap', but swap_space is 0"):
        EngineConfig.from_options({"preemption_mode": "swap", "swap_space": "0"})
    with pytest.raises(ConfigError, match="swap_space must be at least 0, got -1"):
        EngineConfig(swap_space=-1)
    assert EngineConfig.from_options({"swap_space": "2GiB"}).swap_space == 2 << 30
