"""The engine's outputs on their way to an answer: what many prompts and completions cost is spread over many turns."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.errors import RequestError
from octavo.request import DEFAULT_CONTEXT, RequestContext
from octavo.sampling_params import SamplingParams
from octavo.server.answer_json import free, json_bytes, json_pieces
from octavo.server.answers import completions
from octavo.server.answers.completions import CompletionAnswer
from octavo.server.answers.generation import AT_ONCE, Job
from octavo.server.answers.logprobs import TokenTexts
from octavo.server.bodies.openai_bodies import CompletionBody
from octavo.server.bodies.prompts import EncodedPrompt
from octavo.server.bodies.read_bodies import CompletionRequest
from octavo.server.http.turnstile import Turnstile
from tests.engine.tiny_engine import tiny_core
from tests.server.fake_engine import FakeEngine

NUM_PROMPTS = 200
PARAMS = SamplingParams(max_tokens=1)

pytestmark = pytest.mark.anyio


class EndlessEngine(FakeEngine):
    """Gives every request one output, then nothing; counts how many begin or end in one turn of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.in_this_turn = self.most_in_a_turn = 0

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        return self._endless(str(context.request_id))

    async def _endless(self, request_id: str) -> AsyncIterator[RequestOutput]:
        self.running.add(request_id)
        self._count()
        try:
            await asyncio.sleep(3600)
            yield RequestOutput(request_id, None, [1], [], False)  # type: ignore[arg-type]
        finally:
            self.running.discard(request_id)
            self._count()

    def _count(self) -> None:
        self.in_this_turn += 1
        self.most_in_a_turn = max(self.most_in_a_turn, self.in_this_turn)

    async def watch(self) -> None:
        while True:
            self.in_this_turn = 0
            await asyncio.sleep(0)


def job(
    engine: Any, num_prompts: int = NUM_PROMPTS, params: SamplingParams = PARAMS, request_id: str = "cmpl-1"
) -> Job[CompletionRequest]:
    logprobs = params.prompt_logprobs
    read = CompletionRequest(
        body=CompletionBody(prompt=None, sampling={} if logprobs is None else {"prompt_logprobs": logprobs}),
        model="fake",
        params=params,
        prompts=[EncodedPrompt([1, 2, 3]) for _ in range(num_prompts)],
        cache_salt="",
    )
    return Job(engine, read, RequestContext(request_id=request_id), TokenTexts(engine))


async def test_the_prompts_of_many_bodies_share_their_turns() -> None:
    engine = EndlessEngine()
    watching = asyncio.ensure_future(engine.watch())
    turnstile = Turnstile(AT_ONCE)
    jobs = [replace(job(engine, request_id=f"cmpl-{i}"), turnstile=turnstile) for i in range(5)]
    tasks = [asyncio.ensure_future(each.results()) for each in jobs]
    while len(engine.running) < 5 * NUM_PROMPTS:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    watching.cancel()
    assert not engine.running
    assert engine.most_in_a_turn <= 2 * AT_ONCE


async def test_a_second_cancellation_leaves_nothing_running() -> None:
    engine = EndlessEngine()
    task = asyncio.ensure_future(job(engine).results())
    while len(engine.running) < NUM_PROMPTS:
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert engine.running
    task.cancel()
    await asyncio.wait([task])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not engine.running


@pytest.mark.parametrize(("num_prompts", "in_a_thread"), [(1, False), (NUM_PROMPTS, True)])
async def test_the_answer_to_many_prompts_is_put_together_off_the_event_loop(
    num_prompts: int, in_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noting(response: dict[str, Any]) -> list[bytes]:
        threads.append(threading.current_thread())
        return json_pieces(response)

    monkeypatch.setattr(completions, "json_pieces", noting)
    engine = FakeEngine()
    await engine.start()
    answer = CompletionAnswer(job(engine, num_prompts))
    assert b"".join(await answer.whole()).count(b'"finish_reason"') == num_prompts
    assert [thread is not threading.current_thread() for thread in threads] == [in_a_thread]


async def test_a_stream_of_many_prompts_closes_what_it_began() -> None:
    engine = FakeEngine(step_seconds=0.001)
    await engine.start()
    async with aclosing(job(engine).stream(OutputKind.DELTA)) as outputs:
        await anext(outputs)
    assert not engine.running


def test_a_choice_without_parts_of_its_own_is_encoded_in_one_piece() -> None:
    choices = [{"index": i, "text": "a", "logprobs": None} for i in range(3)]
    pieces = json_pieces({"id": "x", "choices": [*choices, {"index": 3, "logprobs": {"tokens": ["a"]}}]})
    assert [piece for piece in pieces if b'"text"' in piece] == [json_bytes(choice) for choice in choices]
    assert json.loads(b"".join(pieces))["choices"][3] == {"index": 3, "logprobs": {"tokens": ["a"]}}


def test_long_lists_are_emptied_a_few_at_a_time() -> None:
    class Cut(list[int]):
        most = 0

        def __delitem__(self, place: Any) -> None:
            before = len(self)
            super().__delitem__(place)
            Cut.most = max(Cut.most, before - len(self))

    lists = [Cut(range(1000)), Cut(range(3)), Cut()]
    free(lists)
    assert lists == [[], [], []]
    assert 0 < Cut.most <= 64


async def test_prompt_logprobs_are_let_go_in_a_thread_once_they_are_told() -> None:
    engine = FakeEngine()
    await engine.start()
    answer = CompletionAnswer(job(engine, 1, SamplingParams(max_tokens=1, prompt_logprobs=2)))
    (choice,) = json.loads(b"".join(await answer.whole()))["choices"]
    assert len(choice["prompt_logprobs"]) == 3
    assert not answer._prompt_logprobs


async def test_a_request_with_bad_words_is_made_in_a_thread() -> None:
    with tiny_core() as core:
        threads: list[threading.Thread] = []

        def make(*args: Any) -> Any:
            threads.append(threading.current_thread())
            raise RequestError("no more", param="prompt")

        core.inputs.make_without_grammar = make  # type: ignore[assignment]
        engine = AsyncEngine(core, "m")
        await engine.start()
        for words in ((), ("x",)):
            with pytest.raises(RequestError, match="no more"):
                await anext(engine.generate([1], SamplingParams(bad_words=words)))
        await engine.shutdown(0)
    assert [thread is threading.current_thread() for thread in threads] == [True, False]
