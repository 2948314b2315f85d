"""The engine behind an event loop: its callers come, leave and fail without disturbing one another."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest

from octavo.engine import async_engine
from octavo.engine.async_engine import DELIVERED_AT_ONCE, AsyncEngine
from octavo.engine.core import EngineCore
from octavo.engine.outputs import STEP_FAILED, Ended, OutputKind, RequestOutput, StepNews, Stream
from octavo.errors import ContextLengthError, EngineDeadError, RequestError, UnreadError
from octavo.grammar.compiler import GrammarCompiler
from octavo.request import DEFAULT_CONTEXT, FinishReason, Request, RequestContext, RequestId, Sequence
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.structured_outputs import StructuredOutputsParams
from tests.engine.tiny_engine import (
    POISON,
    assert_drained,
    break_after,
    is_drained,
    poison,
    slow_down,
    step_for_news,
    tiny_core,
)

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


@pytest.fixture
def core() -> Iterator[EngineCore]:
    with tiny_core() as core:
        yield core


@asynccontextmanager
async def started(core: EngineCore, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core, "tiny", **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown(0)
    assert not engine.is_alive


def tokens(count: int, **params: Any) -> SamplingParams:
    """Exactly `count` greedy tokens."""
    return SamplingParams(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **params})


async def collect(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
) -> list[int]:
    """The token ids of the first completion."""
    ids: list[int] = []
    async for output in engine.generate(prompt, params, context):
        ids += output.outputs[0].token_ids
    return ids


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        await asyncio.sleep(0.002)


async def test_many_callers_at_once_each_get_what_they_get_alone(core: EngineCore) -> None:
    prompts = [[5 + i, 6, 7] * (1 + i % 7) for i in range(12)]
    lengths = range(27, 39)  # each goes on until the last has come, though every arrival lets all have a step or two
    async with started(core) as engine:
        alone = [await collect(engine, prompt, tokens(n)) for prompt, n in zip(prompts, lengths, strict=True)]
        before, go_on = core.stats.num_steps, step_for_news(engine)
        tasks = [asyncio.ensure_future(collect(engine, p, tokens(n))) for p, n in zip(prompts, lengths, strict=True)]
        await until(lambda: core.scheduler.num_running == len(prompts))
        go_on()
        together = await asyncio.gather(*tasks)
        assert together == alone
        assert core.stats.num_steps - before < sum(map(len, alone)) / 4  # they were computed side by side
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_deltas_add_up_to_the_final_output(core: EngineCore) -> None:
    params = tokens(12, n=2, temperature=1.0, seed=3, logprobs=2)
    async with started(core) as engine:
        deltas = [output async for output in engine.generate("the blocks", params)]
        (final,) = [o async for o in engine.generate("the blocks", params, output_kind=OutputKind.FINAL)]
    for whole in final.outputs:
        parts = [part for output in deltas for part in output.outputs if part.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text
        assert [token_id for part in parts for token_id in part.token_ids] == whole.token_ids
        assert [entry for part in parts for entry in part.logprobs] == whole.logprobs
        assert parts[-1].cumulative_logprob == whole.cumulative_logprob
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_each_of_several_completions_ends_once(core: EngineCore) -> None:
    async with started(core) as engine:
        params = tokens(40, n=3, seed=3, temperature=1.0)
        (whole,) = [o async for o in engine.generate(PROMPT, params, output_kind=OutputKind.FINAL)]
        last, first, _ = whole.outputs
        early = next(token_id for token_id in first.token_ids if token_id not in last.token_ids)
        params = tokens(40, n=3, seed=3, temperature=1.0, stop_token_ids=[early])
        parts = [part async for output in engine.generate(PROMPT, params) for part in output.outputs]
    ends = [(part.index, part.finish_reason) for part in parts if part.finish_reason is not None]
    assert sorted(index for index, _ in ends) == [0, 1, 2]
    assert (1, FinishReason.STOP) in ends
    assert ends[-1][0] != 1, "another went on after it"


async def test_a_stop_string_ends_a_stream_in_the_step_that_completes_it(core: EngineCore) -> None:
    async with started(core) as engine:
        (whole,) = [o async for o in engine.generate(PROMPT, tokens(40), output_kind=OutputKind.FINAL)]
        text = whole.outputs[0].text
        stop = text[12:16]
        outputs = [output async for output in engine.generate(PROMPT, tokens(40, stop=[stop]))]
        await until(lambda: is_drained(core) and not engine._streams)
        parts = [part for output in outputs for part in output.outputs]
        assert "".join(part.text for part in parts) == text[: text.index(stop)]
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (FinishReason.STOP, stop)
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        assert token_ids == whole.outputs[0].token_ids[: len(token_ids)]
        assert core.stats.generation_tokens == 40 + len(token_ids), "none was drawn after it"
        assert_drained(core)


async def test_a_request_whose_output_cannot_be_made_ends_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_in = core.outputs._take_in

    def failing(tracked: Any, update: Any) -> None:
        take_in(tracked, update)
        if tracked.request.request_id == "culprit" and update.seq.num_output_tokens > 3:
            raise ValueError("no such character")

    async with started(core) as engine:
        alone = await collect(engine, PROMPT, tokens(30))
        monkeypatch.setattr(core.outputs, "_take_in", failing)
        other = asyncio.ensure_future(collect(engine, PROMPT, tokens(30)))
        context = RequestContext(request_id="culprit")
        outputs = [output async for output in engine.generate(PROMPT, tokens(900), context)]
        assert (outputs[-1].error, outputs[-1].finished) == (STEP_FAILED, True)
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ERROR
        assert await other == alone
        await until(lambda: is_drained(core) and not engine._streams)
        assert core.stats.finished[FinishReason.ERROR] == 1
        assert_drained(core)
    assert "culprit" in caplog.text


async def test_closing_the_iterator_frees_the_blocks_within_a_step(core: EngineCore) -> None:
    async with started(core) as engine:
        go_on = step_for_news(engine)
        other = asyncio.ensure_future(collect(engine, PROMPT, tokens(40)))
        async with aclosing(engine.generate([9] * 100, tokens(900))) as outputs:  # type: ignore[type-var]
            await anext(outputs)
            await until(lambda: core.scheduler.num_running == 2 and go_on.is_waiting)
            steps = core.stats.num_steps
        await until(lambda: core.stats.finished[FinishReason.ABORT] == 1)
        assert core.stats.num_steps - steps <= 1
        go_on()
        assert len(await other) == 40
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_a_request_can_be_given_up_before_it_was_ever_scheduled(core: EngineCore) -> None:
    async with started(core) as engine:
        go_on = step_for_news(engine)
        running = asyncio.ensure_future(collect(engine, PROMPT, tokens(5)))
        await until(lambda: core.scheduler.num_running == 1)
        waiting = asyncio.ensure_future(collect(engine, PROMPT, tokens(5)))
        await asyncio.sleep(0)
        waiting.cancel()
        go_on()
        assert len(await running) == 5
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_a_request_that_another_aborts_ends_with_that_reason(core: EngineCore) -> None:
    slow_down(core, 0.005)
    async with started(core) as engine:
        outputs: list[RequestOutput] = []
        async for output in engine.generate(PROMPT, tokens(900), RequestContext(request_id="mine")):
            outputs.append(output)
            engine.abort("mine")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        engine.abort("mine")  # it is over: nothing happens
        engine.abort("nobody's")
        assert len(await collect(engine, PROMPT, tokens(2), RequestContext(request_id="mine"))) == 2
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


@pytest.mark.parametrize(("give_up_seconds", "num_given_up"), [(60, 5), (0, 0)])
async def test_arrivals_and_departures_each_delay_a_step_for_a_bounded_time(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, give_up_seconds: int, num_given_up: int
) -> None:
    clock = count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(async_engine, "TAKE_IN_SECONDS", 1)
    monkeypatch.setattr(async_engine, "GIVE_UP_SECONDS", give_up_seconds)
    engine = AsyncEngine(core, "tiny")
    waiting, coming = [[core.inputs.make(PROMPT, tokens(4, n=3)) for _ in range(5)] for _ in range(2)]
    for request in waiting:
        core.queue(request)
    for request in coming:
        engine._send(partial(engine._add, request))
    engine._take_in()
    assert len(engine._inbox) == 4
    engine._inbox.clear()
    for request in waiting:
        engine.abort(request.request_id)
    engine._take_in()
    assert len(engine._aborted) == num_given_up
    for request_id in list(core.scheduler.live):
        core.end(request_id)
    assert_drained(core)


async def test_a_request_id_in_use_is_refused_and_its_holder_goes_on(core: EngineCore) -> None:
    async with started(core) as engine:
        go_on = step_for_news(engine)
        first = asyncio.ensure_future(collect(engine, PROMPT, tokens(10), RequestContext(request_id="mine")))
        await until(lambda: core.scheduler.num_running == 1)
        with pytest.raises(RequestError, match="'mine' is in use"):
            await collect(engine, PROMPT, tokens(10), RequestContext(request_id="mine"))
        go_on()
        assert len(await first) == 10
        assert len(await collect(engine, PROMPT, tokens(10), RequestContext(request_id="mine"))) == 10


async def test_an_id_is_in_use_until_its_abort_is_done_and_never_mixes_two_requests(core: EngineCore) -> None:
    slow_down(core, 0.01)
    async with started(core) as engine:
        async with aclosing(engine.generate([9] * 50, tokens(900), RequestContext(request_id="mine"))) as outputs:  # type: ignore[type-var]
            await anext(outputs)
        with pytest.raises(RequestError, match="'mine' is in use"):
            await collect(engine, PROMPT, tokens(4), RequestContext(request_id="mine"))
        await until(lambda: not engine._streams)
        assert core.stats.finished[FinishReason.ABORT] == 1
        again = await collect(engine, PROMPT, tokens(4), RequestContext(request_id="mine"))
        assert again == await collect(engine, PROMPT, tokens(4))
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_a_refused_request_leaves_nothing_behind(core: EngineCore) -> None:
    async with started(core) as engine:
        with pytest.raises(ContextLengthError, match="1024"):
            await collect(engine, PROMPT, tokens(1022), RequestContext(request_id="mine"))
        assert len(await collect(engine, PROMPT, tokens(2), RequestContext(request_id="mine"))) == 2
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_unusable_logits_end_their_request_and_no_other(core: EngineCore) -> None:
    poison(core)
    async with started(core) as engine:
        good = asyncio.ensure_future(collect(engine, PROMPT, tokens(30)))
        outputs = [output async for output in engine.generate([5, POISON], tokens(30))]
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ERROR
        assert len(await good) == 30
        assert engine.is_alive
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_when_a_step_raises_every_caller_hears_of_it_and_everything_is_closed(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []
    core._resources.callback(closed.append, "ranks, stores and logs")
    async with started(core) as engine:
        slow_down(core, 0.002)
        break_after(core, 10)
        callers = [collect(engine, PROMPT, tokens(900)) for _ in range(3)]
        errors = await asyncio.gather(*callers, return_exceptions=True)
        assert all(isinstance(error, EngineDeadError) for error in errors)
        assert isinstance(errors[0].__cause__, RuntimeError)
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="the engine has stopped: secret insides"):
            await collect(engine, PROMPT, tokens(1))
        await until(lambda: bool(closed))
    assert "the step loop died" in caplog.text
    assert "RuntimeError: secret insides" in caplog.text


async def test_structured_outputs_are_prepared_once_when_the_engine_is_first_idle(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[GrammarCompiler] = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda compiler: prepared.append(compiler))
    async with started(core, idle_audit_seconds=0.01, prepare_grammars=True) as engine:
        for _ in range(3):
            await until(lambda: len(prepared) > 0)
            await collect(engine, PROMPT, tokens(3))
            await asyncio.sleep(0.05)
    assert prepared == [core.inputs.grammars]


async def test_requests_are_computed_while_structured_outputs_are_prepared(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def read(compiler: GrammarCompiler) -> None:
        begun.set()
        assert may_end.wait(120)

    monkeypatch.setattr(GrammarCompiler, "_vocabulary", property(read))
    async with started(core, idle_audit_seconds=0.01, prepare_grammars=True) as engine:
        try:
            await until(begun.is_set)
            await asyncio.wait_for(collect(engine, PROMPT, tokens(3)), 60)
        finally:
            may_end.set()


@pytest.mark.slow
async def test_an_idle_engine_proves_its_accounting(core: EngineCore) -> None:
    async with started(core, idle_audit_seconds=0.02) as engine:
        # It is idle from the start. Once is enough as long as nothing happens.
        for audits in (1, 2, 3):
            await until(lambda audits=audits: core.stats.num_audits == audits)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            assert core.stats.num_audits == audits
            await collect(engine, PROMPT, tokens(3))
    assert (core.stats.num_failed_audits, core.stats.audit_problem) == (0, None)


async def test_all_garbage_is_collected_once_the_engine_has_been_idle_for_a_while(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[object] = []
    monkeypatch.setattr(async_engine.gc, "collect", lambda: collected.append(None))  # type: ignore[attr-defined]
    async with started(core, idle_audit_seconds=0.01, idle_collect_seconds=0.01) as engine:
        for times in (1, 2, 3):  # it is idle from the start
            await until(lambda times=times: len(collected) == times)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert len(collected) == times
            assert len(await collect(engine, PROMPT, tokens(3))) == 3


async def test_a_failed_audit_is_told_loudly_and_the_engine_goes_on(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(core, idle_audit_seconds=0.02) as engine:
        await until(lambda: core.stats.num_audits == 1)  # so that the next one follows a request
        (lost,) = core.scheduler.kv.pool.allocate(1)  # a block that no table holds
        for failures in (1, 2):
            assert len(await collect(engine, PROMPT, tokens(3))) == 3
            await until(lambda failures=failures: core.stats.num_failed_audits == failures)  # type: ignore[misc]
        assert f"block {lost} counts 1 references" in (core.stats.audit_problem or "")
        assert engine.is_alive
        core.scheduler.kv.pool.release([lost])
        await collect(engine, PROMPT, tokens(3))
        await until(lambda: core.stats.audit_problem is None)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, "the same problem is logged once"


async def test_shutdown_lets_what_runs_finish(core: EngineCore) -> None:
    async with started(core) as engine:
        go_on = step_for_news(engine)
        running = asyncio.ensure_future(collect(engine, PROMPT, tokens(20)))
        await until(lambda: core.scheduler.num_running == 1)
        leaving = asyncio.ensure_future(engine.shutdown(60))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(engine, PROMPT, tokens(1))
        go_on()
        assert len(await running) == 20
        await leaving
        assert_drained(core)


async def test_shutdown_aborts_what_does_not_finish_in_time(core: EngineCore) -> None:
    async with started(core) as engine:
        step_for_news(engine)
        running = asyncio.ensure_future(collect(engine, PROMPT, tokens(900)))
        await until(lambda: core.scheduler.num_running == 1)
        await engine.shutdown(0.05)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await running
        assert_drained(core)


async def test_an_engine_that_was_never_started_says_so(core: EngineCore) -> None:
    engine = AsyncEngine(core, "tiny")
    with pytest.raises(EngineDeadError, match="not been started"):
        await collect(engine, PROMPT, tokens(1))
    await engine.shutdown(0)


async def test_a_stop_is_never_missed(core: EngineCore) -> None:
    """The stop may fall anywhere in the loop of the engine's thread: before, in, or after it looks for work."""
    with core._resources.pop_all():  # each round starts an engine with the same core
        for delay in range(40):
            async with started(core) as engine:
                await collect(engine, PROMPT, tokens(1))
                await asyncio.sleep(delay * 2e-5)
                async with asyncio.timeout(60):
                    await engine.shutdown(0)


