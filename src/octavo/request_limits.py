"""The limits of one request: the entries of the option `limits`, their checks, and the table of docs/operate/limits.md.

They bound the work that a few bytes of a body can cause, so that other requests need not wait for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

from octavo.errors import FieldError, OverloadedError, RequestError, shown
from octavo.option import Options, option
from octavo.structured_outputs import StructuredOutputsParams

# The sampler remembers one token less than this of an output's end.
MOST_BAD_WORD_TOKENS = 256


_limit = partial(option, least=0)
# No request at all would pass a limit of 0.
_positive = partial(option, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits(Options):
    """The largest permitted values, checked at construction; raises `ConfigError` with the value in the message."""

    max_stop_strings: int = _limit(16, "stop strings in a request")
    max_stop_string_length: int = _limit(256, "characters in one stop string")
    max_stop_bytes: int = _limit(2048, "bytes (UTF-8) of all stop strings in a request together")
    max_stop_token_ids: int = _limit(256, "stop_token_ids in a request")
    max_logit_bias: int = _limit(1024, "entries in logit_bias")
    max_allowed_token_ids: int = _limit(4096, "allowed_token_ids in a request")
    max_bad_words: int = _limit(128, "bad_words in a request")
    max_bad_word_length: int = _limit(64, "characters, and tokens, in one of the bad_words", most=MOST_BAD_WORD_TOKENS)
    max_grammar_bytes: int = _limit(
        65_536, "bytes (UTF-8) of a structured output's schema, regular expression, choices or grammar"
    )
    max_grammar_depth: int = _limit(
        64, "levels of nested brackets, or of a JSON Schema's objects and arrays, in that description"
    )
    max_grammar_ms: int = _positive(2000, "milliseconds of processor time that compiling that description may take")
    max_n: int = _positive(64, "value of n and best_of")
    max_beam_width: int = _positive(32, "beams in a beam search")
    max_body_prompts: int = _positive(1024, "prompts in one request body")
    max_body_sequences: int = _positive(1024, "completions computed for one request body: prompts times n (or best_of)")
    max_messages: int = _positive(4096, "messages in a chat, and content parts in all of them together")
    max_tools: int = _limit(128, "tools in a chat")
    max_tools_bytes: int = _limit(262_144, "bytes (UTF-8) of all tools in a chat together, as JSON")
    max_tools_depth: int = _limit(32, "levels of nested objects and arrays in a chat's tools, or in a tool call")
    max_priority: int = _limit(1000, "absolute value of a request's priority")
    max_cache_salt_length: int = _limit(256, "characters in cache_salt")
    max_name_length: int = _positive(
        256, "characters in model, user, role and other names and identifiers in a request body"
    )
    max_waiting_requests: int = _positive(
        2048, "requests waiting for their first step; a server refuses more with 503 (LLM has no such limit)"
    )
    max_waiting_tokens: int = _positive(
        4_194_304,
        "prompt tokens of all waiting requests together; a server refuses more with 503, unless nothing else waits "
        "(LLM has no such limit)",
    )

    def check_bad_word_tokens(self, num_tokens: int) -> None:
        """Refuse a bad word that is spelled with too many tokens."""
        self.at_most("max_bad_word_length", "bad_words", num_tokens, "tokens in one word")

    def check_structured_outputs(self, wanted: StructuredOutputsParams | None) -> None:
        """Refuse a structured output whose description is too long or too deeply nested."""
        if wanted is None:
            return
        self.at_most("max_grammar_bytes", "structured_outputs", wanted.num_bytes, f"bytes of {wanted.kind}")
        if (depth := wanted.depth) > (limit := self.max_grammar_depth):
            raise FieldError(
                f"structured_outputs.{wanted.kind}",
                f"is nested {depth} levels deep, but at most {limit} are allowed (--limits max_grammar_depth)",
            )

    def check_context(self, priority: object, cache_salt: object) -> None:
        """Refuse a priority or a cache salt that has the wrong type or exceeds its limit."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise FieldError("priority", f"must be an integer, got {shown(priority)}")
        if abs(priority) > (limit := self.max_priority):
            raise FieldError(
                "priority", f"must be between {-limit} and {limit} (--limits max_priority), got {shown(priority)}"
            )
        if not isinstance(cache_salt, str):
            raise FieldError("cache_salt", f"must be a string, got {shown(cache_salt)}")
        self.at_most("max_cache_salt_length", "cache_salt", len(cache_salt), "characters")

    def check_name(self, param: str, name: str | None) -> None:
        """Refuse a name or identifier that is too long."""
        if name is not None:
            self.at_most("max_name_length", param, len(name), "characters")

    def check_messages(self, count: int, what: str = "messages") -> None:
        """Refuse a chat with too many messages, or with too many content parts."""
        self.at_most("max_messages", "messages", count, what)

    def check_tools(self, count: int, tools: object) -> None:
        """Refuse a chat whose tools are too many, too deeply nested or too large."""
        self.at_most("max_tools", "tools", count, "tools")
        # The list itself counts as a level.
        if nesting(tools, self.max_tools_depth + 2) > self.max_tools_depth + 1:
            raise FieldError(
                "tools", f"are nested more than {self.max_tools_depth} levels deep (--limits max_tools_depth)"
            )
        size = len(json.dumps(tools, ensure_ascii=False).encode(errors="replace"))
        self.at_most("max_tools_bytes", "tools", size, "bytes")

    def check_prompts(self, num_prompts: int, width: int, width_param: str) -> None:
        """Refuse a body with too many prompts, or that asks for too many completions.

        Args:
            width: number of sequences computed for each prompt.
            width_param: name of the parameter that determines it.
        """
        # A body with more prompts than may wait could never be admitted, however often it is sent again.
        least = min(("max_body_prompts", "max_waiting_requests"), key=lambda name: int(getattr(self, name)))
        self.at_most(least, "prompt", num_prompts, "prompts")
        if num_prompts * width > (limit := self.max_body_sequences):
            raise RequestError(
                f"{num_prompts} prompts with {width_param}={width} are {num_prompts * width} completions, but one "
                f"body may ask for at most {limit} (--limits max_body_sequences)",
                param=width_param if num_prompts == 1 else "prompt",
            )

    def check_room(self, waiting_requests: int, waiting_tokens: int, num_tokens: int) -> None:
        """Refuse a prompt of `num_tokens` that the queue has no room for.

        Raises:
            OverloadedError: the queue is full. The message has the limit, but not how much other tenants have waiting.
        """
        if waiting_requests >= self.max_waiting_requests:
            raise OverloadedError(
                f"the queue is full: {self.max_waiting_requests} requests are waiting, the maximum "
                f"(--limits max_waiting_requests); try again later"
            )
        if waiting_requests and waiting_tokens + num_tokens > self.max_waiting_tokens:
            raise OverloadedError(
                f"the queue is full: this request's {num_tokens} prompt tokens would exceed the maximum of "
                f"{self.max_waiting_tokens} waiting tokens (--limits max_waiting_tokens); try again later"
            )

    def at_most(self, limit: str, param: str, count: int, what: str) -> None:
        """Refuse a field that holds more than the entry `limit` allows."""
        if count > (most := getattr(self, limit)):
            raise FieldError(param, f"has {count} {what}, but at most {most} are allowed (--limits {limit})")


def nesting(value: object, most: int) -> int:
    """Return the number of nested levels of objects and arrays in a JSON value, counted up to `most`."""
    depth = 0
    level = [value]
    while depth < most and (level := [each for each in level if isinstance(each, dict | list)]):
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth


DEFAULT_LIMITS = RequestLimits()
