"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.request import TokenLogprobs
from octavo.server.answer_json import (
    dumps,
    event,
    free,
    json_pieces,
    offload,
    weight_of,
    weight_of_all,
)
from octavo.server.answers.generation import AT_ONCE, Job, ResponseExtension, Usage
from octavo.server.answers.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from octavo.server.apis import DONE
from octavo.server.bodies.body_reader import CompletionRequest
from octavo.server.bodies.openai_bodies import CompletionBody
from octavo.server.engine_client import EngineClient
from octavo.server.http.turnstile import Turnstile
from octavo.server.ids import new_id
from octavo.server.tenants.keys import Client


class Completions:
    """Handles completion requests with one engine."""

    def __init__(self, engine: EngineClient, texts: TokenTexts) -> None:
        self._engine = engine
        self._texts = texts
        self._turnstile = Turnstile(AT_ONCE, lambda: engine.is_planning, lambda: engine.is_stepping)

    def answer(self, read: CompletionRequest, client: Client, traceparent: str | None = None) -> CompletionAnswer:
        """Return the answer to a body that was read; nothing runs until it is awaited or iterated."""
        body = read.body
        client.check_prompts(len(read.prompts))
        context = client.context(new_id("cmpl"), body.priority, read.cache_salt)
        context = replace(context, traceparent=traceparent)
        job = Job(read.model, read.prompts, read.params, context, turnstile=self._turnstile)
        return CompletionAnswer(self._engine, self._texts, body, job)


class CompletionAnswer:
    """One completion request, answered whole or as a stream.

    Choices are numbered as by OpenAI: completion i of prompt p is choice p * n + i.
    """

    def __init__(self, engine: EngineClient, texts: TokenTexts, body: CompletionBody, job: Job) -> None:
        self._engine = engine
        self._texts = texts
        self._body = body
        self._job = job
        self._usage = Usage(job.prompts)
        self._extension = ResponseExtension(len(job.prompts), tells_ledger=body.tells_ledger, tells_pins=False)
        self._prompt_logprobs: dict[int, list[dict[str, dict[str, Any]] | None]] = {}
        self._choices = [
            _Choice(texts, prompt_index, body) for prompt_index in range(len(job.prompts)) for _ in range(job.params.n)
        ]

    def prompt_text(self, prompt_index: int) -> str:
        """Return the prompt as text, for `echo`."""
        prompt = self._job.prompts[prompt_index]
        if prompt.text is not None:
            return prompt.text
        return self._engine.tokenizer.decode(list(prompt.token_ids), self._job.params.skip_special_tokens)

    @property
    def usage(self) -> Usage:
        """The answer's token usage so far."""
        return self._usage

    def prompt_logprobs_of(self, prompt_index: int, output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
        """Return vLLM's `prompt_logprobs`, which all choices of a prompt share."""
        if prompt_index not in self._prompt_logprobs:
            given = output.prompt_logprobs or ()
            self._prompt_logprobs[prompt_index] = prompt_logprobs(self._texts, output.prompt_ids, given)
        return self._prompt_logprobs[prompt_index]

    async def whole(self) -> list[bytes]:
        """Run the request and return the response body, in pieces."""
        outputs = await self._job.results(self._engine)
        try:
            return await offload(weight_of_all(outputs), lambda: self._assemble(outputs))
        finally:
            self._free()

    def _free(self) -> None:
        """Free the prompt log-probabilities, which may be large, in a thread once the answer has ended."""
        lists, self._prompt_logprobs = list(self._prompt_logprobs.values()), {}
        if lists:
            asyncio.get_running_loop().run_in_executor(None, free, lists)

    def _assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        choices: list[dict[str, Any]] = []
        for prompt_index, output in enumerate(outputs):
            choices.extend(self._new_choices(prompt_index, output))
        told = {"usage": self._usage.report(), **self._extension.report()}
        return json_pieces({**self._head(), "choices": choices, **told})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events: one chunk of bytes per output of the engine."""
        # Everything that stays the same is formatted once, so that a token costs only a few string joins.
        head = dumps(self._head())[:-1] + ',"choices":['
        continuous = self._body.reports_usage_continuously
        async with aclosing(self._job.stream(self._engine, OutputKind.DELTA)) as outputs:
            try:
                async for prompt_index, output in outputs:
                    weight = weight_of(output)
                    yield await offload(weight, partial(self._events_of, prompt_index, output, head, continuous))
            finally:
                self._free()
        told = self._extension.report()
        if self._body.reports_usage:
            told = {"usage": self._usage.report(), **told}
        if told:
            yield event(f"{head}],{dumps(told)[1:]}").encode()
        yield DONE

    def _events_of(self, prompt_index: int, output: RequestOutput, head: str, continuous: bool) -> bytes:
        choices = self._new_choices(prompt_index, output)
        tail = "]}"
        if self._body.reports_usage:
            tail = f'],"usage":{dumps(self._usage.report()) if continuous else "null"}}}'
        return "".join([event(head + dumps(choice) + tail) for choice in choices]).encode()

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._job.response_id,
            "object": "text_completion",
            "created": self._job.created,
            "model": self._job.model,
        }

    def _new_choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        if self._body.scores_only:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.logprobs = "", [], []
        self._usage.add(prompt_index, output)
        self._extension.add(prompt_index, output)
        first = prompt_index * self._job.params.n
        return [
            self._choices[first + completion.index].piece(self, first + completion.index, completion, output)
            for completion in output.outputs
            if completion.token_ids or completion.text or completion.finish_reason
        ]


class _Choice:
    """The state of one choice: whether its first piece, which carries the prompt for `echo`, has been sent.

    It holds no reference to its answer: such a cycle would only be freed by a full garbage collection.
    """

    def __init__(self, texts: TokenTexts, prompt_index: int, body: CompletionBody) -> None:
        self._prompt_index = prompt_index
        self._body = body
        self._begun = False
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                texts,
                skip_special_tokens=body.sampling.get("skip_special_tokens", True),
                as_token_ids=bool(body.return_tokens_as_token_ids),
            )

    def piece(
        self, answer: CompletionAnswer, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Return the choice object for the next part of the completion."""
        text = completion.text
        token_ids: list[int] = completion.token_ids
        logprobs: list[TokenLogprobs | None] = list(completion.logprobs or ())
        first, self._begun = not self._begun, True
        if first and self._body.echo:
            text = answer.prompt_text(self._prompt_index) + text
            if self._logprobs is not None:
                token_ids = output.prompt_token_ids + token_ids
                logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.piece(token_ids, logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if first and self._body.sampling.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = answer.prompt_logprobs_of(self._prompt_index, output)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice
