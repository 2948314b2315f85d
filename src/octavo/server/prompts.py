"""Turns the prompt or messages of a body into token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from octavo.errors import RequestError
from octavo.request import PinRequest
from octavo.server.engine_client import EngineClient
from octavo.server.pinning import CacheMark
from octavo.server.protocol import check_token_ids

MAX_PROMPTS = 2048
# Characters, or token ids, from which on work is done off the event loop: a few milliseconds of it.
LARGE = 64 * 1024

_ROLES = ("system", "developer", "user", "assistant", "tool")
# What a body must not pass to the template: the server and the tokenizer do.
_TEMPLATE_VARIABLES = (
    *("messages", "tools", "documents", "add_generation_prompt", "tokenize", "conversation"),
    *("template", "chat_template", "self"),
)
_PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"

Result = TypeVar("Result")


async def offload(size: int, work: Callable[[], Result]) -> Result:
    """Run `work()`, in a thread if its input is large, so that other streams continue meanwhile."""
    return work() if size < LARGE else await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, the text where the prompt came as text, and the prefixes to keep cached."""

    token_ids: list[int]
    text: str | None = None
    pins: tuple[PinRequest, ...] = ()


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The separate prompts of a completion body; raises `RequestError` for another form, or an empty one."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise RequestError(f"prompt must be {_PROMPT_FORMS}", param="prompt")
    elif _all_of_type(prompt, int) and prompt:
        prompts = [prompt]
    elif _all_of_type(prompt, str) or _are_token_id_lists(prompt):
        prompts = prompt
    else:
        raise RequestError(f"prompt must be {_PROMPT_FORMS}", param="prompt")
    if not prompts or not all(prompts):
        raise RequestError("prompt must not be empty", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", param="prompt")
    return prompts


def _all_of_type(values: list[Any], expected: type) -> bool:
    # Not isinstance: True is an int, and no token id.
    return all(type(value) is expected for value in values)


def _are_token_id_lists(values: list[Any]) -> bool:
    return _all_of_type(values, list) and all(_all_of_type(part, int) for part in values)


async def encode_prompts(engine: EngineClient, prompt: Any, add_special_tokens: bool) -> list[EncodedPrompt]:
    """Encode every prompt of a completion body; raises `RequestError`."""
    prompts = split_prompts(prompt)
    return await offload(
        sum(map(len, prompts)), lambda: [_encode(engine, part, add_special_tokens) for part in prompts]
    )


def _encode(engine: EngineClient, prompt: str | list[int], add_special_tokens: bool) -> EncodedPrompt:
    if isinstance(prompt, list):
        check_token_ids(prompt, engine.vocab_size, "prompt")
        return EncodedPrompt(prompt)
    token_ids = engine.tokenizer.encode(prompt, add_special_tokens)
    if not token_ids:
        raise RequestError("prompt must not be empty", param="prompt")
    return EncodedPrompt(token_ids, prompt)


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with plain text contents, as templates expect them; raises `RequestError` naming the message."""
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        roles = ", ".join(map(repr, _ROLES))
        raise RequestError(f"{where}.role must be one of {roles}, got {role!r}", param=f"{where}.role")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise RequestError(f"{where}.content is required", param=f"{where}.content")
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    # Templates would make `cache_control` part of the prompt, where they print what they do not know.
    return {name: value for name, value in message.items() if name != "cache_control"} | {"content": content}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        problem = f"of type {kind!r} is not supported by this server" if isinstance(kind, str) else "is not an object"
        raise RequestError(f"{where} {problem}; only parts of type 'text' are", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    return text


async def encode_chat(
    engine: EngineClient,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    template_variables: dict[str, Any] | None = None,
    marks: Sequence[CacheMark] = (),
) -> EncodedPrompt:
    """Render and encode a chat; raises `RequestError`, also for what the template refuses.

    `messages` come from `checked_messages`. Special tokens are normally in the template already. The prefixes that
    `marks` end are measured in tokens of the prompt.
    """
    variables = template_variables or {}
    for name in variables:
        if name in _TEMPLATE_VARIABLES:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")

    def render() -> EncodedPrompt:
        text = engine.tokenizer.apply_chat_template(messages, add_generation_prompt, **variables)
        prompt = _encode(engine, text, add_special_tokens)
        pins = [PinRequest(measure(prompt.token_ids, mark.index), mark.ttl_seconds) for mark in marks]
        return replace(prompt, pins=tuple(pin for pin in pins if pin.num_tokens))

    def measure(token_ids: list[int], index: int) -> int:
        """How many of the prompt's tokens belong to messages up to `index`: they do not depend on what follows."""
        try:
            beginning = engine.tokenizer.apply_chat_template(messages[: index + 1], False, **variables)
        except RequestError:
            # Some templates refuse a chat that ends here. Then what precedes any other text of the rest belongs to it.
            rest = [{**message, "content": "~" + message["content"]} for message in messages[index + 1 :]]
            beginning = engine.tokenizer.apply_chat_template(messages[: index + 1] + rest, False, **variables)
        return _common_length(token_ids, _encode(engine, beginning, add_special_tokens).token_ids)

    return await offload(sum(len(message["content"]) for message in messages), render)


def _common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
