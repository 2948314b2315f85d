"""What a body's prompt or messages may look like, and the prompts they become."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError, shown
from octavo.limits import RequestLimits
from octavo.request import PinRequest, TokenIds
from octavo.server.tool_use import checked_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
# What a body must not pass to the template: the server and the tokenizer do.
_TEMPLATE_VARIABLES = (
    *("messages", "tools", "documents", "add_generation_prompt", "tokenize", "conversation"),
    *("template", "chat_template", "self"),
)
# Members of messages that are no part of the prompt, or come in another form.
_LEFT_OUT = ("cache_control", "tool_calls")
_UNPACKED_AT_ONCE = 256 * 1024  # bytes
_PROMPT_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, the text where it is to be repeated, and the prefixes to keep cached."""

    token_ids: TokenIds
    text: str | None = None
    pins: tuple[PinRequest, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes are copied; a list of ids would be taken apart and put together one by one, and let nobody else run.
        return _unpack, (array("i", self.token_ids).tobytes(), self.text, self.pins)


def _unpack(packed: bytes, text: str | None, pins: tuple[PinRequest, ...]) -> EncodedPrompt:
    # In pieces, because fresh memory is slow, and between two of them other threads may run.
    token_ids = array("i")
    for start in range(0, len(packed), _UNPACKED_AT_ONCE):
        token_ids.frombytes(packed[start : start + _UNPACKED_AT_ONCE])
    return EncodedPrompt(token_ids, text, pins)


def split_prompts(prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """The separate prompts in a body's field `param`; raises `RequestError` for another form, or an empty one."""
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
    # Not isinstance: True is an int, and no token id.
    return set(map(type, values)) <= {expected}


def _are_token_id_lists(values: list[Any]) -> bool:
    return _all_of_type(values, list) and all(_all_of_type(part, int) for part in values)


def checked_messages(messages: list[dict[str, Any]], limits: RequestLimits) -> list[dict[str, Any]]:
    """The messages with plain text contents, as templates expect them; raises `RequestError` naming the message."""
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
        content = ""
    elif isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param=f"{where}.content")
    # Templates would make `cache_control` part of the prompt, where they print what they do not know.
    return {name: value for name, value in message.items() if name not in _LEFT_OUT} | {"content": content} | calls


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        problem = (
            f"of type {shown(kind)} is not supported by this server" if isinstance(kind, str) else "is not an object"
        )
        raise RequestError(f"{where} {problem}; only parts of type 'text' are", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    return text


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raises `RequestError` for a variable that only the server may set."""
    for name in variables:
        if name in _TEMPLATE_VARIABLES:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two prompts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def end_in_message(rendered: str, message: Mapping[str, Any]) -> str:
    """The rendered chat up to the end of its last message's content, which the answer is to go on with.

    As transformers does it: spaces around the content count where the template keeps them.
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
