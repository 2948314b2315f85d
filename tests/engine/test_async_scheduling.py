"""Steps that are planned while the one before is computed: the same tokens, and nothing lost, whatever comes between.

On a CPU a step is computed when it is launched. What is tested is all that is not the device's: what is planned from
which tokens, when a block is given to whom, and what becomes of tokens that nobody wants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.outputs import RequestOutput
from octavo.errors import LogitsError
from octavo.request import Request, RequestId
from octavo.runner.runner import Collect
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.structured_outputs import StructuredOutputsParams
from tests.engine.preempting import thrash
from tests.engine.tiny_engine import assert_drained, tiny_core

VOCAB = 320


@dataclass
class Script:
    """When requests come, and when some of them are given up: by the number of the step."""

    arrivals: dict[int, list[tuple[list[int], dict[str, Any]]]] = field(default_factory=dict)
    aborts: dict[int, list[int]] = field(default_factory=dict)

    def arrive(self, at: int, prompt: list[int], **params: Any) -> int:
        """Returns the number of the request."""
        number = sum(map(len, self.arrivals.values()))
        self.arrivals.setdefault(at, []).append((prompt, {"seed": number, "ignore_eos": True, **params}))
        return number


@dataclass
class Played:
    """What became of a script's requests, and the plans that were launched for it."""

    outputs: dict[int, RequestOutput]
    plans: list[StepPlan]

    @property
    def num_ahead(self) -> int:
        return sum(plan.ahead for plan in self.plans)

    def tokens(self, number: int) -> list[list[int]]:
        return [list(output.token_ids) for output in self.outputs[number].outputs]

    def ends(self, number: int) -> list[tuple[str | None, Any]]:
        return [(output.finish_reason, output.stop_reason) for output in self.outputs[number].outputs]


Around = Callable[[StepPlan, Collect], Collect]


def untouched(_: StepPlan, collect: Collect) -> Collect:
    return collect


@contextmanager
def watched(core: EngineCore, around: Around = untouched) -> Iterator[list[StepPlan]]:
    """The plans that are launched; `around` may put something in place of what collects their results."""
    plans: list[StepPlan] = []
    launch = core.runner.launch

    def watching(plan: StepPlan) -> Collect:
        plans.append(plan)
        return around(plan, launch(plan))

    core.runner.launch = watching
    try:
        yield plans
    finally:
        core.runner.launch = launch


def play(core: EngineCore, script: Script, around: Around = untouched) -> Played:
    """Run a script to its end; the cache is audited after every step."""
    numbers: dict[RequestId, int] = {}
    outputs: dict[int, RequestOutput] = {}
    requests: list[Request] = []
    last = max([*script.arrivals, *script.aborts])

    def take(news: list[RequestOutput]) -> None:
        outputs.update((numbers[output.request_id], output) for output in news)

    with watched(core, around) as plans:
        step = 0
        while step <= last or core.has_work:
            for prompt, params in script.arrivals.get(step, []):
                request = core.inputs.make(prompt, SamplingParams(**params))
                numbers[request.request_id] = len(requests)
                requests.append(request)
                core.add(request)
            for number in script.aborts.get(step, []):
                if (output := core.abort(requests[number].request_id)) is not None:
                    take([output])
            take(core.step())
            core.scheduler.kv.audit()
            step += 1
            assert step < 2000, "it goes on for ever"
    assert_drained(core)
    return Played(outputs, plans)


def is_in_flight(core: EngineCore) -> bool:
    """Whether a step has been launched that is to be collected yet."""
    return core._ahead is not None


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB - 1) for _ in range(length)]