def expect(engine: AsyncEngine, count: int) -> dict[RequestId, tuple[Sequence, Stream]]:
    """Streams that wait for outputs of requests which the engine's thread knows nothing of."""
    expected = {}
    for _ in range(count):
        request = engine.core.inputs.make(PROMPT, tokens(9))
        engine.core.outputs.add(request, None, OutputKind.DELTA)
        stream = engine._streams[request.request_id] = Stream()
        expected[request.request_id] = (request.sequences[0], stream)
    return expected


async def test_a_step_of_many_outputs_is_handed_out_in_several_turns_of_the_event_loop(core: EngineCore) -> None:
    async with started(core) as engine:
        expected = expect(engine, 3 * DELIVERED_AT_ONCE)
        engine._deliver(StepNews([SequenceUpdate(seq, (7,)) for seq, _ in expected.values()]))
        last = [SequenceUpdate(seq, (8,), finish_reason=FinishReason.LENGTH) for seq, _ in expected.values()]
        engine._deliver(StepNews(last))
        assert sum(stream.qsize() for _, stream in expected.values()) == DELIVERED_AT_ONCE
        await until(lambda: not engine._undelivered)
        for _, stream in expected.values():
            received = [stream.get_nowait() for _ in range(stream.qsize())]
            assert [output.outputs[0].token_ids for output in received] == [[7], [8]]
        assert not engine._streams


