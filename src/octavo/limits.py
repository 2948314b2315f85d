"""What one request may ask for at most, declared once: options, flags, checks and docs/limits.md come from here.

A limit keeps the work that a few bytes of a body can cause small enough that nobody else's request waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from octavo.errors import ConfigError, OverloadedError, RequestError, shown
from octavo.option import flag, option
from octavo.structured_outputs import StructuredOutputsParams

# What the sampler remembers of an output's end is one token less.
MOST_BAD_WORD_TOKENS = 256


class Limited(Protocol):
    """The fields that are checked together: those of `SamplingParams`, and of a request's body before it is one."""

    @property
    def n(self) -> int | None: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def use_beam_search(self) -> bool | None: ...
    @property
    def stop(self) -> str | Sequence[str] | None: ...
    @property
    def stop_token_ids(self) -> Collection[int] | None: ...
    @property
    def logit_bias(self) -> Mapping[Any, float] | None: ...
    @property
    def allowed_token_ids(self) -> Collection[int] | None: ...
    @property
    def bad_words(self) -> Sequence[str] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The largest permitted values. Validated at construction; raises `ConfigError` with the value in the message."""

    max_stop_strings: int = option(16, "most stop strings of a request")
    max_stop_string_length: int = option(256, "longest stop string, in characters")
    max_stop_bytes: int = option(2048, "most bytes (UTF-8) of all stop strings of a request together")
    max_stop_token_ids: int = option(256, "most stop_token_ids of a request")
    max_logit_bias: int = option(1024, "most entries of a request's logit_bias")
    max_allowed_token_ids: int = option(4096, "most allowed_token_ids of a request")
    max_bad_words: int = option(128, "most bad_words of a request")
    max_bad_word_length: int = option(64, "longest of the bad_words, in characters and in tokens")
    max_grammar_bytes: int = option(
        65_536, "most bytes (UTF-8) of the schema, expression, choices or grammar of a structured output"
    )
    max_grammar_depth: int = option(64, "deepest nesting of brackets, or of a JSON Schema's objects and arrays, in it")
    max_grammar_ms: int = option(2000, "longest time that compiling it may take, in milliseconds")
    max_n: int = option(64, "largest n and best_of")
    max_beam_width: int = option(32, "most beams of a beam search")
    max_body_prompts: int = option(1024, "most prompts of one body")
    max_body_sequences: int = option(1024, "most completions computed for one body: its prompts times n (or best_of)")
    max_messages: int = option(4096, "most messages, and most content parts in all, of a chat")
    max_tools: int = option(128, "most tools of a chat")
    max_tools_bytes: int = option(262_144, "most bytes (UTF-8) of all tools of a chat together, as JSON")
    max_tools_depth: int = option(32, "deepest nesting of objects and arrays in a chat's tools, or in a call of one")
    max_priority: int = option(1000, "a request's priority lies between minus this and this")
    max_cache_salt_length: int = option(256, "longest cache_salt, in characters")
    max_name_length: int = option(
        256, "longest model, user, role and other names and identifiers of a body, in characters"
    )
    max_waiting_requests: int = option(
        2048, "requests that may wait for their first step; a server answers more with 503 (LLM has no such limit)"
    )
    max_waiting_tokens: int = option(
        4_194_304,
        "prompt tokens of all waiting requests together; a server answers more with 503, unless nothing else waits "
        "(LLM has no such limit)",
    )

    def __post_init__(self) -> None:
        for limit in fields(RequestLimits):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{limit.name} must be an integer, got {shown(value)}")
            least = 1 if limit.name in _AT_LEAST_ONE else 0
            if value < least:
                raise ConfigError(f"{limit.name} must be at least {least}, got {value}")
        if self.max_bad_word_length > MOST_BAD_WORD_TOKENS:
            raise ConfigError(
                f"max_bad_word_length must be at most {MOST_BAD_WORD_TOKENS}, got {self.max_bad_word_length}"
            )

    def check_sampling(self, params: Limited) -> None:
        """Refuse sampling parameters that are over a limit. O(1) but for the stop strings, which it counts first.

        Raises:
            RequestError: names the field, what it holds, the limit and its option.
        """
        self._check_width(params)
        if params.stop_token_ids:
            self._at_most("max_stop_token_ids", "stop_token_ids", len(params.stop_token_ids), "token ids")
        if params.logit_bias:
            self._at_most("max_logit_bias", "logit_bias", len(params.logit_bias), "entries")
        if params.allowed_token_ids:
            self._at_most("max_allowed_token_ids", "allowed_token_ids", len(params.allowed_token_ids), "token ids")
        if params.bad_words:
            self._at_most("max_bad_words", "bad_words", len(params.bad_words), "words")
            longest = max((len(word) for word in params.bad_words if isinstance(word, str)), default=0)
            self._at_most("max_bad_word_length", "bad_words", longest, "characters in one word")
        if params.stop:
            self._check_stop((params.stop,) if isinstance(params.stop, str) else params.stop)

    def check_bad_word_tokens(self, num_tokens: int) -> None:
        """Refuse a bad word that is spelled with too many tokens."""
        self._at_most("max_bad_word_length", "bad_words", num_tokens, "tokens in one word")

    def check_structured_outputs(self, wanted: StructuredOutputsParams | None) -> None:
        """Refuse a structured output whose description is too long or too deeply nested."""
        if wanted is None:
            return
        self._at_most("max_grammar_bytes", "structured_outputs", wanted.num_bytes, f"bytes of {wanted.kind}")
        if (depth := wanted.depth) > (limit := self.max_grammar_depth):
            raise RequestError(
                f"structured_outputs.{wanted.kind} is nested {depth} levels deep, but at most {limit} are allowed "
                f"({flag('max_grammar_depth')})",
                param="structured_outputs",
            )

    def check_context(self, priority: object, cache_salt: object) -> None:
        """Refuse a priority or a cache salt that is no such thing, or over its limit."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {shown(priority)}", param="priority")
        if abs(priority) > (limit := self.max_priority):
            raise RequestError(
                f"priority must be between {-limit} and {limit} ({flag('max_priority')}), got {shown(priority)}",
                param="priority",
            )
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {shown(cache_salt)}", param="cache_salt")
        self._at_most("max_cache_salt_length", "cache_salt", len(cache_salt), "characters")

    def check_name(self, param: str, name: str | None) -> None:
        """Refuse a name or identifier that is too long."""
        if name is not None:
            self._at_most("max_name_length", param, len(name), "characters")

    def check_messages(self, count: int, what: str = "messages") -> None:
        """Refuse a chat of too many messages, or of too many content parts."""
        self._at_most("max_messages", "messages", count, what)

    def check_tools(self, count: int, tools: object) -> None:
        """Refuse a chat of too many tools, or too large ones."""
        self._at_most("max_tools", "tools", count, "tools")
        # The list itself is a level.
        if nesting(tools, self.max_tools_depth + 2) > self.max_tools_depth + 1:
            raise RequestError(
                f"tools are nested more than {self.max_tools_depth} levels deep ({flag('max_tools_depth')})",
                param="tools",
            )
        size = len(json.dumps(tools, ensure_ascii=False).encode(errors="replace"))
        self._at_most("max_tools_bytes", "tools", size, "bytes")

    def check_prompts(self, num_prompts: int, width: int, width_param: str) -> None:
        """Refuse a body of too many prompts, or of too many completions.

        Args:
            width: sequences computed for each prompt.
            width_param: the parameter that says so.
        """
        # More prompts than may wait could never be taken in, however often they were sent again.
        least = min(("max_body_prompts", "max_waiting_requests"), key=lambda name: int(getattr(self, name)))
        self._at_most(least, "prompt", num_prompts, "prompts")
        if num_prompts * width > (limit := self.max_body_sequences):
            raise RequestError(
                f"{num_prompts} prompts with {width_param}={width} are {num_prompts * width} completions, but one "
                f"body may ask for at most {limit} ({flag('max_body_sequences')})",
                param=width_param if num_prompts == 1 else "prompt",
            )

    def check_room(self, waiting_requests: int, waiting_tokens: int, num_tokens: int) -> None:
        """Refuse a prompt of `num_tokens` for which the queue has no room.

        Raises:
            OverloadedError: with the limit. How much waits is other tenants' business.
        """
        if waiting_requests >= self.max_waiting_requests:
            raise OverloadedError(
                f"as many requests are waiting as may: {self.max_waiting_requests} ({flag('max_waiting_requests')}); "
                "try again later"
            )
        if waiting_requests and waiting_tokens + num_tokens > self.max_waiting_tokens:
            raise OverloadedError(
                f"with this request's {num_tokens} prompt tokens, more would be waiting than may: "
                f"{self.max_waiting_tokens} ({flag('max_waiting_tokens')}); try again later"
            )

    def _check_width(self, params: Limited) -> None:
        width = ("n", params.n) if params.best_of is None else ("best_of", params.best_of)
        for param, value in {"n": params.n, "best_of": params.best_of}.items():
            if isinstance(value, int) and value > self.max_n:
                raise RequestError(
                    f"{param} must be at most {self.max_n} ({flag('max_n')}), got {shown(value)}", param=param
                )
        param, beams = width
        if params.use_beam_search and isinstance(beams, int) and beams > self.max_beam_width:
            raise RequestError(
                f"{param} asks for {shown(beams)} beams, but at most {self.max_beam_width} are allowed "
                f"({flag('max_beam_width')})",
                param=param,
            )

    def _check_stop(self, stop: Sequence[str]) -> None:
        self._at_most("max_stop_strings", "stop", len(stop), "stop strings")
        total = 0
        for text in stop:
            if isinstance(text, str):
                self._at_most("max_stop_string_length", "stop", len(text), "characters in one stop string")
                total += len(text.encode(errors="surrogatepass"))
        self._at_most("max_stop_bytes", "stop", total, "bytes in all stop strings together")

    def _at_most(self, limit: str, param: str, count: int, what: str) -> None:
        if count > (most := getattr(self, limit)):
            raise RequestError(
                f"{param} holds {count} {what}, but at most {most} are allowed ({flag(limit)})", param=param
            )


def nesting(value: object, most: int) -> int:
    """How many levels of objects and arrays a JSON value has, counted up to `most`."""
    depth = 0
    level = [value]
    while depth < most and (level := [each for each in level if isinstance(each, dict | list)]):
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth


# Without these no request at all would pass.
_AT_LEAST_ONE = frozenset(
    {
        *("max_n", "max_beam_width", "max_body_prompts", "max_body_sequences", "max_messages", "max_name_length"),
        *("max_waiting_requests", "max_waiting_tokens", "max_grammar_ms"),
    }
)
DEFAULT_LIMITS = RequestLimits()


def limits_table() -> str:
    """The table of docs/limits.md: one row per limit."""
    rows = [f"| `{flag(limit.name)}` | {limit.default} | {limit.metadata['help']} |" for limit in fields(RequestLimits)]
    return "\n".join(["| option | default | what it limits |", "|---|---:|---|", *rows])