def a_busy_day() -> Script:
    """Plain samples of all lengths, among them some that need the host for each token, and some that leave."""
    rng, script = random.Random(3), Script()
    shared = prompt(rng, 37)
    for i in range(14):
        how: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
        script.arrive(3 * i, shared[: 16 * (i % 3)] + prompt(rng, 1 + i), max_tokens=5 + 3 * i, **how)
    script.arrive(4, prompt(rng, 20), n=3, temperature=1.0, max_tokens=12)
    script.arrive(12, prompt(rng, 5), temperature=1.0, max_tokens=40, stop_token_ids=list(range(3, 30)))
    script.arrive(14, prompt(rng, 5), temperature=1.0, max_tokens=40, stop=["a", "e"])
    biased: dict[str, Any] = {"min_tokens": 10, "logit_bias": {2: 9}, "ignore_eos": False}
    script.arrive(20, prompt(rng, 5), temperature=1.0, max_tokens=30, **biased)
    script.arrive(24, prompt(rng, 5), temperature=0.8, max_tokens=6, logprobs=1)
    script.arrive(25, prompt(rng, 5), temperature=0.8, max_tokens=6, presence_penalty=1.0)
    script.arrive(1, prompt(rng, 30), temperature=0.9, max_tokens=50, repetition_penalty=1.3)
    script.arrive(2, prompt(rng, 70), temperature=0.9, max_tokens=50, logprobs=2, prompt_logprobs=1)
    script.arrive(5, prompt(rng, 9), temperature=0.9, max_tokens=30, frequency_penalty=0.7, bad_words=["a", "the"])
    script.arrive(26, prompt(rng, 5), max_tokens=5, n=2, best_of=2, use_beam_search=True, seed=None, temperature=0.0)
    letters = StructuredOutputsParams(regex="[a-c]{3,9}")
    script.arrive(50, prompt(rng, 5), max_tokens=6, temperature=1.0, structured_outputs=letters)
    return script


def assert_same_as_one_by_one(script: Script, ahead: Played, one_by_one: Played) -> None:
    """Whoever stayed has the same tokens and ends; whoever left has the first of them."""
    left = {number for numbers in script.aborts.values() for number in numbers}
    for number in one_by_one.outputs:
        if number in left:
            ours, theirs = ahead.tokens(number), one_by_one.tokens(number)
            assert all(a[: len(b)] == b[: len(a)] for a, b in zip(ours, theirs, strict=True))
        else:
            assert ahead.tokens(number) == one_by_one.tokens(number), number
            assert ahead.ends(number) == one_by_one.ends(number), number


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    """Plans ahead, and caches no prefixes, so that each test finds it as the first did."""
    with tiny_core(async_scheduling=True, enable_prefix_caching=False, num_blocks=60) as core:
        yield core
        core.close()


@pytest.fixture(scope="module")
def one_by_one() -> Played:
    """A busy day of an engine that awaits each step before it plans the next, as it is on a CPU unless asked for."""
    with tiny_core(num_blocks=200) as core:
        played = play(core, a_busy_day())
    assert played.num_ahead == 0
    return played


def test_all_steps_but_the_first_are_planned_ahead(core: EngineCore) -> None:
    script = Script()
    for first in (5, 50):
        script.arrive(0, [first, 6, 7], max_tokens=20)
    played = play(core, script)
    assert [plan.ahead for plan in played.plans] == [False] + [True] * 19
    assert [plan.num_rows for plan in played.plans] == [2] * 20, "nobody computes past a length that is known"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": "radix"},
        {"max_num_seqs": 5, "kv_host_memory": "1MiB"},
        {"max_num_batched_tokens": 24},
    ],
    ids=str,
)
def test_tokens_are_those_of_steps_one_by_one(one_by_one: Played, options: dict[str, Any]) -> None:
    script = a_busy_day()
    script.aborts = {9: [2], 30: [7], 31: [9, 10]}
    with tiny_core(async_scheduling=True, num_blocks=200, **options) as core:
        played = play(core, script)
    assert_same_as_one_by_one(script, played, one_by_one)
    assert played.num_ahead > len(played.plans) / 2


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_sequences_get_the_same_tokens(mode: str) -> None:
    rng, script = random.Random(5), Script(aborts={25: [3]})
    for i in range(6):
        script.arrive(i, prompt(rng, 3 + 5 * i), max_tokens=40, temperature=0.9)
    played = []
    for is_ahead in (True, False):
        with tiny_core(async_scheduling=is_ahead, num_blocks=15, preemption_mode=mode, max_model_len=200) as core:
            thrash(core)
            played.append(play(core, script))
            assert core.scheduler.counters.num_preemptions
    assert_same_as_one_by_one(script, *played)
    assert played[0].num_ahead > 10


