"""Checks the prompt or the messages of a body, and prepares them for tokenising and rendering."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError, shown
from octavo.limits import RequestLimits
from octavo.request import PinRequest, TokenIdSeq
from octavo.server.bodies.tool_use import checked_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
# Template variables that a body must not set, because the server and the tokenizer do.
_TEMPLATE_VARIABLES = (
    *("messages", "tools", "documents", "add_generation_prompt", "tokenize", "conversation"),
    *("template", "chat_template", "self"),
)
# Members of messages that are not passed to the template as they are.
_LEFT_OUT = ("cache_control", "tool_calls")
# Types of text parts, including those of the Responses API, as in vLLM.
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
_UNPACKED_AT_ONCE = 256 * 1024  # bytes
_PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A tokenised prompt, with its text if that is to be echoed, and the prefixes to keep cached."""

    token_ids: TokenIdSeq
    text: str | None = None
    pins: tuple[PinRequest, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes are pickled by copying; a list of ids would be pickled one by one while holding the interpreter's lock.
        return _unpack, (array("i", self.token_ids).tobytes(), self.text, self.pins)


def _unpack(packed: bytes, text: str | None, pins: tuple[PinRequest, ...]) -> EncodedPrompt:
    # In pieces, because touching fresh memory is slow, and other threads can run in between.
    token_ids = array("i")
    for start in range(0, len(packed), _UNPACKED_AT_ONCE):
        token_ids.frombytes(packed[start : start + _UNPACKED_AT_ONCE])
    return EncodedPrompt(token_ids, text, pins)


def split_prompts(prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts in a body's field `param`; raise `RequestError` if its form is invalid or a prompt empty."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise RequestError(f"{param} {_PROMPT_FORMS}", param=param)
    elif _all_of_type(prompt, int) and prompt:
        prompts = [prompt]
    elif _all_of_type(prompt, str) or _are_token_id_lists(prompt):
        prompts = prompt
    else:
        raise RequestError(f"{param} {_PROMPT_FORMS}", param=param)
    if not prompts or not all(prompts):
        raise RequestError(f"{param} must not be empty", param=param)
    return prompts


def _all_of_type(values: list[Any], expected: type) -> bool:
    # Not isinstance: True is an int, but not a token id.
    return set(map(type, values)) <= {expected}


def _are_token_id_lists(values: list[Any]) -> bool:
    return _all_of_type(values, list) and all(_all_of_type(part, int) for part in values)


def checked_messages(messages: list[dict[str, Any]], limits: RequestLimits) -> list[dict[str, Any]]:
    """Return messages with plain-text contents, as templates expect; raise `RequestError` naming an invalid message."""
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    limits.check_messages(len(messages))
    parts = sum(len(content) for message in messages if isinstance(content := message.get("content"), list))
    limits.check_messages(parts, "content parts")
    for i, message in enumerate(messages):
        for name in ("role", "name", "tool_call_id"):
            if isinstance(value := message.get(name), str):
                limits.check_name(f"messages[{i}].{name}", value)
    return [_checked_message(message, f"messages[{i}]", limits) for i, message in enumerate(messages)]


def _checked_message(message: dict[str, Any], where: str, limits: RequestLimits) -> dict[str, Any]:
    message = _without_functions(message)
    role = message.get("role")
    if role not in ROLES:
        roles = ", ".join(map(repr, ROLES))
        raise RequestError(f"{where}.role must be one of {roles}, got {shown(role)}", param=f"{where}.role")
    content = message.get("content")
    calls = {}
    if role == "assistant" and message.get("tool_calls"):
        calls = {"tool_calls": checked_calls(message["tool_calls"], f"{where}.tool_calls", limits)}
    if content is None:
        if role != "assistant":
            raise RequestError(f"{where}.content is required", param=f"{where}.content")
        content = message.get("refusal") or ""
    elif isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    # A template that prints unknown members would make `cache_control` part of the prompt.
    return {name: value for name, value in message.items() if name not in _LEFT_OUT} | {"content": content} | calls


def _without_functions(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with OpenAI's older form of a call, or of its result, in today's form."""
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if not message.get("function_call") or message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": message["function_call"]}]}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        problem = (
            f"of type {shown(kind)} is not supported by this server" if isinstance(kind, str) else "is not an object"
        )
        raise RequestError(f"{where} {problem}; only parts of type 'text' are", param=where)
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return text


def check_part(part: Any, where: str) -> None:
    """Raise `RequestError` for a content part that is not text."""
    _part_text(part, where)


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a variable that only the server may set."""
    for name in variables:
        if name in _TEMPLATE_VARIABLES:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def end_in_message(rendered: str, message: Mapping[str, Any]) -> str:
    """Cut a rendered chat at the end of its last message's content, which the answer is to continue.

    As in transformers, whitespace after the content is kept if the template keeps it.
    """
    content = str(message["content"])
    where = rendered.rfind(content.strip())
    if not content.strip() or where < 0:
        raise RequestError(
            "continue_final_message needs a last message whose content the chat template prints",
            param="continue_final_message",
        )
    whole = content.lstrip()
    return rendered[: where + len(whole if rendered.startswith(whole, where) else whole.rstrip())]
