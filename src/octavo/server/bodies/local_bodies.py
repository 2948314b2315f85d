"""The bodies of llama.cpp's and Ollama's own APIs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from octavo.errors import FieldError, shown
from octavo.server.bodies.fields import EXAMPLE_CHAT, RequestBody, StreamedBody, taken, unsupported
from octavo.server.bodies.foreign_fields import OLLAMA_OPTIONS
from octavo.server.bodies.openai_bodies import OF_ONE_ANSWER, dimensions_of, tools_of
from octavo.server.engine_client import TokenizerLike

# llama.cpp's value for a token that must not be drawn.
_NEVER = -100.0


@dataclass(kw_only=True)
class LlamaCppBody(StreamedBody):
    """`POST /completion`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "Once upon a time", "n_predict": 16}

    PARAMETERS: ClassVar[Collection[str]] = tuple(
        name for name in (*OF_ONE_ANSWER, "logprobs") if name not in ("logit_bias", "structured_outputs")
    )
    CALLED: ClassVar[Mapping[str, str]] = {
        "max_tokens": "n_predict",
        "most_tokens": "max_tokens",
        "repetition_penalty": "repeat_penalty",
        "logprobs": "n_probs",
        "guided_grammar": "grammar",
        "guided_json": "json_schema",
    }
    SOURCES: ClassVar[Mapping[str, str]] = {"structured_outputs": "grammar"}

    prompt: Any = taken("a text, token ids, or a list of either", default=MISSING, bulky=True)
    most_tokens: int | None = taken("taken for n_predict, as by llama.cpp")
    logit_bias: Any = taken("biases by token id; false keeps a token out", bulky=True)
    guided_grammar: str | None = taken("a grammar of the answer", bulky=True)
    guided_json: dict[str, Any] | None = taken("a JSON Schema of the answer", bulky=True)
    return_tokens: bool | None = taken("return the ids of the answer's tokens")
    cache_prompt: bool | None = taken("has no effect")
    id_slot: int | None = taken("has no effect")

    def completion(self) -> dict[str, Any]:
        """Return the fields of the equivalent completion body; raise `RequestError` for an invalid `logit_bias`."""
        limit = self.most_tokens if (given := self.sampling.get("max_tokens")) is None else given
        return {
            **self.sampling,
            "prompt": self.prompt,
            "max_tokens": None if limit in _NO_LIMIT else limit,
            "logprobs": self.sampling.get("logprobs") or None,
            "guided_grammar": self.guided_grammar or None,
            "guided_json": self.guided_json,
            "logit_bias": _biases(self.logit_bias),
        }


# llama.cpp's numbers for an answer without end, and for one that fills the context.
_NO_LIMIT = (-1, -2)


def _biases(given: Any) -> dict[str, float] | None:
    """Return biases by token id: [[15043, 1.0], [29879, false]], or an object. `false` keeps a token out."""
    if not given:
        return None
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        pairs = given
    else:
        raise FieldError("logit_bias", f"must be a list of [token id, bias], or an object, got {shown(given)}")
    biases = {}
    for token, bias in pairs:
        if isinstance(token, bool) or not isinstance(token, int | str) or not isinstance(bias, int | float):
            raise FieldError("logit_bias", f"must have token ids and numbers, or false, got {shown([token, bias])}")
        try:
            biases[str(token)] = _NEVER if bias is False else float(bias)
        except OverflowError:
            raise FieldError("logit_bias", "must have finite numbers") from None
    return biases


# Of the families that have them: Qwen and CodeGemma, StarCoder, SantaCoder, DeepSeek, CodeLlama, GLM.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>")
# Tokens with which these models end a middle, in addition to their end of sequence.
_ENDS = (
    *_FILE_SEPARATORS,
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<repo_name>", "▁<EOT>", "<EOT>"),
)


