"""The bodies of Ollama's API, and their translation into chats and embeddings.

system, prompt, messages            ->  messages
options, format, think              ->  the fields that stand for them (`foreign_fields`)
thinking, tool_name of a message    ->  reasoning_content, name
keep_alive                          ->  nothing: the model stays loaded
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from octavo.errors import RequestError, shown
from octavo.server.bodies.foreign_fields import OLLAMA_OPTIONS
from octavo.server.bodies.openai_bodies import Objects, RequestBody, Texts, TokenIds

# What a client of this API calls the fields of the chat that its body becomes.
_CHAT_NAMES = {
    **{name: f"options.{option}" for option, name in OLLAMA_OPTIONS.items()},
    "response_format": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
}


def now() -> str:
    """Return the time as in this API: '2026-01-31T12:00:00.123456Z'."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaGenerationBody(RequestBody):
    """What chats and completions of this API have in common."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None

    bulky: ClassVar[tuple[str, ...]] = ("format", "options", "keep_alive")
    chat_names: ClassVar[Mapping[str, str]] = _CHAT_NAMES

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def common(self) -> dict[str, Any]:
        """Return the fields that go into the chat as they are."""
        names = ("format", "options", "think", "logprobs", "top_logprobs")
        return {name: getattr(self, name) for name in names}

    def loaded(self, model: str) -> dict[str, Any]:
        """Return the answer to a body without a prompt, which asks to load the model, or to unload it."""
        reason = "unload" if self.keep_alive in (0, "0", "0s") else "load"
        return {"model": model, "created_at": now(), **self.answered(""), "done": True, "done_reason": reason}

    def answered(self, text: str, **more: Any) -> dict[str, Any]:
        """Return the part of an answer that holds what the model wrote; `more` may be thinking and tool_calls."""
        raise NotImplementedError


class OllamaChatBody(OllamaGenerationBody):
    """`POST /api/chat`."""

    messages: Objects | None = None
    tools: Objects | None = None

    bulky: ClassVar[tuple[str, ...]] = (*OllamaGenerationBody.bulky, "messages", "tools")

    def chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat body; raise `RequestError` naming a field without counterpart."""
        messages = [_chat_message(message, f"messages[{i}]") for i, message in enumerate(self.messages or [])]
        fields = {**self.common(), "messages": messages, "tools": self.tools}
        # As by Ollama's templates, an answer that has begun is continued.
        last = messages[-1] if messages else {"role": ""}
        if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
            fields["continue_final_message"] = True
        return fields

    def answered(self, text: str, **more: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **more}}


class OllamaGenerateBody(OllamaGenerationBody):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: TokenIds | None = None
    suffix: Any = None
    template: Any = None
    images: Any = None

    bulky: ClassVar[tuple[str, ...]] = (*OllamaGenerationBody.bulky, "prompt", "system", "context")
    unsupported: ClassVar[tuple[str, ...]] = ("suffix", "template", "images")
    chat_names: ClassVar[Mapping[str, str]] = {**_CHAT_NAMES, "messages": "prompt"}

    def chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat body; raise `RequestError` naming a field without counterpart."""
        self.refuse_unsupported()
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.common(), "messages": [*system, {"role": "user", "content": self.prompt}]}

    def answered(self, text: str, **more: Any) -> dict[str, Any]:
        return {"response": text, **more}


class OllamaEmbedBody(RequestBody):
    """`POST /api/embed`."""

    input: str | Texts | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None

    bulky: ClassVar[tuple[str, ...]] = ("input", "options", "keep_alive")


class OllamaEmbeddingsBody(RequestBody):
    """`POST /api/embeddings`, the older form of `/api/embed`."""

    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None

    bulky: ClassVar[tuple[str, ...]] = ("prompt", "options", "keep_alive")


class OllamaModelBody(RequestBody):
    """`POST /api/show` and `/api/pull`: the name of a model."""

    name: str | None = None  # the older name of `model`
    verbose: bool | None = None
    stream: bool | None = None
    insecure: bool | None = None

    names: ClassVar[tuple[str, ...]] = ("model", "name")

    @property
    def streams(self) -> bool:
        return self.stream is not False


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if message.get("images"):
        raise RequestError(f"{where}.images are not supported by this server", param=f"{where}.images")
    for name in ("thinking", "tool_name"):
        if not isinstance(message.get(name), str | None):
            raise RequestError(f"{where}.{name} must be a string, got {shown(message[name])}", param=f"{where}.{name}")
    told = {"role": message.get("role"), "content": message.get("content") or ""}
    others = {
        "reasoning_content": message.get("thinking"),
        "tool_calls": message.get("tool_calls"),
        "name": message.get("tool_name"),
        "tool_call_id": message.get("tool_call_id"),
    }
    return told | {name: value for name, value in others.items() if value}
