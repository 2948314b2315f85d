"""An exception in a step ends no request but the one that causes it; the others get the tokens they would have had."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.outputs import STEP_FAILED, OutputKind, RequestOutput
from octavo.engine.recovery import FaultIsolation
from octavo.errors import EngineDeadError
from octavo.request import FinishReason, RequestContext, RequestId
from octavo.sampling_params import SamplingParams
from tests.engine.faults import ENDING_PLACES, ONCE_PLACES, PLACES, InjectedError, injected, times, whenever
from tests.engine.tiny_engine import assert_drained, tiny_core

CULPRIT = "request-5"

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "crowded": {"block_size": 4, "num_blocks": 60},
    "swapping": {"block_size": 4, "num_blocks": 60, "swap_space": "8MiB", "preemption_mode": "swap"},
    "radix": {"prefix_cache": "radix", "block_size": 4},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 24},
}


def add_all(core: EngineCore) -> None:
    """Twelve requests of all kinds, the sixth alone and plain."""
    for i in range(12):
        options: dict[str, Any] = {"max_tokens": 6 + i, "temperature": 0.0, "ignore_eos": True}
        if i % 4 == 1 and i != 5:
            options |= {"n": 3, "temperature": 1.0, "seed": i}
        if i % 4 == 2:
            options |= {"n": 2, "use_beam_search": True}
        if i % 4 == 3:
            options |= {"logprobs": 1, "prompt_logprobs": 1}
        prompt = [5 + i, 6, 7, 8, 9] * (1 + i % 5)
        request = core.inputs.make(prompt, SamplingParams(**options), RequestContext(request_id=f"request-{i}"))
        core.add(request, kind=OutputKind.FINAL)


def run(core: EngineCore, steps: int = 2000) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(steps):
        if not core.has_work:
            break
        for output in core.step():
            assert output.request_id not in outputs, "one last output each"
            outputs[output.request_id] = output
        core.scheduler.kv.audit()
    return outputs


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {name: [completion.token_ids for completion in output.outputs] for name, output in outputs.items()}


def cases(places: Iterable[str]) -> list[Any]:
    """Every place in a plain engine, and every engine with a place in each half of a step."""
    both: list[Any] = [("plain", place) for place in places]
    both += [
        pytest.param(engine, place, marks=pytest.mark.slow)
        for engine in ENGINES
        if engine != "plain"
        for place in ("at an admission", "after computing")
    ]
    return both


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[list[int]]]:
    with tiny_core() as core:
        add_all(core)
        return tokens(run(core))


@pytest.mark.parametrize(("engine", "place"), cases([*PLACES, *ONCE_PLACES]))
def test_a_transient_exception_changes_no_output(
    engine: str, place: str, undisturbed: dict[str, list[list[int]]]
) -> None:
    with tiny_core(**ENGINES[engine]) as core:
        add_all(core)
        outputs: dict[str, RequestOutput] = {}
        for _ in range(3):
            with injected(core, place, times(1)):
                outputs |= run(core, steps=3)
        assert core.stats.num_failed_steps > 0
        assert tokens(outputs | run(core)) == undisturbed
        assert_drained(core)


@pytest.mark.parametrize(("engine", "place"), cases([*PLACES, *ENDING_PLACES]))
def test_a_request_that_always_fails_ends_alone(
    engine: str, place: str, undisturbed: dict[str, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_core(**ENGINES[engine]) as core:
        add_all(core)
        with injected(core, place, whenever(CULPRIT)):
            outputs = run(core)
        culprit = outputs.pop(CULPRIT)
        assert (culprit.finished, culprit.error) == (True, STEP_FAILED)
        assert [completion.finish_reason for completion in culprit.outputs] == [FinishReason.ERROR]
        expected = {name: ids for name, ids in undisturbed.items() if name != CULPRIT}
        assert tokens(outputs) == expected
        assert all(output.error is None for output in outputs.values())
        # Once with all, once more, then halves, and twice alone.
        assert core.stats.num_failed_steps <= 3 + math.ceil(math.log2(12))
        assert core.stats.finished[FinishReason.ERROR] == 1
        assert_drained(core)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert any(CULPRIT in record.getMessage() and record.exc_info for record in errors)


@pytest.mark.parametrize("place", ENDING_PLACES)
def test_an_exception_where_tokens_are_half_taken_in_ends_their_request_alone(
    place: str, undisturbed: dict[str, list[list[int]]]
) -> None:
    with tiny_core() as core:
        add_all(core)
        core.step()
        with injected(core, place, times(1)):
            first = {output.request_id: output for output in core.step()}
        (failed,) = (output for output in first.values() if output.error)
        outputs = run(core)
        assert tokens(outputs) == {name: ids for name, ids in undisturbed.items() if name != failed.request_id}
        assert_drained(core)


def test_an_exception_after_an_update_ends_only_the_requests_it_touched(
    undisturbed: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_core(max_num_seqs=4) as core:
        add_all(core)
        update = core.scheduler.update

        def failing(*args: Any) -> Any:
            update(*args)
            raise InjectedError("after update")

        with monkeypatch.context() as patching:
            patching.setattr(core.scheduler, "update", failing)
            failed = {output.request_id for output in core.step()}
        assert failed
        outputs = run(core)
        assert tokens(outputs) == {name: ids for name, ids in undisturbed.items() if name not in failed}
        assert_drained(core)


def test_two_culprits_end_and_newcomers_meanwhile_are_served(undisturbed: dict[str, list[list[int]]]) -> None:
    with tiny_core() as core:
        add_all(core)
        culprits = {"request-0", "request-8"}
        with injected(core, "before computing", lambda concerned: bool(culprits & concerned)):
            outputs: dict[str, RequestOutput] = {}
            for late in range(6):
                outputs |= {output.request_id: output for output in core.step()}
                params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
                core.add(core.inputs.make([9, 9], params, RequestContext(request_id=f"late-{late}")))
            outputs |= run(core)
        assert {name for name, output in outputs.items() if output.error} == culprits
        late_tokens = {tuple(ids[0]) for name, ids in tokens(outputs).items() if name.startswith("late")}
        assert len(late_tokens) == 1
        assert_drained(core)


def test_a_request_held_back_can_be_aborted() -> None:
    with tiny_core() as core:
        add_all(core)
        with injected(core, "before computing", whenever(CULPRIT)):
            core.step(), core.step()
            held = [name for name in list(core.scheduler.live) if not core._recovery.isolation.may_run(name)]
            for name in held:
                output = core.abort(name)
                assert output is not None
                assert output.finished
            outputs = run(core)
        assert len(held) + len(outputs) == 12
        assert_drained(core)


def test_an_engine_that_can_compute_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with tiny_core() as core:
        add_all(core)
        with (
            injected(core, "before computing", lambda _: True),
            pytest.raises(EngineDeadError, match="the engine cannot compute any step") as caught,
        ):
            run(core)
        assert isinstance(caught.value.__cause__, InjectedError)
        assert core.stats.finished[FinishReason.ERROR] == 0, "nobody was blamed"


def test_an_engine_whose_accounting_is_broken_says_so() -> None:
    with tiny_core() as core:
        add_all(core)
        core.step()
        core.scheduler.kv.pool.allocate(1)  # a block that no table holds
        with (
            injected(core, "before computing", times(1)),
            pytest.raises(EngineDeadError, match=r"block accounting .* counts 1 references, tables hold 0"),
        ):
            run(core)


class TestFaultIsolation:
    def test_all_are_tried_once_more_before_anybody_is_held_back(self) -> None:
        isolation = FaultIsolation()
        assert isolation.failed(dict.fromkeys(names(4), 1)) is None
        assert all(map(isolation.may_run, names(4)))

    def test_the_culprit_is_found_in_a_logarithmic_number_of_steps(self) -> None:
        for count in (1, 2, 3, 7, 8, 100):
            for culprit in (0, count // 2, count - 1):
                assert find(count, {culprit}) <= 3 + math.ceil(math.log2(count))

    def test_every_culprit_is_found(self) -> None:
        assert find(16, {0, 3, 4, 15}) <= 4 * (3 + 4)

    def test_a_failure_of_others_is_a_first_one(self) -> None:
        isolation = FaultIsolation()
        isolation.failed({RequestId("a"): 1})
        assert [isolation.failed({RequestId("b"): 1}) for _ in range(3)] == [None, None, "b"]

    def test_a_request_that_passed_its_point_of_failure_begins_anew(self) -> None:
        isolation = FaultIsolation()
        isolation.failed({RequestId("a"): 8})
        isolation.advance(lambda _: 7)  # another chunk of its prompt, but not that one
        assert [isolation.failed({RequestId("a"): 8}) for _ in range(2)] == [None, "a"]
        isolation.failed({RequestId("b"): 8})
        isolation.advance(lambda _: 8)
        assert isolation.failed({RequestId("b"): 9}) is None

    def test_a_request_that_has_ended_is_no_suspect(self) -> None:
        isolation = FaultIsolation()
        isolation.failed(dict.fromkeys(names(4), 1))
        isolation.failed(dict.fromkeys(names(4), 1))
        assert [isolation.may_run(name) for name in names(4)] == [True, True, False, False]
        assert isolation.advance(lambda name: None if name in names(2) else 0)
        assert [isolation.may_run(name) for name in names(4)] == [False, False, True, True]
        assert isolation.advance(lambda _: None)
        assert all(map(isolation.may_run, names(4)))


def names(count: int) -> list[RequestId]:
    return [RequestId(str(i)) for i in range(count)]


def find(count: int, culprits: set[int]) -> int:
    """How many steps fail until all culprits have ended and the others have got past them; each has one token."""
    isolation = FaultIsolation()
    computed: dict[RequestId, int] = dict.fromkeys(names(count), 0)
    ended: set[RequestId] = set()
    guilty = {RequestId(str(i)) for i in culprits}
    failed = 0
    while guilty - ended or any(not computed[name] for name in computed.keys() - ended):
        isolation.advance(lambda name: None if name in ended else computed.get(name))
        step = [name for name in names(count) if name not in ended and isolation.may_run(name)]
        assert step
        if guilty & set(step):
            failed += 1
            if (found := isolation.failed(dict.fromkeys(step, 1))) is not None:
                assert found in guilty
                ended.add(found)
        else:
            computed.update(dict.fromkeys(step, 1))
    return failed
