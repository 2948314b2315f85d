"""The scheduler's state machine over every combination of policies and features that an engine can be started with.

    prefix cache × eviction policy × preemption × pins × (one sample | parallel samples | beams) × aborts

each with exceptions injected at random into planning, computing and updating.

`python -m pytest -s -m soak tests/scheduler/test_soak.py`; `-k "radix and swap and lru"` or the like runs a part. After
every step `audit()` recounts every reference, on the device and in host memory, and every sequence is shown to read its
own tokens.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.scheduler.plan import StepPlan
from tests.scheduler.test_scheduler_machine import LIMITS, POLICIES, SchedulerMachine

CACHES = ("hashed", "radix", None)
MODES = ("recompute", "swap", "auto")
# At most how many samples a request draws, 0: none does; whether there are beams.
DECODING = {"one": (1, False), "parallel": (3, False), "beams": (0, True)}
# 540 combinations: more than 500,000 in all, of each a kind of its own.
STEPS_OF_EACH = 1000


def combination(cache: str | None, policy: str, preemption: str, pinning: bool, decoding: str, aborting: bool) -> Any:
    """A machine of that kind alone; its class counts."""
    host = st.just(0) if preemption == "recompute" else st.sampled_from([1, 4, 100])
    limits = {**LIMITS, "num_host_blocks": host, "policy": POLICIES["policy"]}

    class Combination(SchedulerMachine):
        samples, beams = DECODING[decoding]
        pins, aborts = pinning, aborting
        counts: ClassVar[Counter[str]] = Counter()

        @initialize(
            **limits,
            prefix_cache=st.just(cache),
            eviction=st.just(policy),
            mode=st.just(preemption),
        )
        def build(self, **options: Any) -> None:
            SchedulerMachine.build(self, **options)

        def play_runner(self, plan: StepPlan) -> None:
            super().play_runner(plan)
            self.counts["planned"] += 1
            self.counts["copied"] += len(plan.copies)
            self.counts["moved"] += len(plan.stores) + len(plan.loads)

        @invariant()
        def count(self) -> None:
            self.counts["steps"] += hasattr(self, "scheduler")

        def start_over(self, data: st.DataObject) -> None:
            super().start_over(data)
            self.counts["restarted"] += 1

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "scheduler"):
                self.counts["preempted"] += self.scheduler.counters.num_preemptions
                self.counts["pinned"] += self.scheduler.kv.pins.counters.num_pinned
                self.counts["contained"] += self.num_contained

    return Combination


def combinations(cache: str | None, preemption: str, policy: str) -> Iterator[Any]:
    for pinning, decoding, aborting in itertools.product((False, True), DECODING, (False, True)):
        yield combination(cache, policy, preemption, pinning, decoding, aborting)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("preemption", MODES)
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_every_combination_holds_for_its_share_of_half_a_million_steps(
    cache: str | None, preemption: str, policy: str
) -> None:
    limits = settings(
        max_examples=10,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=False,
        # A failure is shown as it was found: to make it smaller takes longer than all the rest.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    started, total, machines = time.perf_counter(), Counter[str](), list(combinations(cache, preemption, policy))
    for machine in machines:
        while machine.counts["steps"] < STEPS_OF_EACH:
            run_state_machine_as_test(machine, settings=limits)
        total += machine.counts
    assert len(machines) == 2 * len(DECODING) * 2
    assert total["preempted"] > 0
    assert total["restarted"] > 0
    # Prefixes that are evicted to host memory are moved too, however sequences are preempted.
    assert total["moved"] > 0 or preemption == "recompute"
    assert (total["pinned"] > 0) == (cache is not None)
    names = ("steps", "planned", "restarted", "contained", "preempted", "moved", "copied", "pinned")
    figures = " | ".join(f"{total[name]:,}" for name in names)
    seconds = time.perf_counter() - started
    print(f"\n| {cache or 'off'} | {preemption} | {policy} | {len(machines)} | {figures} | {seconds:.0f} |")
