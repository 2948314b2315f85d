"""The bodies of Ollama's API, and their translation into chats and embeddings.

system, prompt, messages            ->  messages
options, format, think              ->  the fields that stand for them (`foreign_fields`)
thinking, tool_name of a message    ->  reasoning_content, name
keep_alive                          ->  nothing: the model stays loaded
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from octavo.errors import FieldError, shown
from octavo.server.bodies.fields import RequestBody, taken, unsupported
from octavo.server.bodies.foreign_fields import OLLAMA_OPTIONS
from octavo.server.bodies.openai_bodies import dimensions_of, tools_of


def now() -> str:
    """Return the time as in this API: '2026-01-31T12:00:00.123456Z'."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(kw_only=True)
class OllamaGenerationBody(RequestBody):
    """What chats and completions of this API have in common."""

    SOURCES: ClassVar[Mapping[str, str]] = {
        **{name: f"options.{option}" for option, name in OLLAMA_OPTIONS.items()},
        "response_format": "format",
        "structured_outputs": "format",
        "reasoning_effort": "think",
        "chat_template_kwargs": "think",
    }

    stream: bool | None = taken("send the answer as it is written; the default")
    format: str | dict[str, Any] | None = taken('the form of the answer: "json", or a JSON Schema', bulky=True)
    options: dict[str, Any] | None = taken("sampling parameters under Ollama's names", bulky=True)
    think: bool | str | None = taken("whether the model reasons, or how long")
    keep_alive: Any = taken("has no effect: the model stays loaded", bulky=True)
    logprobs: bool | None = taken("report the log-probability of each output token")
    top_logprobs: int | None = taken("and of this many most likely ones", like="logprobs")
    truncate: bool | None = taken("whether a chat that is too long loses its oldest messages; the default")
    shift: bool | None = taken("has no effect")

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


@dataclass(kw_only=True)
class OllamaChatBody(OllamaGenerationBody):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] | None = taken("what was said so far; none: load the model", bulky=True)
    tools: list[dict[str, Any]] | None = taken("the functions that the model may call", ranges=tools_of, bulky=True)

    def chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat body; raise `FieldError` naming a field without counterpart."""
        messages = [_chat_message(message, f"messages[{i}]") for i, message in enumerate(self.messages or [])]
        fields = {**self.common(), "messages": messages, "tools": self.tools}
        # As by Ollama's templates, an answer that has begun is continued.
        last = messages[-1] if messages else {"role": ""}
        if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
            fields["continue_final_message"] = True
        return fields

    def answered(self, text: str, **more: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **more}}


@dataclass(kw_only=True)
class OllamaGenerateBody(OllamaGenerationBody):
    """`POST /api/generate`."""

    SOURCES: ClassVar[Mapping[str, str]] = {**OllamaGenerationBody.SOURCES, "messages": "prompt"}

    prompt: str | None = taken("what the user says; none: load the model", bulky=True)
    system: str | None = taken("the system message", bulky=True)
    raw: bool | None = taken("apply no template")
    context: list[int] | None = taken("the tokens of an earlier answer and its prompt", bulky=True)
    suffix: Any = unsupported()
    template: Any = unsupported()
    images: Any = unsupported()

    def chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat body."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.common(), "messages": [*system, {"role": "user", "content": self.prompt}]}

    def answered(self, text: str, **more: Any) -> dict[str, Any]:
        return {"response": text, **more}


@dataclass(kw_only=True)
class OllamaEmbedBody(RequestBody):
    """`POST /api/embed`."""

    input: str | list[str] | None = taken("a text, or a list of texts", bulky=True)
    truncate: bool | None = taken("whether an input that is too long loses its end; the default")
    dimensions: int | None = taken("that of the model's embeddings", ranges=dimensions_of)
    options: dict[str, Any] | None = taken("has no effect", bulky=True)
    keep_alive: Any = taken("has no effect", bulky=True)


@dataclass(kw_only=True)
class OllamaEmbeddingsBody(RequestBody):
    """`POST /api/embeddings`, the older form of `/api/embed`."""

    prompt: str | None = taken("a text", bulky=True)
    options: dict[str, Any] | None = taken("has no effect", bulky=True)
    keep_alive: Any = taken("has no effect", bulky=True)


@dataclass(kw_only=True)
class OllamaModelBody(RequestBody):
    """`POST /api/show` and `/api/pull`: the name of a model."""

    name: str | None = taken("the older name of model", limit="max_name_length")
    verbose: bool | None = taken("has no effect")
    stream: bool | None = taken("answer in lines; the default")
    insecure: bool | None = taken("has no effect")

    @property
    def streams(self) -> bool:
        return self.stream is not False


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if message.get("images"):
        raise FieldError(f"{where}.images", "are not supported by this server")
    for name in ("thinking", "tool_name"):
        if not isinstance(message.get(name), str | None):
            raise FieldError(f"{where}.{name}", f"must be a string, got {shown(message[name])}")
    payload = {"role": message.get("role"), "content": message.get("content") or ""}
    others = {
        "reasoning_content": message.get("thinking"),
        "tool_calls": message.get("tool_calls"),
        "name": message.get("tool_name"),
        "tool_call_id": message.get("tool_call_id"),
    }
    return payload | {name: value for name, value in others.items() if value}
