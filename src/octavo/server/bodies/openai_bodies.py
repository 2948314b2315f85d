"""Request bodies: OpenAI's fields, and vLLM's extensions under vLLM's names.

Types are strict ("5" is not 5). Ranges are checked in `SamplingParams`, where they are declared once. `validation`
handles fields that are not declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from octavo.errors import RequestError, shown
from octavo.limits import RequestLimits
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.bodies.response_format import GUIDED_FIELDS, structured_outputs_of
from octavo.text.prompt_checks import check_token_ids

OLDEST_MESSAGES = "messages.oldest"
"""Stands among the ignored fields where a chat that was too long lost its oldest messages."""

# Validation stops at the first wrong element: a body with millions of them must not become millions of errors.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
TokenBiases = Annotated[dict[str, float], Field(fail_fast=True)]


class RequestBody(BaseModel):
    """The base of every body.

    Fields in `unsupported` are known, and refused unless they have no effect; those in `names` hold names and
    identifiers; those in `bulky` may be of any size, and are dropped once the body has been read.
    `chat_names` says, for a body that is translated into a chat, what its client calls fields of that chat.
    """

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())
    unsupported: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[tuple[str, ...]] = ("model",)
    bulky: ClassVar[tuple[str, ...]] = ()
    # Of the unsupported fields, those that ask for a feature by an empty object too.
    by_presence: ClassVar[tuple[str, ...]] = ()
    chat_names: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of unknown fields that the client sent."""
        return self._ignored

    def note_ignored(self, names: tuple[str, ...]) -> None:
        self._ignored = names

    def check_names(self, limits: RequestLimits) -> None:
        """Raise `RequestError` for a name or identifier that is too long."""
        for name in self.names:
            limits.check_name(name, getattr(self, name))

    def refuse_unsupported(self) -> None:
        """Raise `RequestError` for the first field that requests an unsupported feature."""
        for name in self.unsupported:
            value = getattr(self, name)
            # `is not False`, because 0 is equal to False but asks for something.
            if (value not in (None, "", [], {}) or (value == {} and name in self.by_presence)) and value is not False:
                raise RequestError(f"{name} is not supported by this server", param=name)


class StreamOptions(BaseModel):
    """The options of a streaming response."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OctavoOptions(BaseModel):
    """The contents of the response's `octavo` object."""

    model_config = ConfigDict(extra="ignore", strict=True)

    ledger: bool | None = None


