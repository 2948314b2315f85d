"""Request bodies: OpenAI's fields, and vLLM's extensions under vLLM's names. `fields` has how they are declared."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal

from octavo.errors import FieldError, shown
from octavo.option import options_of
from octavo.request_limits import RequestLimits
from octavo.sampling_params import SamplingParams, check_limits
from octavo.server.bodies.chat_messages import ROLES
from octavo.server.bodies.fields import (
    EXAMPLE_CHAT,
    Declared,
    RequestBody,
    Schema,
    Served,
    StreamedBody,
    taken,
    token_count,
    token_ids,
    unsupported,
)
from octavo.server.bodies.tools import Guided, structured_outputs_of
from octavo.text.prompt_checks import check_token_ids

OLDEST_MESSAGES = "messages.oldest"
"""Stands among the ignored fields where a chat that was too long lost its oldest messages."""

# A server always turns tokens into text.
PARAMETERS = tuple(name for name in options_of(SamplingParams) if name != "detokenize")
# Those of APIs that return one answer, and log-probabilities in a way of their own.
_OF_SEVERAL = {"n", "best_of", "use_beam_search", "length_penalty", "early_stopping"}
OF_ONE_ANSWER = tuple(name for name in PARAMETERS if name not in _OF_SEVERAL | {"logprobs", "prompt_logprobs"})


def _prompts(server: Served) -> dict[str, Schema]:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", **token_ids(server, least=1)}
    several = {"type": "array", "minItems": 1, "maxItems": server.limits.max_body_prompts}
    return {"any": {"anyOf": [text, {**several, "items": text}, ids, {**several, "items": ids}]}}


def messages_of(server: Served) -> dict[str, Schema]:
    """Return the ranges of a chat's messages, OpenAI's or Anthropic's."""
    part = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": [*ROLES, "function"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": part}]},
            "name": {"type": "string", "maxLength": server.limits.max_name_length},
        },
    }
    return {"array": {"minItems": 1, "maxItems": server.limits.max_messages, "items": message}}


def tools_of(server: Served) -> dict[str, Schema]:
    return {"array": {"maxItems": server.limits.max_tools}}


def tool_choices(server: Served) -> dict[str, Schema]:
    return {"string": {"enum": ["none", "auto", "required"]}}


def priorities(server: Served) -> dict[str, Schema]:
    return {"integer": {"minimum": -server.limits.max_priority, "maximum": server.limits.max_priority}}


def dimensions_of(server: Served) -> dict[str, Schema]:
    return {"integer": {"minimum": server.hidden_size, "maximum": server.hidden_size}}


def _response_formats(server: Served) -> dict[str, Schema]:
    described = {"type": "object", "required": ["schema"], "properties": {"schema": {"type": "object"}}}
    plain = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}}
    by_schema = {
        "type": "object",
        "required": ["type", "json_schema"],
        "properties": {"type": {"const": "json_schema"}, "json_schema": described},
    }
    return {"object": {"anyOf": [plain, by_schema]}}


def _predictions(server: Served) -> dict[str, Schema]:
    members = {"type": {"const": "text"}, "text": {"type": "string"}}
    part = {"type": "object", "required": list(members), "properties": members}
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    properties = {"type": {"const": "content"}, "content": content}
    return {"object": {"required": ["type", "content"], "properties": properties}}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


@dataclass(kw_only=True)
class StreamOptions(Declared):
    """The options of a streaming response."""

    include_usage: bool | None = taken("end the stream with the numbers of tokens")
    continuous_usage_stats: bool | None = taken("tell them with every event")
    include_obfuscation: bool | None = taken("has no effect")


@dataclass(kw_only=True)
class OctavoOptions(Declared):
    """The contents of the response's `octavo` object."""

    ledger: bool | None = taken("report how the cache was used")


@dataclass(kw_only=True)
class Accounted(RequestBody):
    """Fields of OpenAI's bodies that identify the caller; without effect here, except for two."""

    user: str | None = taken("who asks; has no effect", limit="max_name_length")
    safety_identifier: str | None = taken("has no effect", limit="max_name_length")
    prompt_cache_key: str | None = taken("has no effect", limit="max_name_length")
    prompt_cache_retention: str | None = taken("has no effect", limit="max_name_length")
    prompt_cache_options: dict[str, Any] | None = taken("has no effect", bulky=True)
    service_tier: str | None = taken("has no effect", limit="max_name_length")
    metadata: dict[str, Any] | None = taken("has no effect", bulky=True)
    store: bool | None = taken("whether the answer is stored; of the responses API only")
    priority: int | None = taken("lower is served first", ranges=priorities)
    cache_salt: str | None = taken(
        "requests with the same salt share cached prefixes", limit="max_cache_salt_length", bulky=True
    )