def test_blocks_that_steps_ahead_have_filled_are_found_again() -> None:
    script = Script()
    script.arrive(0, list(range(3, 20)), max_tokens=60)
    script.arrive(1, list(range(30, 60)), max_tokens=60, temperature=1.0, stop_token_ids=list(range(3, 12)))
    small = {"num_blocks": 60}
    with tiny_core(async_scheduling=True, **small) as core, tiny_core(enable_prefix_caching=False, **small) as cold:
        before = play(core, script)
        assert before.ends(1)[0][0] == "stop", "with a step in flight that computes another token for it"
        again = Script()
        for number, first in enumerate((list(range(3, 20)), list(range(30, 60)))):
            again.arrive(number, first + before.tokens(number)[0], max_tokens=8)
        after, anew = play(core, again), play(cold, again)
        for number, output in after.outputs.items():
            computed = len(output.prompt_token_ids or []) - 1
            assert output.num_cached_tokens == computed // 16 * 16
            assert after.tokens(number) == anew.tokens(number)


def test_a_request_aborted_while_a_step_is_in_flight_leaves_nothing_behind(core: EngineCore) -> None:
    requests = [core.inputs.make([5 + i, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(3)]
    for request in requests:
        core.add(request)
    for _ in range(5):
        core.step()
    assert is_in_flight(core)
    core.abort(requests[0].request_id)
    core.step()
    assert requests[0].sequences[0].num_output_tokens == 5
    assert requests[1].sequences[0].num_output_tokens == 6
    for request in requests[1:]:
        core.abort(request.request_id)
    assert not is_in_flight(core), "nobody waits for it"
    assert_drained(core)


def failing(steps: set[int], make: Callable[[], Exception]) -> Around:
    """Collecting the results of these steps raises, after they were computed."""
    left = set(steps)

    def around(plan: StepPlan, collect: Collect) -> Collect:
        def collecting() -> StepResult:
            result = collect()
            if plan.step in left:
                left.discard(plan.step)
                raise make()
            return result

        return collecting

    return around


def two_samples() -> Script:
    script = Script()
    for first in (5, 50):
        script.arrive(0, [first, 6, 7], max_tokens=20, temperature=0.9)
    return script


def test_a_step_that_fails_in_flight_is_computed_again_and_the_one_behind_it(core: EngineCore) -> None:
    script = two_samples()
    expected = play(core, script)
    first = expected.plans[-1].step + 1
    played = play(core, script, failing({first + 4, first + 11}, lambda: RuntimeError("in flight")))
    assert_same_as_one_by_one(script, played, expected)
    assert sum(plan.reset for plan in played.plans) >= 2
    assert played.plans[-1].ahead, "once they have got past it, steps are planned ahead again"


def test_logits_that_cannot_be_sampled_end_their_request_and_no_other(core: EngineCore) -> None:
    script = two_samples()
    expected = play(core, script)

    def ailing() -> Exception:
        return LogitsError([next(iter(list(core.scheduler.live)))])

    played = play(core, script, failing({expected.plans[-1].step + 6}, ailing))
    assert played.ends(0)[0][0] == "error"
    assert played.tokens(0)[0] == expected.tokens(0)[0][:5]
    assert played.tokens(1) == expected.tokens(1)


def test_a_failed_step_in_flight_ends_no_request_if_all_have_left(core: EngineCore) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    leaving, staying = core.inputs.make([5, 6], params), core.inputs.make([7, 8], params)
    core.add(leaving)
    fails = False

    def around(_: StepPlan, collect: Collect) -> Collect:
        def collecting() -> StepResult:
            result = collect()
            if fails:
                raise RuntimeError("in flight")
            return result

        return collecting

    with watched(core, around):
        for _ in range(3):
            core.step()
        core.add(staying)
        core.abort(leaving.request_id)
        assert is_in_flight(core)
        fails = True
        assert core.step() == []
        fails = False
        while core.has_work:
            core.step()
    assert staying.sequences[0].num_output_tokens == 6
    assert_drained(core)
