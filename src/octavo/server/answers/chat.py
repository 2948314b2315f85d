"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.server.answer_json import (
    dumps,
    event,
    json_pieces,
    offload,
    weight_of,
)
from octavo.server.answers.choices import CallIds, ChoiceReader, deltas, message
from octavo.server.answers.generation import Job, ResponseExtension, Usage
from octavo.server.answers.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from octavo.server.apis import DONE
from octavo.server.bodies.body_reader import ChatRequest
from octavo.server.engine_client import EngineClient
from octavo.server.ids import new_id
from octavo.server.tenants.keys import Client


class ChatCompletions:
    """Handles chat requests with one engine."""

    def __init__(self, engine: EngineClient, texts: TokenTexts) -> None:
        self._engine = engine
        self._texts = texts

    def answer(self, read: ChatRequest, client: Client, traceparent: str | None = None) -> ChatAnswer:
        """Return the answer to a body that was read; nothing runs until it is awaited or iterated."""
        context = client.context(new_id("chatcmpl"), read.body.priority, read.cache_salt, read.prompt.pins)
        context = replace(context, traceparent=traceparent)
        job = Job(read.model, [read.prompt], read.params, context)
        return ChatAnswer(self._engine, self._texts, read, job)


class ChatAnswer:
    """One chat request, answered whole or as a stream."""

    def __init__(self, engine: EngineClient, texts: TokenTexts, read: ChatRequest, job: Job) -> None:
        body = read.body
        self._engine = engine
        self._texts = texts
        self._body = body
        self._job = job
        self._echoed = read.echoed
        # One reader per choice, if the answer has a format to parse.
        self._choices = [ChoiceReader(read.speech) for _ in range(job.params.n)] if read.speech else []
        self._ids = CallIds(read.speech.dialect)
        self._usage = Usage(job.prompts)
        self._extension = ResponseExtension(1, tells_ledger=body.tells_ledger, tells_pins=bool(job.context.pins))

    @property
    def usage(self) -> Usage:
        """The answer's token usage so far."""
        return self._usage

    async def whole(self) -> list[bytes]:
        """Run the request and return the response body, in pieces."""
        (output,) = await self._job.results(self._engine)
        return await offload(self._weight(output), lambda: self._assemble(output))

    def _weight(self, output: RequestOutput) -> int:
        parsed = sum(len(completion.text) for completion in output.outputs) if self._choices else 0
        return weight_of(output) + parsed // 2

    def _assemble(self, output: RequestOutput) -> list[bytes]:
        self._usage.add(0, output)
        self._extension.add(0, output)
        response: dict[str, Any] = {
            **self._head("chat.completion"),
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": self._usage.report(),
            **self._extension.report(),
        }
        if self._body.sampling.get("prompt_logprobs") is not None:
            given = output.prompt_logprobs or ()
            response["prompt_logprobs"] = prompt_logprobs(self._texts, output.prompt_ids, given)
        if self._body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        return json_pieces(response)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        if self._choices:
            told = message(self._choices[completion.index].read(completion), self._ids, self._echoed)
        else:
            told = {"role": "assistant", "content": self._echoed + completion.text, "refusal": None}
        return {"index": completion.index, "message": told, **self._reported(completion)}

    def _reported(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the fields of a choice other than its text, for whole answers and for chunks."""
        reported: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": (
                self._choices[completion.index].finish_reason(completion) if self._choices else completion.finish_reason
            ),
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            reported["logprobs"] = chat_logprobs(
                self._texts,
                completion.token_ids,
                completion.logprobs,
                as_token_ids=bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            reported["token_ids"] = completion.token_ids
        return reported

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events: one chunk of bytes per output of the engine."""
        head = dumps(self._head("chat.completion.chunk"))[:-1] + ',"choices":['
        begun = False
        async with aclosing(self._job.stream(self._engine, OutputKind.DELTA)) as outputs:
            async for _, output in outputs:
                weight = self._weight(output)
                if not begun and self._body.return_token_ids:
                    weight += len(output.prompt_ids)
                yield await offload(weight, partial(self._events_of, output, head, first=not begun))
                begun = True
        if last := self._last_event(head):
            yield last.encode()
        yield DONE

    def _events_of(self, output: RequestOutput, head: str, *, first: bool) -> bytes:
        self._usage.add(0, output)
        self._extension.add(0, output)
        tail = "]}"
        if self._body.reports_usage:
            continuous = self._body.reports_usage_continuously
            tail = f'],"usage":{dumps(self._usage.report()) if continuous else "null"}}}'
        chunks = self._roles(head, tail, output) if first else []
        chunks += [
            event(head + delta + tail)
            for completion in output.outputs
            if completion.token_ids or completion.text or completion.finish_reason
            for delta in (self._parsed_deltas(completion) if self._choices else [self._delta(completion)])
        ]
        return "".join(chunks).encode()

    def _last_event(self, head: str) -> str:
        """Return the event after the end of all choices: usage and the `octavo` object, if requested."""
        told = self._extension.report()
        if self._body.reports_usage:
            told = {"usage": self._usage.report(), **told}
        return event(f"{head}],{dumps(told)[1:]}") if told else ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._job.response_id,
            "object": kind,
            "created": self._job.created,
            "model": self._job.model,
        }

    def _roles(self, head: str, tail: str, output: RequestOutput) -> list[str]:
        """Return the first event of every choice, which carries its role."""
        delta = {"role": "assistant", "content": self._echoed}
        if self._body.return_token_ids:
            tail = f'],"prompt_token_ids":{dumps(output.prompt_token_ids)}{tail[1:]}'
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._job.params.n)
        ]
        return [event(head + dumps(choice) + tail) for choice in choices]

    def _parsed_deltas(self, completion: CompletionOutput) -> list[str]:
        """Return one choice object per parsed delta; the last one also carries the fields of `_reported`."""
        told = deltas(self._choices[completion.index].read(completion), self._ids)
        plain = {"logprobs": None, "finish_reason": None}
        says_more = completion.finish_reason or completion.logprobs is not None or self._body.return_token_ids
        chunks = [{"index": completion.index, "delta": delta, **plain} for delta in told]
        if says_more:
            last = chunks.pop() if chunks and completion.finish_reason is None else {"index": completion.index}
            chunks.append({"delta": {}, **last, **self._reported(completion)})
        return [dumps(chunk) for chunk in chunks]

    def _delta(self, completion: CompletionOutput) -> str:
        if completion.finish_reason is None and completion.logprobs is None and not self._body.return_token_ids:
            # The fast path: nearly every event of nearly every stream.
            content = dumps(completion.text)
            return (
                f'{{"index":{completion.index},"delta":{{"content":{content}}},"logprobs":null,"finish_reason":null}}'
            )
        delta = {"content": completion.text} if completion.text else {}
        return dumps({"index": completion.index, "delta": delta, **self._reported(completion)})