@dataclass(kw_only=True)
class GenerationBody(Accounted, StreamedBody, Guided):
    """Fields that completions and chat completions have in common."""

    PARAMETERS: ClassVar[Collection[str]] = PARAMETERS

    stream_options: StreamOptions | None = taken("additional content of a stream")
    response_format: dict[str, Any] | None = taken("the form of the answer", ranges=_response_formats, bulky=True)
    truncate_prompt_tokens: int | None = taken(
        "how many tokens at the prompt's end are kept; -1: as many as fit", ranges=token_count
    )
    return_token_ids: bool | None = taken("return the ids of the prompt's and the answer's tokens")
    return_tokens_as_token_ids: bool | None = taken("name tokens by their ids in log-probabilities")
    echo: bool | None = taken("begin the answer with the prompt")
    add_special_tokens: bool | None = taken("whether the tokenizer adds special tokens to the prompt")
    octavo: OctavoOptions | None = taken("what the answer's octavo object contains")
    logits_processors: Any = unsupported()

    @property
    def tells_ledger(self) -> bool:
        return bool(self.octavo and self.octavo.ledger)

    @property
    def reports_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_usage_continuously(self) -> bool:
        return self.reports_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def params(
        self, vocab_size: int, limits: RequestLimits, defaults: Mapping[str, Any], **more: Any
    ) -> SamplingParams:
        """Return the sampling parameters.

        Args:
            defaults: of parameters that the body does not give.
            more: parameters that the body has in another form.

        Raises:
            RequestError: a field is invalid, or fields contradict each other.
        """
        given = self.sampling
        # First, because the checks below iterate over fields that may be long.
        check_limits(given, limits)
        limits.check_context(self.priority or 0, self.cache_salt or "")
        if self.stream_options is not None and not self.streams:
            raise FieldError("stream_options", "is only allowed when {} is true", "stream")
        if given.get("prompt_logprobs") is not None and self.streams:
            raise FieldError("prompt_logprobs", "is not available when {} is true", "stream")
        searches = given.get("use_beam_search")
        if self.streams and (searches or (given.get("best_of") or 1) > (given.get("n") or 1)):
            name = "use_beam_search" if searches else "best_of above n"
            problem = f"cannot be combined with {name}: the completions are only known when all is computed"
            raise FieldError("stream", problem)
        wanted = structured_outputs_of(self, self.response_format, given.get("structured_outputs"))
        limits.check_structured_outputs(wanted)
        # Beam search does not sample, and would refuse sampling parameters.
        recommended = {} if searches else defaults
        params = SamplingParams(**{**recommended, **given, "structured_outputs": wanted, **more})
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(getattr(params, name) or (), vocab_size, name)
        return params


@dataclass(kw_only=True)
class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}

    prompt: Any = taken("a text, token ids, or a list of either", default=MISSING, ranges=_prompts, bulky=True)
    suffix: Any = unsupported()

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt is scored: `echo` with no output."""
        return bool(self.echo) and self.sampling.get("max_tokens") == 0

    @property
    def logprobs(self) -> int | None:
        return self.sampling.get("logprobs")

    def sampling_params(self, vocab_size: int, limits: RequestLimits, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; see `params`."""
        more: dict[str, Any] = {}
        if self.echo and self.logprobs is not None and self.sampling.get("prompt_logprobs") is None:
            more["prompt_logprobs"] = self.logprobs
        if self.scores_only:
            # The engine always samples after a prompt, so scoring samples one token and drops it.
            more["max_tokens"] = 1
        return self.params(vocab_size, limits, defaults, **more)


