from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.lifecycle import SchedulerConfig
from octavo.scheduler.plan import StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.workloads.memory_usage import MemoryObserver, Moment, Slots

FULL, SLIDING = LayerKVSpec(1, 16, 16), LayerKVSpec(1, 16, 16, sliding_window=20)


class Bench:
    """A scheduler over a small pool, and an observer of it."""

    def __init__(
        self,
        block_size: int = 16,
        usable_blocks: int = 8,
        *,
        layers: tuple[Any, ...] = (FULL,),
        caches: bool = False,
        extra_bytes: int = 0,
        **limits: Any,
    ) -> None:
        spec = KVCacheSpec.build(layers, block_size, "float32")
        kv = KVCacheManager(spec, usable_blocks + 1, caches)
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 128, **limits}
        self.scheduler = Scheduler(SchedulerConfig(**limits), kv)
        self.observer = MemoryObserver(self.scheduler, usable_blocks * spec.block_bytes + extra_bytes)

    def add(self, name: str, num_prompt: int, num_output: int, n: int = 1, first_token: int = 0) -> None:
        params = SamplingParams(n=n, max_tokens=num_output, ignore_eos=True)
        prompt = list(range(first_token, first_token + num_prompt))
        request = Request(RequestId(name), prompt, params, arrival_time=float(len(list(self.scheduler.live))))
        self.scheduler.add(request)
        self.observer.watch(request)

    def step(self) -> Moment:
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, StepResult(tuple(1000 + seq.index for seq in self.scheduler.drawing)))
        return self.observer.moment()


def test_an_unfinished_block_is_reserved_as_far_as_the_output_will_reach_and_internal_beyond() -> None:
    bench = Bench()
    bench.add("a", num_prompt=18, num_output=8)
    moment = bench.step()
    # 18 tokens in two blocks; tokens 18 to 24 are stored later, the last one never is
    assert moment.slots == Slots(tokens=18, reserved=7, internal=7, idle=6 * 16)
    assert (moment.num_running, moment.blocks_held) == (1, 2)


def test_a_contiguous_block_is_mostly_internal() -> None:
    bench = Bench(block_size=128, usable_blocks=2)
    for name in "abc":
        bench.add(name, num_prompt=10, num_output=5)
    moment = bench.step()
    assert moment.slots == Slots(tokens=20, reserved=8, internal=2 * 114)
    assert moment.memory_is_short


def test_what_is_free_but_too_little_for_the_next_in_line_is_external() -> None:
    bench = Bench(usable_blocks=4)
    bench.add("a", num_prompt=33, num_output=2)
    bench.add("b", num_prompt=20, num_output=2)
    moment = bench.step()
    assert moment.slots == Slots(tokens=33, reserved=1, internal=14, external=16)
    assert moment.memory_is_short


def test_what_running_sequences_are_bound_to_take_is_external_for_those_that_wait() -> None:
    bench = Bench(usable_blocks=4)
    bench.add("a", num_prompt=16, num_output=30)
    bench.add("b", num_prompt=16, num_output=30)
    moment = bench.step()
    assert moment.num_running == 1
    assert moment.slots.external > 0
    assert moment.memory_is_short


def test_what_is_free_is_idle_where_not_memory_but_the_number_of_sequences_is_the_limit() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", num_prompt=16, num_output=2)
    bench.add("b", num_prompt=16, num_output=2)
    moment = bench.step()
    assert (moment.slots.idle, moment.slots.external) == (7 * 16, 0)
    assert not moment.memory_is_short


def test_what_a_budget_has_beyond_whole_blocks_is_external_for_good() -> None:
    bench = Bench(extra_bytes=FULL.elements_per_token * 4 * 10)
    assert bench.observer.moment().slots == Slots(external=10, idle=8 * 16)


def test_whole_blocks_that_the_pool_was_not_asked_for_are_idle() -> None:
    bench = Bench(extra_bytes=FULL.elements_per_token * 4 * 32)
    assert bench.observer.moment().slots == Slots(idle=10 * 16)


def test_shared_blocks_count_once() -> None:
    bench = Bench(usable_blocks=16)
    bench.add("a", num_prompt=40, num_output=10, n=4)
    bench.step()
    moment = bench.step()
    # Two full blocks are shared by four; each sample has a copy of the third
    assert moment.blocks_held == 2 + 4
    assert moment.slots.tokens == 32 + 4 * 9


def test_blocks_that_only_a_prefix_could_use_are_cached() -> None:
    bench = Bench(caches=True)
    bench.add("a", num_prompt=40, num_output=1)
    assert bench.step().slots == Slots(cached=32, idle=6 * 16)


def test_averages_are_weighted_by_time_and_shares_are_of_the_time_that_memory_was_short() -> None:
    bench = Bench(usable_blocks=2)
    bench.add("a", num_prompt=16, num_output=17)
    bench.add("b", num_prompt=17, num_output=2)
    bench.step()
    bench.observer.observe(3.0)  # b waits: one block is free, two are needed
    bench.scheduler.end_request(RequestId("b"))
    bench.observer.observe(1.0)  # nobody waits
    usage = bench.observer.usage()
    assert usage["short_share"] == 0.75
    assert usage["shares"]["tokens"] == usage["shares"]["external"] == 0.5
    assert usage["shares"]["idle"] == 0
    assert (usage["running_mean"], usage["running_max"]) == (1.0, 1)
    assert usage["waste"] == 0.0


def test_nothing_observed_is_no_division_by_zero() -> None:
    usage = Bench().observer.usage()
    assert (usage["waste"], usage["running_mean"], usage["short_share"]) == (0.0, 0.0, 0.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 4, 16, 64]),
    caches=st.booleans(),
    layers=st.sampled_from([(FULL,), (FULL, SLIDING)]),
)
def test_every_slot_is_in_one_state(
    requests: list[tuple[int, int, int]], block_size: int, caches: bool, layers: tuple[Any, ...]
) -> None:
    bench = Bench(block_size, 2 * len(layers) * 128 // block_size, layers=layers, caches=caches)
    for index, (num_prompt, num_output, n) in enumerate(requests):
        bench.add(f"r{index}", num_prompt, num_output, n, first_token=100 * (index % 2))
    total = (bench.scheduler.kv.pool.num_blocks - 1) * block_size
    while bench.scheduler.has_work:
        moment = bench.step()
        assert moment.slots.total == total
        assert moment.slots.held == moment.blocks_held * block_size
        assert min(moment.slots.tokens, moment.slots.reserved, moment.slots.internal) >= 0
        assert moment.num_running == bench.scheduler.num_running
        bench.observer.observe(1.0)
    usage = bench.observer.usage()
    assert sum(usage["shares"].values()) == pytest.approx(1.0)
    assert usage["waste"] == pytest.approx(usage["waste_reserved"] + usage["waste_internal"])
