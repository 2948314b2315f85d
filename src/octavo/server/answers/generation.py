"""Shared by the generation endpoints: running a body's prompts on the engine, token usage, and the `octavo` object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from octavo.engine.inspection import report_fields
from octavo.engine.outputs import GRAMMAR_TOO_COMPLEX, RANK_LOST, UNUSABLE_LOGITS, OutputKind, RequestOutput
from octavo.request import RequestContext
from octavo.server.answer_json import HEAVY, dumps, event, free, offload, weight_of
from octavo.server.answers.logprobs import TokenTexts
from octavo.server.apis import DONE
from octavo.server.bodies.prompts import EncodedPrompt
from octavo.server.bodies.read_bodies import ChatRequest, CompletionRequest, ReadRequest
from octavo.server.engine_client import EngineClient
from octavo.server.errors import FAILED_GRAMMAR, FAILED_SAMPLING, FAILED_STEP, LOST_RANK
from octavo.server.http.turnstile import Turnstile

# Number of prompts that are started or aborted in one round of the event loop, over all bodies with several prompts;
# and number of outputs of one body that are passed on before other tasks have a turn.
AT_ONCE = 8
# Number of outputs of one body from which their answer takes long to write.
_MANY_OUTPUTS = 64

Read = TypeVar("Read", bound=ReadRequest)
Generation = TypeVar("Generation", bound=CompletionRequest | ChatRequest)


@dataclass(frozen=True, slots=True)
class Job(Generic[Read]):
    """The engine requests of one body: one per prompt.

    Attributes:
        context: the context of every prompt's request; its `request_id` is the response's id, from which the engine's
            request ids are derived.
        texts: the texts of the model's tokens; shared with other bodies.
        turnstile: limits how many prompts start at a time; shared with other bodies, and used if there are several.
    """

    engine: EngineClient
    read: Read
    context: RequestContext
    texts: TokenTexts
    created: int = field(default_factory=lambda: int(time.time()))
    turnstile: Turnstile = field(default_factory=lambda: Turnstile(AT_ONCE))

    @property
    def response_id(self) -> str:
        return self.context.request_id or ""

    def stream(self, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (prompt index, output) as they arrive; closing the iterator aborts unfinished requests.

        Raises what the engine raises, and an `ApiError` if the engine ended a request because of a fault.
        """

        prompts, params = self.read.prompts, self.read.params

        def start(index: int, context: RequestContext) -> AsyncIterator[RequestOutput]:
            return self.engine.generate(prompts[index].token_ids, params, context, output_kind=kind)

        def start_one_of_many(index: int) -> AsyncIterator[RequestOutput]:
            return start(index, replace(self.context, request_id=f"{self.response_id}-{index}"))

        if len(prompts) == 1:
            return _numbered(start(0, self.context))
        size = max(1, params.num_sequences // AT_ONCE)
        return _merged(len(prompts), start_one_of_many, self.turnstile, size)

    async def results(self) -> list[RequestOutput]:
        """Run all prompts and return their final outputs, in order."""
        async with aclosing(self.stream(OutputKind.FINAL)) as outputs:
            finals = {index: output async for index, output in outputs}
        return [finals[index] for index in range(len(self.read.prompts))]


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    if (aclose := getattr(stream, "aclose", None)) is not None:
        await aclose()


def _refuse_faulty(output: RequestOutput) -> None:
    if output.error == UNUSABLE_LOGITS:
        raise FAILED_SAMPLING()
    if output.error == GRAMMAR_TOO_COMPLEX:
        raise FAILED_GRAMMAR("" if output.error_reason is None else f" {output.error_reason}")
    if output.error == RANK_LOST:
        raise LOST_RANK()
    if output.error is not None:
        raise FAILED_STEP(output.request_id)


async def _numbered(stream: AsyncIterator[RequestOutput]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    try:
        async for output in stream:
            _refuse_faulty(output)
            yield 0, output
    finally:
        await _close(stream)


async def _merged(
    count: int, start_stream: Callable[[int], AsyncIterator[RequestOutput]], turnstile: Turnstile, size: int
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Start streams and merge their outputs in order of arrival; the first error ends all streams.

    Each stream takes `size` of the turnstile's places when it starts and when it is cancelled.
    """
    # Bounded, so that outputs for a slow client wait in the engine's streams, which are bounded too.
    arrivals: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(AT_ONCE)

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                _refuse_faulty(output)
                await arrivals.put((index, output))
            await arrivals.put(None)
        except Exception as error:
            await arrivals.put(error)
        finally:
            await _close(stream)

    pumps: list[asyncio.Task[None]] = []

    async def start() -> None:
        for index in range(count):
            await turnstile.turn(size)
            pumps.append(asyncio.ensure_future(pump(index, start_stream(index))))

    starting = asyncio.ensure_future(start())
    running, taken = count, 0
    try:
        while running:
            arrival = await arrivals.get()
            taken += 1
            if taken % AT_ONCE == 0:
                # Getting from a queue that is not empty lets no other task run.
                await asyncio.sleep(0)
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield arrival
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await _end_in_turns(pumps, turnstile, size)


async def _end_in_turns(tasks: list[asyncio.Task[None]], turnstile: Turnstile, size: int) -> None:
    """Cancel tasks a few at a time and wait for them: aborting a thousand requests takes tens of milliseconds."""
    running = [task for task in tasks if not task.done()]
    try:
        for task in running:
            await turnstile.turn(size)
            task.cancel()
        if running:
            await asyncio.wait(running)
    except asyncio.CancelledError:
        # A caller that is cancelled while it waits must leave nothing running.
        for task in running:
            task.cancel()
        raise


class Answer(Generic[Read]):
    """The answer to one body, whole or as a stream; only one of the two is used. Subclasses write it in an API's form.

    Attributes:
        usage: the token usage so far.
    """

    def __init__(self, job: Job[Read]) -> None:
        self.job = job
        self.usage = Usage(job.read.prompts)

    async def whole(self) -> list[bytes]:
        """Run the job and return the response body, in pieces."""
        outputs = await self.job.results()
        try:
            # Outputs are not inspected if their number alone makes them heavy.
            weight = HEAVY if len(outputs) >= _MANY_OUTPUTS else sum(map(self.weight, outputs))
            pieces = await offload(weight, lambda: self.assemble(outputs))
            self.finished()
            return pieces
        finally:
            self._free_bulk()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run the job and yield the response, as its outputs arrive: one chunk of bytes for each, and a last one."""
        try:
            async with aclosing(self.job.stream(OutputKind.DELTA)) as outputs:
                async for index, output in outputs:
                    yield await offload(self.weight(output), partial(self.render, index, output))
            last = await offload(self.last_weight(), self.last)
            self.finished()
            if last:
                yield last
        finally:
            self._free_bulk()

    def _free_bulk(self) -> None:
        if lists := self.bulk():
            asyncio.get_running_loop().run_in_executor(None, free, lists)

    def weight(self, output: RequestOutput) -> int:
        """Estimate how many small objects are made when an output is written."""
        return weight_of(output)

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        """Return the whole answer to the final outputs, one for each prompt."""
        raise NotImplementedError

    def render(self, index: int, output: RequestOutput) -> bytes:
        """Return what the next output of prompt `index` adds to a stream."""
        raise NotImplementedError

    def last_weight(self) -> int:
        return 0

    def last(self) -> bytes:
        """Return the end of a stream."""
        return b""

    def finished(self) -> None:
        """Called on the event loop when the answer is whole, before its end is sent."""

    def bulk(self) -> list[list[Any]]:
        """Return the long lists of small objects that the answer holds, and let go of them: it has ended."""
        return []


class OpenAIAnswer(Answer[Generation]):
    """The answer to a completion or a chat of OpenAI's API: what both say around their choices.

    Args:
        stream_kind: the name of the object that each event of a stream holds.
        tells_pins: whether pins are reported.
    """

    def __init__(self, job: Job[Generation], stream_kind: str, *, tells_pins: bool) -> None:
        super().__init__(job)
        body = job.read.body
        self._reports_usage, self._continuously = body.reports_usage, body.reports_usage_continuously
        self._tells_ledger, self._tells_pins = body.tells_ledger, tells_pins
        # The last output of each prompt; None until it has come.
        self._ended: list[RequestOutput | None] = [None] * len(job.read.prompts)
        # The common beginning of all events, formatted once, so that a token costs only a few string joins.
        self._stream_head = dumps(self._head(stream_kind))[:-1] + ',"choices":['

    def _head(self, kind: str) -> dict[str, Any]:
        job = self.job
        return {"id": job.response_id, "object": kind, "created": job.created, "model": job.read.model}

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.add(prompt_index, output)
        if output.finished:
            self._ended[prompt_index] = output

    def _totals(self) -> dict[str, Any]:
        return {"usage": self.usage.report(), **self._octavo()}

    def _tail(self) -> str:
        """Return what every event of a stream ends with."""
        if not self._reports_usage:
            return "]}"
        return f'],"usage":{dumps(self.usage.report()) if self._continuously else "null"}}}'

    def last(self) -> bytes:
        """Return the end: `DONE`, after an event with usage and the `octavo` object if they were requested."""
        payload = self._totals() if self._reports_usage else self._octavo()
        return (event(f"{self._stream_head}],{dumps(payload)[1:]}").encode() if payload else b"") + DONE

    def _octavo(self) -> dict[str, Any]:
        """Return `{"octavo": {…}}`, to be merged into the response; empty if nothing was asked for."""
        payload: dict[str, Any] = {}
        if self._tells_ledger:
            payload["ledger"] = [
                None
                if output is None or output.cache_report is None
                else {**report_fields(output.cache_report), **_by_tier(output)}
                for output in self._ended
            ]
        if self._tells_pins:
            payload["pins"] = [
                {
                    "id": receipt.pin_id,
                    "requested_tokens": receipt.num_requested_tokens,
                    "pinned_tokens": receipt.num_pinned_tokens,
                    "ttl_seconds": receipt.ttl_seconds,
                }
                for output in self._ended
                if output is not None
                for receipt in output.pins
            ]
        return {"octavo": payload} if payload else {}


class Usage:
    """Token usage of one response, over all its prompts and choices."""

    def __init__(self, prompts: list[EncodedPrompt]) -> None:
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.completion_tokens = 0
        self._cached_tokens = [0] * len(prompts)
        self._accepted_tokens = [0] * len(prompts)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count the tokens of a delta output."""
        self.add_prompt(prompt_index, output)
        self._accepted_tokens[prompt_index] = output.num_accepted_tokens
        for choice in output.outputs:
            self.completion_tokens += len(choice.token_ids)

    def add_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """Count a prompt's cached tokens."""
        self._cached_tokens[prompt_index] = output.num_cached_tokens

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache, as far as known yet."""
        return sum(self._cached_tokens)

    def report(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if accepted := sum(self._accepted_tokens):
            usage["completion_tokens_details"] = {"accepted_prediction_tokens": accepted}
        return usage


def seconds_of(output: RequestOutput) -> tuple[float, float]:
    """Return the time from an ended request's first step to its first token, and from there to now; 0 without one."""
    if (times := output.times) is None:
        return 0.0, 0.0
    return times.first_token - times.admitted, time.monotonic() - times.first_token


def _by_tier(output: RequestOutput) -> dict[str, Any]:
    """Return the numbers of cached tokens by tier; empty if all were on the device."""
    return {"cached_by_tier": output.cached_by_tier} if len(output.cached_by_tier) > 1 else {}