async def test_requests_that_end_are_told_so_a_few_sequences_at_a_time(core: EngineCore) -> None:
    async with started(core) as engine:
        wide = [core.inputs.make(PROMPT, tokens(9, n=DELIVERED_AT_ONCE)) for _ in range(3)]
        for request in wide:
            core.outputs.add(request, None, OutputKind.FINAL)
        streams = [Stream() for _ in wide]
        engine._streams |= {request.request_id: stream for request, stream in zip(wide, streams, strict=True)}
        engine._deliver(StepNews(ended=[Ended(request) for request in wide]))
        assert [stream.qsize() for stream in streams] == [1, 0, 0]
        await until(lambda: all(stream.qsize() for stream in streams))


async def test_outputs_that_have_arrived_come_before_the_error_that_ends_all(core: EngineCore) -> None:
    async with started(core) as engine:
        expected = expect(engine, 2 * DELIVERED_AT_ONCE)
        engine._deliver(StepNews([SequenceUpdate(seq, (7,)) for seq, _ in expected.values()]))
        engine._fail(EngineDeadError("over"))
        for _, stream in expected.values():
            assert [type(stream.get_nowait()) for _ in range(stream.qsize())] == [RequestOutput, EngineDeadError]


async def test_a_request_whose_outputs_are_not_read_is_ended(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "MAX_UNREAD", 100)
    async with started(core) as engine:
        unread = engine.generate(PROMPT, tokens(900, n=2, logprobs=3))
        await anext(unread)
        await until(lambda: is_drained(core) and not engine._streams)
        assert core.stats.finished[FinishReason.ABORT] == 1
        with pytest.raises(UnreadError, match="were not read: the request was ended"):
            async for _ in unread:
                pass
        # Who reads is not cut, however much it is. No step begins before the last one's output was read.
        may_step, execute, num_read = threading.Semaphore(1), core.runner.execute, 0

        def wait_and_execute(plan: StepPlan) -> StepResult:
            assert may_step.acquire(timeout=60)
            return execute(plan)

        core.runner.execute = wait_and_execute
        async for _ in engine.generate(PROMPT, tokens(200)):
            num_read += 1
            may_step.release()
        assert num_read == 200
        await until(lambda: is_drained(core) and not engine._streams)
        assert_drained(core)


