"""The answers of Ollama's API: chats and completions as lines of JSON, and embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server.answer_json import (
    ascii_bytes,
    dumps,
    json_bytes,
    json_pieces,
)
from octavo.server.answers.choices import BlockKind, Change, Closed, Grew, SingleChat
from octavo.server.answers.embeddings import EmbeddingAnswer
from octavo.server.answers.generation import Job, Usage, seconds_of
from octavo.server.answers.logprobs import TokenTexts, chat_logprobs
from octavo.server.bodies.body_reader import ChatRequest
from octavo.server.bodies.messages_body import arguments_object
from octavo.server.bodies.ollama_body import OllamaGenerateBody, OllamaGenerationBody, now
from octavo.server.engine_client import EngineClient
from octavo.server.tenants.keys import Client


class OllamaAnswer(SingleChat):
    """One answer of `/api/chat` or `/api/generate`; a stream has lines of JSON."""

    def __init__(
        self,
        engine: EngineClient,
        texts: TokenTexts,
        read: ChatRequest,
        client: Client,
        traceparent: str | None,
        began: float,
    ) -> None:
        super().__init__(engine, read, client, "ollama", traceparent)
        assert isinstance(read.origin, OllamaGenerationBody)
        self._body = read.origin
        self._texts = texts
        self._began = began
        # The tokens of the answer, which `/api/generate` returns as a context for the next one.
        self._keeps_context = isinstance(read.origin, OllamaGenerateBody) and not read.origin.raw
        self._token_ids: list[int] = []

    def weight(self, output: RequestOutput) -> int:
        context = len(output.prompt_ids) + len(self._token_ids) if output.finished and self._keeps_context else 0
        return super().weight(output) + context

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        (output,) = outputs
        return json_pieces({**self._head(), **self._payload(output), **self._ending(output)})

    def render(self, index: int, output: RequestOutput) -> bytes:
        lines = (
            [line({**self._head(), **payload, "done": False})]
            if (payload := self._payload(output, in_stream=True))
            else []
        )
        if output.finished:
            # In pieces, because the context may be long.
            last = {**self._head(), **self._body.answered(""), **self._ending(output)}
            lines += [*json_pieces(last, ascii_bytes), b"\n"]
        return b"".join(lines)

    def _head(self) -> dict[str, Any]:
        return {"model": self.job.model, "created_at": now()}

    def _payload(self, output: RequestOutput, *, in_stream: bool = False) -> dict[str, Any]:
        """Return what an output says; in a stream, nothing if it says nothing."""
        parts = _parts(self.read(output))
        completion = self.choice.completion
        if self._keeps_context:
            self._token_ids += completion.token_ids
        if completion.logprobs:
            parts["logprobs"] = chat_logprobs(self._texts, completion.token_ids, completion.logprobs)["content"]
        if in_stream and not parts:
            return {}
        # Log-probabilities go next to the message, everything else into it.
        outside = {"logprobs": parts.pop("logprobs")} if "logprobs" in parts else {}
        return {**self._body.answered(parts.pop("content", ""), **parts), **outside}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        reason = self.choice.completion.finish_reason
        context = {"context": [*output.prompt_ids, *self._token_ids]} if self._keeps_context else {}
        return {
            "done": True,
            "done_reason": "stop" if reason is FinishReason.STOP else reason,
            **context,
            **durations(self._began, output, self.usage),
        }


def _parts(changes: Sequence[Change]) -> dict[str, Any]:
    """Return the content, thinking and tool calls that changes add; calls once they are whole."""
    content, thinking = "", ""
    calls: list[dict[str, Any]] = []
    for change in changes:
        match change:
            case Grew(block, text) if block.kind is BlockKind.TEXT:
                content += text
            case Grew(block, text) if block.kind is BlockKind.REASONING:
                thinking += text
            case Closed(block) if block.kind is BlockKind.CALL:
                function = {"name": block.name, "arguments": arguments_object(block.text)}
                calls.append({"id": block.call_id, "function": function})
            case _:
                pass
    parts = {"content": content, "thinking": thinking, "tool_calls": calls}
    return {name: value for name, value in parts.items() if value}


def durations(began: float, output: RequestOutput, usage: Usage) -> dict[str, int]:
    """Return the numbers at an answer's end; times in nanoseconds. Waiting counts in the total only.

    Args:
        began: when the request came, by `time.monotonic`.
    """
    prompt_seconds, answer_seconds = seconds_of(output)
    return {
        "total_duration": _nanoseconds(time.monotonic() - began),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(prompt_seconds),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(answer_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class OllamaEmbedAnswer(EmbeddingAnswer):
    """One answer of `/api/embed` or, with `is_single`, of its older form."""

    def __init__(self, engine: EngineClient, job: Job, began: float, *, is_single: bool) -> None:
        super().__init__(engine, job)
        self._began = began
        self._is_single = is_single

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        # Encoded one by one, because encoding holds the interpreter's lock.
        vectors = [json_bytes(vector) for vector in self.vectors(outputs)]
        if self._is_single:
            return [b'{"embedding":', *vectors, b"}"]
        return embeddings(self.job.model, vectors, self._began, self.usage.prompt_tokens)


def embeddings(model: str, vectors: Sequence[bytes], began: float, prompt_tokens: int) -> list[bytes]:
    """Return the answer of `/api/embed`, in pieces, for vectors as JSON."""
    pieces = [json_bytes({"model": model})[:-1] + b',"embeddings":[']
    pieces += [b"," * bool(index) + vector for index, vector in enumerate(vectors)]
    payload = {"total_duration": _nanoseconds(time.monotonic() - began), "load_duration": 0}
    return [*pieces, b"]," + json_bytes({**payload, "prompt_eval_count": prompt_tokens})[1:]]


def line(fields: dict[str, Any]) -> bytes:
    return (dumps(fields) + "\n").encode()
