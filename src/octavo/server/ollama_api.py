"""Ollama's API: its endpoints, of which the official clients use these, and its answers: lines of JSON, and embeddings.

Models are not managed: there is one, which was chosen when the server started. Pulling it succeeds at once, because
many programs do that at their start.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.engine.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server.answer_json import ascii_bytes, dumps, json_bytes, json_pieces
from octavo.server.answers.chat import BlockKind, Change, Closed, Grew, SingleChat
from octavo.server.answers.completions import EmbeddingAnswer
from octavo.server.answers.generation import Job, Usage, seconds_of
from octavo.server.answers.logprobs import chat_logprobs
from octavo.server.apis import OLLAMA
from octavo.server.bodies.local_bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaModelBody,
    OllamaPullBody,
    now,
)
from octavo.server.bodies.messages_body import arguments_object
from octavo.server.bodies.read_bodies import ChatRequest, EmbeddingRequest, ReadAnswer
from octavo.server.engine_client import EngineClient
from octavo.server.handling import Handling
from octavo.server.route import Handlers, get, json_response, post


class OllamaAnswer(SingleChat):
    """One answer of `/api/chat` or `/api/generate`; a stream has lines of JSON."""

    def __init__(self, job: Job[ChatRequest], began: float) -> None:
        super().__init__(job)
        assert isinstance(job.read.origin, OllamaGenerationBody)
        self._body = job.read.origin
        self._began = began
        # The tokens of the answer, which `/api/generate` returns as a context for the next one.
        self._keeps_context = isinstance(self._body, OllamaGenerateBody) and not self._body.raw
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
        return {"model": self.job.read.model, "created_at": now()}

    def _payload(self, output: RequestOutput, *, in_stream: bool = False) -> dict[str, Any]:
        """Return what an output says; in a stream, nothing if it says nothing."""
        parts = _parts(self.read(output))
        completion = self.choice.completion
        if self._keeps_context:
            self._token_ids += completion.token_ids
        if completion.logprobs:
            parts["logprobs"] = chat_logprobs(self.job.texts, completion.token_ids, completion.logprobs)["content"]
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

    def __init__(self, job: Job[EmbeddingRequest], began: float, *, is_single: bool) -> None:
        super().__init__(job)
        self._began = began
        self._is_single = is_single

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        # Encoded one by one, because encoding holds the interpreter's lock.
        vectors = [json_bytes(vector) for vector in self.vectors(outputs)]
        if self._is_single:
            return [b'{"embedding":', *(vectors or [b"[]"]), b"}"]
        pieces = [json_bytes({"model": self.job.read.model})[:-1] + b',"embeddings":[']
        pieces += [b"," * bool(index) + vector for index, vector in enumerate(vectors)]
        payload = {"total_duration": _nanoseconds(time.monotonic() - self._began), "load_duration": 0}
        return [*pieces, b"]," + json_bytes({**payload, "prompt_eval_count": self.usage.prompt_tokens})[1:]]


def line(fields: dict[str, Any]) -> bytes:
    return (dumps(fields) + "\n").encode()


# The tag that names have which the client gives none.
_TAG = ":latest"
# As in Ollama for a model that stays loaded.
_NEVER = "2318-04-07T00:00:00Z"


class OllamaApi(Handlers):
    """The request handlers."""

    def __init__(self, engine: EngineClient, handling: Handling) -> None:
        self._engine = engine
        self._handling = handling
        self._started = now()
        # Ollama's command shows the first twelve characters, and fails where there are fewer.
        identity = f"{engine.info.model_name} {engine.info.architecture} {engine.info.weight_bytes}"
        self._digest = hashlib.sha256(identity.encode()).hexdigest()

    @post("/api/chat", "OllamaChat", OllamaChatBody)
    async def chat(self, request: Request) -> Response:
        """Answer a chat, by Ollama's API."""
        return await self._generation(request, "ollama_chat")

    @post("/api/generate", "OllamaCompletion", OllamaGenerateBody)
    async def generate(self, request: Request) -> Response:
        """Answer a prompt, by Ollama's API."""
        return await self._generation(request, "ollama_generate")

    async def _generation(self, request: Request, method: str) -> Response:
        began = time.monotonic()
        read: ChatRequest | ReadAnswer = await self._handling.read(request, method)
        if isinstance(read, ReadAnswer):
            return self._handling.respond_read(read)
        answer = OllamaAnswer(self._handling.job(request, read, "ollama"), began)
        return await self._handling.respond(request, answer)

    @post("/api/embed", "OllamaEmbeddings", OllamaEmbedBody)
    async def embed(self, request: Request) -> Response:
        """An embedding of each input, by Ollama's API."""
        return await self._embedding(request, "ollama_embed", is_single=False)

    @post("/api/embeddings", "OllamaEmbedding", OllamaEmbeddingsBody)
    async def embed_one(self, request: Request) -> Response:
        """An embedding, by Ollama's older API."""
        return await self._embedding(request, "ollama_embeddings", is_single=True)

    async def _embedding(self, request: Request, method: str, *, is_single: bool) -> Response:
        answer = partial(OllamaEmbedAnswer, began=time.monotonic(), is_single=is_single)
        return await self._handling.answer(request, method, "embd", answer)

    @post("/api/show", "OllamaModel", OllamaModelBody)
    async def show(self, request: Request) -> Response:
        """The model's details, in Ollama's form."""
        body: OllamaModelBody = await self._handling.read(request, "model")
        return self._handling.respond_json(body, json_bytes(self._description()))

    @post("/api/pull", "Status", OllamaPullBody)
    async def pull(self, request: Request) -> Response:
        """Does nothing, for the model that is served."""
        body: OllamaPullBody = await self._handling.read(request, "pulled_model")
        payload = line({"status": "success"})
        return self._handling.respond_json(body, payload, OLLAMA.stream if body.streams else "application/json")

    @get("/api/tags", "OllamaModels")
    async def list_models(self, request: Request) -> Response:
        """The models served, by Ollama's API."""
        return json_response({"models": [self._card(name) for name in self._handling.names]})

    @get("/api/ps", "OllamaModels")
    async def list_running(self, request: Request) -> Response:
        """As /api/tags."""
        running = {"expires_at": _NEVER, "size_vram": 0, "context_length": self._engine.info.max_model_len}
        return json_response({"models": [{**self._card(name), **running} for name in self._handling.names]})

    @get("/api/version", "Version")
    async def show_version(self, request: Request) -> Response:
        """The version of Octavo."""
        return json_response({"version": octavo.__version__})

    def _card(self, name: str) -> dict[str, Any]:
        tagged = name if ":" in name else name + _TAG
        card = {"name": tagged, "model": tagged, "modified_at": self._started, "size": self._engine.info.weight_bytes}
        return {**card, "digest": self._digest, "details": self._details()}

    def _details(self) -> dict[str, Any]:
        family = self._engine.info.architecture
        return {
            "parent_model": "",
            "format": "",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }

    def _description(self) -> dict[str, Any]:
        reader, family = self._handling.reader, self._engine.info.architecture
        tokenizer = reader.tokenizer
        capabilities = {"tools": reader.has_tools, "thinking": reader.has_reasoning}
        return {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in self._engine.info.default_sampling.items()),
            "template": "" if tokenizer is None else tokenizer.chat_template_text,
            "details": self._details(),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": self._engine.info.max_model_len,
                f"{family}.embedding_length": self._engine.info.hidden_size,
                f"{family}.vocab_size": self._engine.info.vocab_size,
            },
            "capabilities": ["completion", *(name for name, has in capabilities.items() if has)],
            "modified_at": self._started,
        }