async def test_a_tenants_slow_grammars_delay_neither_grammars_nor_prompts_of_others(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def compiles(lark: str, seconds: float) -> None:
        assert "slow" not in lark or ends.wait(600)

    monkeypatch.setattr("octavo.grammar.compiler.try_compiling", compiles)

    def answer(text: str, prompt: list[int], tenant: str) -> asyncio.Task[list[int]]:
        wanted = StructuredOutputsParams(choice=[text]) if text else None
        params = SamplingParams(max_tokens=3, structured_outputs=wanted)
        return asyncio.ensure_future(collect(engine, prompt, params, RequestContext(tenant=tenant)))

    async with started(core) as engine:
        try:
            # More than there are threads that work for the event loop.
            slow = [answer(f"slow {i}", PROMPT, "ada") for i in range(40)]
            while engine.core.inputs.grammars is None or not engine._grammars._turns._held["ada"]:
                await asyncio.sleep(0.001)
            long_prompt = [5] * async_engine._MADE_AT_ONCE
            async with asyncio.timeout(120):
                assert await answer("yes", PROMPT, "ben")
                with pytest.raises(ContextLengthError):
                    await answer("", long_prompt, "ben")
        finally:
            ends.set()
        assert all(await asyncio.gather(*slow))


async def test_a_tenants_long_prompts_hold_up_no_others(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, make = threading.Event(), core.inputs.make_without_grammar

    def make_slowly(prompt: list[int], params: SamplingParams, context: RequestContext) -> Request:
        assert context.tenant != "ada" or ends.wait(600)
        return make(prompt, params, context)

    monkeypatch.setattr(core.inputs, "make_without_grammar", make_slowly)
    too_long = [5] * async_engine._MADE_AT_ONCE

    def refused(tenant: str) -> asyncio.Task[list[int]]:
        return asyncio.ensure_future(collect(engine, too_long, tokens(1), RequestContext(tenant=tenant)))

    async with started(core) as engine:
        try:
            # More than there are threads that work for the event loop.
            slow = [refused("ada") for _ in range(40)]
            while not engine._making._turns._held["ada"]:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(120):
                with pytest.raises(ContextLengthError):
                    await refused("ben")
        finally:
            ends.set()
        refusals = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(refusal, ContextLengthError) for refusal in refusals)


async def test_its_threads_end_with_the_engine_and_prompts_that_wait_are_refused(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ends, make = set(threading.enumerate()), threading.Event(), core.inputs.make_without_grammar
    async with started(core) as engine:
        params = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
        assert await collect(engine, PROMPT, params)

        def make_slowly(prompt: list[int], params: SamplingParams, context: RequestContext) -> Request:
            assert ends.wait(600)
            return make(prompt, params, context)

        monkeypatch.setattr(core.inputs, "make_without_grammar", make_slowly)
        waiting = [asyncio.ensure_future(collect(engine, PROMPT, params)) for _ in range(8)]
        await until(lambda: sum(map(len, engine._making._turns._waiting.values())) > 0)
    ends.set()
    refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in refused] == [EngineDeadError] * 8
    await until(lambda: not {thread for thread in set(threading.enumerate()) - before if "octavo" in thread.name})