class GenerationBody(RequestBody):
    """What completions and chat completions have in common."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: TokenBiases | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    octavo: OctavoOptions | None = None

    # OpenAI's fields that have no effect here, on the tokens or on what is reported.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # vLLM's fields that Octavo does not support (yet).
    logits_processors: Any = None

    # Structured outputs: OpenAI's name, vLLM's, and vLLM's older ones.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    names: ClassVar[tuple[str, ...]] = (
        *("model", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        "guided_decoding_backend",
    )
    bulky: ClassVar[tuple[str, ...]] = (
        *(
            "stop",
            "stop_token_ids",
            "logit_bias",
            "metadata",
            "prompt_cache_options",
            "cache_salt",
            "allowed_token_ids",
            "bad_words",
        ),
        *("response_format", "structured_outputs", *GUIDED_FIELDS),
    )
    unsupported: ClassVar[tuple[str, ...]] = ("logits_processors",)

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def tells_ledger(self) -> bool:
        return bool(self.octavo and self.octavo.ledger)

    @property
    def reports_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_usage_continuously(self) -> bool:
        return self.reports_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def common_sampling(self, vocab_size: int, limits: RequestLimits) -> dict[str, Any]:
        """Return the given keywords of `SamplingParams`; raise `RequestError` for invalid combinations."""
        self.refuse_unsupported()
        # First, because the checks below iterate over fields that may be long.
        limits.check_sampling(self)
        limits.check_context(self.priority or 0, self.cache_salt or "")
        if self.stream_options is not None and not self.streams:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.streams:
            raise RequestError("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
        if self.streams and (self.use_beam_search or (self.best_of or 1) > (self.n or 1)):
            name = "use_beam_search" if self.use_beam_search else "best_of above n"
            raise RequestError(
                f"stream cannot be combined with {name}: the completions are only known when all is computed",
                param="stream",
            )
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if (wanted := structured_outputs_of(self)) is not None:
            limits.check_structured_outputs(wanted)
            given["structured_outputs"] = wanted
        if self.logit_bias:
            given["logit_bias"] = _token_biases(self.logit_bias, vocab_size)
        check_token_ids(self.stop_token_ids or (), vocab_size, "stop_token_ids")
        check_token_ids(self.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        return given


# Fields that are passed to `SamplingParams` unchanged if they are given; the bodies convert the others themselves.
SAMPLING_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationBody.model_fields and field.name not in ("logit_bias", "structured_outputs")
)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. `prompt`: a string, token ids, or a list of either."""

    prompt: Any
    max_tokens: int | None = 16
    logprobs: int | None = None
    suffix: Any = None

    unsupported: ClassVar[tuple[str, ...]] = (*GenerationBody.unsupported, "suffix")
    bulky: ClassVar[tuple[str, ...]] = (*GenerationBody.bulky, "prompt")

    @property
    def scores_only(self) -> bool:
        """Whether only the prompt is scored: `echo` with no output."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, vocab_size: int, limits: RequestLimits) -> SamplingParams:
        """Return the sampling parameters; raise `RequestError` naming an invalid field."""
        given = self.common_sampling(vocab_size, limits)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
        # The engine always samples after a prompt, so scoring samples one token and drops it.
        max_tokens = 1 if self.scores_only else self.max_tokens
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=self.logprobs)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Objects
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None
    modalities: Texts | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None

    # OpenAI's field without effect here; it makes OpenAI's models faster where the output matches it.
    prediction: Any = None

    audio: Any = None
    functions: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None

    names: ClassVar[tuple[str, ...]] = (*GenerationBody.names, "reasoning_effort", "verbosity")
    bulky: ClassVar[tuple[str, ...]] = (
        *GenerationBody.bulky,
        *("messages", "chat_template_kwargs", "modalities", "tools", "tool_choice", "prediction"),
    )
    unsupported: ClassVar[tuple[str, ...]] = (
        *GenerationBody.unsupported,
        *("audio", "functions", "web_search_options", "chat_template", "documents"),
    )
    by_presence: ClassVar[tuple[str, ...]] = ("web_search_options",)

    def sampling_params(self, vocab_size: int, limits: RequestLimits) -> SamplingParams:
        """Return the sampling parameters; raise `RequestError` naming an invalid field."""
        given = self.common_sampling(vocab_size, limits)
        if any(modality != "text" for modality in self.modalities or ()):
            raise RequestError(
                f"modalities other than text are not supported, got {shown(self.modalities)}", param="modalities"
            )
        if self.top_logprobs:
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                allowed = f"between 0 and {MAX_LOGPROBS}"
                raise RequestError(
                    f"top_logprobs must be {allowed}, got {shown(self.top_logprobs)}", param="top_logprobs"
                )
        # OpenAI's newer name wins if a client sends both.
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(**given, max_tokens=limit, logprobs=logprobs)


class EmbeddingBody(RequestBody):
    """`POST /v1/embeddings`. `input`: a string, token ids, or a list of either."""

    names: ClassVar[tuple[str, ...]] = ("model", "user")
    bulky: ClassVar[tuple[str, ...]] = ("input", "cache_salt")

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def check(self, hidden_size: int, limits: RequestLimits) -> None:
        """Raise `RequestError` naming an invalid field."""
        limits.check_context(self.priority or 0, self.cache_salt or "")
        if self.dimensions is not None and self.dimensions != hidden_size:
            raise RequestError(
                f"dimensions must be {hidden_size}, got {shown(self.dimensions)}: cut down, this model's embeddings "
                "would mean little (it was not trained for that)",
                param="dimensions",
            )


class TokenizeBody(RequestBody):
    """`POST /tokenize`: a prompt, or the messages of a chat as its template renders them.

    `content`, `add_special` and `with_pieces` are llama.cpp's names; without `add_special`, a content has no special
    tokens added.
    """

    bulky: ClassVar[tuple[str, ...]] = ("prompt", "content", "messages", "chat_template_kwargs", "tools")

    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    bulky: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: TokenIds


def _token_biases(logit_bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    try:
        biases = {int(token_id): bias for token_id, bias in logit_bias.items()}
    except ValueError:
        raise RequestError('the keys of logit_bias must be token ids, such as "50256"', param="logit_bias") from None
    check_token_ids(list(biases), vocab_size, "logit_bias")
    return biases