@dataclass(kw_only=True)
class InfillBody(LlamaCppBody):
    """`POST /infill`: the fields of `/completion`, of which `prompt` is the beginning of the middle."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "input_prefix": "def f():\n    return ",
        "input_suffix": "\n",
        "n_predict": 16,
    }

    SOURCES: ClassVar[Mapping[str, str]] = {**LlamaCppBody.SOURCES, "prompt": "input_prefix"}

    prompt: str | None = taken("the beginning of the middle", bulky=True)
    input_prefix: str = taken("the text before", default=MISSING, bulky=True)
    input_suffix: str = taken("the text after", default=MISSING, bulky=True)
    input_extra: list[dict[str, Any]] | None = taken("other files: text and filename", bulky=True)


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A model's tokens for filling in the middle.

    Attributes:
        file_separator: the token before another file's name; None if the model has none.
        ends: tokens that end the middle.
    """

    prefix: int
    suffix: int
    middle: int
    file_separator: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> InfillTokens:
        """Find a model's tokens by their names; raises `RequestError` if it has none."""
        for family in _FAMILIES:
            ids = _token_ids(tokenizer, family)
            if len(ids) == len(family):
                prefix, suffix, middle = ids
                separator = next(iter(_token_ids(tokenizer, _FILE_SEPARATORS)), None)
                return cls(prefix, suffix, middle, separator, (*ids, *_token_ids(tokenizer, _ENDS)))
        raise FieldError(
            "input_prefix",
            "needs a model that can fill in the middle: this one's vocabulary has no tokens for a prefix, a suffix and "
            f"a middle, such as {_FAMILIES[0][0]}",
        )

    def prompt(self, body: InfillBody, tokenizer: TokenizerLike, most: int) -> list[int]:
        """Return the prompt as at most `most` tokens.

        As in llama.cpp, what is farthest from the middle is cut off first: extra files, then what is over three
        quarters of the room of the prefix and one quarter of the suffix.
        """
        beginning, started = tokenizer.encode("", True), tokenizer.encode(body.prompt or "", False)
        room = max(0, most - len(beginning) - len(started) - 3)
        prefix, suffix = tokenizer.encode(body.input_prefix, False), tokenizer.encode(body.input_suffix, False)
        suffix = suffix[: max(room // 4, room - len(prefix))]
        prefix = prefix[max(0, len(prefix) - (room - len(suffix))) :]
        extra = self._extra(body.input_extra or [], tokenizer)
        extra = extra[max(0, len(extra) - (room - len(prefix) - len(suffix))) :]
        return [*beginning, *extra, self.prefix, *prefix, self.suffix, *suffix, self.middle, *started]

    def _extra(self, files: list[dict[str, Any]], tokenizer: TokenizerLike) -> list[int]:
        token_ids: list[int] = []
        for place, file in enumerate(files):
            name, text = file.get("filename", ""), file.get("text", "")
            if not isinstance(name, str) or not isinstance(text, str):
                where = f"input_extra[{place}]"
                raise FieldError(where, f"must have a text and a filename, which are strings, got {shown(file)}")
            if self.file_separator is not None:
                token_ids.append(self.file_separator)
            token_ids += tokenizer.encode(f"{name}\n{text}\n" if name else f"{text}\n", False)
        return token_ids


def _token_ids(tokenizer: TokenizerLike, names: Iterable[str]) -> list[int]:
    """Return the ids of those of the names that are tokens."""
    encoded = ((name, tokenizer.encode(name, False)) for name in names)
    return [ids[0] for name, ids in encoded if len(ids) == 1 and tokenizer.id_to_token(ids[0]) == name]


def now() -> str:
    """Return the time as in this API: '2026-01-31T12:00:00.123456Z'."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(kw_only=True)
class OllamaGenerationBody(RequestBody):
    """Fields that chats and completions of this API have in common."""

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

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": EXAMPLE_CHAT, "options": {"num_predict": 32}, "stream": False}

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

    EXAMPLE: ClassVar[Mapping[str, Any]] = {
        "prompt": "Once upon a time",
        "options": {"num_predict": 16},
        "stream": False,
    }

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

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": ["one text", "another"]}

    input: str | list[str] | None = taken("a text, or a list of texts", bulky=True)
    truncate: bool | None = taken("whether an input that is too long loses its end; the default")
    dimensions: int | None = taken("that of the model's embeddings", ranges=dimensions_of)
    options: dict[str, Any] | None = taken("has no effect", bulky=True)
    keep_alive: Any = taken("has no effect", bulky=True)


@dataclass(kw_only=True)
class OllamaEmbeddingsBody(RequestBody):
    """`POST /api/embeddings`, the older form of `/api/embed`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "one text"}

    prompt: str | None = taken("a text", bulky=True)
    options: dict[str, Any] | None = taken("has no effect", bulky=True)
    keep_alive: Any = taken("has no effect", bulky=True)


@dataclass(kw_only=True)
class OllamaModelBody(RequestBody):
    """`POST /api/show`: the name of a model."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {}

    name: str | None = taken("the older name of model", limit="max_name_length")
    verbose: bool | None = taken("has no effect")


@dataclass(kw_only=True)
class OllamaPullBody(OllamaModelBody):
    """`POST /api/pull`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"stream": False}

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