@dataclass(kw_only=True)
class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": EXAMPLE_CHAT, "max_completion_tokens": 32}

    PARAMETERS: ClassVar[Collection[str]] = tuple(name for name in PARAMETERS if name != "logprobs")

    messages: list[dict[str, Any]] = taken("what was said so far", default=MISSING, ranges=messages_of, bulky=True)
    # OpenAI's newer name wins if a client sends both.
    max_completion_tokens: int | None = taken("the newer name of max_tokens", ranges=token_count)
    logprobs: bool | None = taken("report the log-probability of each output token")
    top_logprobs: int | None = taken("and of this many most likely ones", like="logprobs")
    add_generation_prompt: bool | None = taken("whether the template begins an answer; the default")
    continue_final_message: bool | None = taken("whether the answer continues the last message")
    include_reasoning: bool | None = taken("whether the answer has its reasoning; the default")
    chat_template_kwargs: dict[str, Any] | None = taken("variables of the chat template", bulky=True)
    reasoning_effort: str | None = taken("how long the model reasons, as its template has it", limit="max_name_length")
    verbosity: str | None = taken("how long the answer is, as the template has it", limit="max_name_length")
    parallel_tool_calls: bool | None = taken("whether the answer may have several calls; the default")
    modalities: list[str] | None = taken(
        "of the answer: text", ranges=lambda server: {"array": {"items": {"const": "text"}}}, bulky=True
    )
    tools: list[dict[str, Any]] | None = taken("the functions that the model may call", ranges=tools_of, bulky=True)
    tool_choice: str | dict[str, Any] | None = taken(
        "whether a tool may, or must, be called", ranges=tool_choices, bulky=True
    )
    prediction: dict[str, Any] | None = taken(
        "text that the answer may contain, which comes sooner where it does; needs --speculative-config",
        ranges=_predictions,
        bulky=True,
    )

    audio: Any = unsupported()
    functions: Any = unsupported()
    web_search_options: Any = unsupported(by_presence=True)
    chat_template: Any = unsupported()
    documents: Any = unsupported()

    @property
    def predicted_text(self) -> str:
        """The text of `prediction`; raises `FieldError` if it is not `{"type": "content", "content": …}`."""
        given = self.prediction
        if given is None:
            return ""
        content = given.get("content") if given.get("type") == "content" else None
        parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part["text"] for part in parts if _is_text(part)]
        if len(texts) < len(parts):
            must = 'must be {"type": "content", "content": …} with a text or a list of text parts'
            raise FieldError("prediction", f"{must}, got {shown(given)}")
        return "".join(texts)

    def sampling_params(self, vocab_size: int, limits: RequestLimits, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; see `params`."""
        if any(modality != "text" for modality in self.modalities or ()):
            raise FieldError("modalities", f"other than text are not supported, got {shown(self.modalities)}")
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs {} to be true", "logprobs")
        limit, older = self.max_completion_tokens, self.sampling.get("max_tokens")
        if limit is not None and older is not None and older < 1:
            raise FieldError("max_tokens", f"must be at least 1, got {shown(older)}")
        return self.params(
            *(vocab_size, limits, defaults),
            max_tokens=older if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


@dataclass(kw_only=True)
class EmbeddingBody(RequestBody):
    """`POST /v1/embeddings`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": ["one text", "another"], "encoding_format": "float"}

    input: Any = taken("a text, token ids, or a list of either", default=MISSING, ranges=_prompts, bulky=True)
    encoding_format: Literal["float", "base64"] | None = taken("how an embedding is written")
    dimensions: int | None = taken("that of the model's embeddings", ranges=dimensions_of)
    user: str | None = taken("who asks; has no effect", limit="max_name_length")
    truncate_prompt_tokens: int | None = taken(
        "how many tokens at an input's end are kept; -1: as many as fit", ranges=token_count
    )
    add_special_tokens: bool | None = taken("whether the tokenizer adds special tokens")
    priority: int | None = taken("lower is served first", ranges=priorities)
    cache_salt: str | None = taken("has no effect", limit="max_cache_salt_length", bulky=True)

    def check_for(self, hidden_size: int, limits: RequestLimits) -> None:
        """Raise `FieldError` for a value that this model does not have."""
        limits.check_context(self.priority or 0, self.cache_salt or "")
        if self.dimensions is not None and self.dimensions != hidden_size:
            raise FieldError(
                "dimensions",
                f"must be {hidden_size}, got {shown(self.dimensions)}: cut down, this model's embeddings would mean "
                "little (it was not trained for that)",
            )


@dataclass(kw_only=True)
class TokenizeBody(RequestBody):
    """`POST /tokenize`: a prompt, or the messages of a chat as its template renders them.

    `content`, `add_special` and `with_pieces` are llama.cpp's names; without `add_special`, a content has no special
    tokens added.
    """

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "Once upon a time"}

    prompt: str | None = taken("a text", bulky=True)
    content: str | None = taken("a text; llama.cpp's name", bulky=True)
    messages: list[dict[str, Any]] | None = taken("a chat", ranges=messages_of, bulky=True)
    add_special: bool | None = taken("whether special tokens are added to content")
    with_pieces: bool | None = taken("return the text of each token too")
    add_special_tokens: bool | None = taken("whether special tokens are added to the prompt; the default")
    add_generation_prompt: bool | None = taken("whether the template begins an answer; the default")
    continue_final_message: bool | None = taken("whether the last message is left open")
    chat_template_kwargs: dict[str, Any] | None = taken("variables of the chat template", bulky=True)
    tools: list[dict[str, Any]] | None = taken("the functions that the model may call", ranges=tools_of, bulky=True)
    return_token_strs: bool | None = taken("return the tokens' names too")


@dataclass(kw_only=True)
class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"tokens": [1, 2, 3]}

    tokens: list[int] = taken(
        "token ids", default=MISSING, ranges=lambda server: {"array": token_ids(server)}, bulky=True
    )
