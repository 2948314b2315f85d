"""Turns prompts and chats into tokens: texts are tokenised, and chats rendered by the model's template."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from octavo.errors import ContextLengthError, FieldError, RequestError, shown
from octavo.request import PinRequest, TokenIdSeq
from octavo.server.bodies.chat_messages import CacheMark
from octavo.server.bodies.openai_bodies import ChatBody, TokenizeBody
from octavo.server.bodies.tools import RenderedChat
from octavo.server.engine_client import TokenizerLike
from octavo.text.prompt_checks import check_text_length, check_token_ids

# Template variables that a body must not set, because the server and the tokenizer do.
_TEMPLATE_VARIABLES = (
    *("messages", "tools", "documents", "add_generation_prompt", "tokenize", "conversation"),
    *("template", "chat_template", "self"),
)
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
        raise FieldError(param, f"{_PROMPT_FORMS}, got {shown(prompt)}")
    elif _all_of_type(prompt, int) and prompt:
        prompts = [prompt]
    elif _all_of_type(prompt, str) or _are_token_id_lists(prompt):
        prompts = prompt
    else:
        raise FieldError(param, f"{_PROMPT_FORMS}, got {shown(prompt)}")
    if not prompts or not all(prompts):
        raise FieldError(param, "must not be empty")
    return prompts


def _all_of_type(values: list[Any], expected: type) -> bool:
    # Not isinstance: True is an int, but not a token id.
    return set(map(type, values)) <= {expected}


def _are_token_id_lists(values: list[Any]) -> bool:
    return _all_of_type(values, list) and all(_all_of_type(part, int) for part in values)


class PromptEncoder:
    """Encodes prompts for one model; it is immutable and can be pickled.

    Args:
        tokenizer: the model's tokenizer; if None, prompts must be token ids.
    """

    def __init__(self, tokenizer: TokenizerLike | None, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    @property
    def tokenizer(self) -> TokenizerLike:
        """The model's tokenizer; raises `RequestError` if there is none."""
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: pass token ids as the prompt", param="prompt")
        return self._tokenizer

    def kept_tokens(self, kept: int | None, max_tokens: int) -> int | None:
        """Return how many tokens at the end of a prompt `truncate_prompt_tokens` keeps; None for all of them."""
        longest = self._max_model_len
        if kept is None:
            return None
        if kept != -1 and not 1 <= kept <= longest:
            raise FieldError(
                "truncate_prompt_tokens",
                f"must be -1, or between 1 and {longest}, this model's maximum context length, got {shown(kept)}",
            )
        return max(1, longest - max_tokens) if kept == -1 else kept

    def encode(
        self,
        prompt: str | list[int],
        add_special_tokens: bool,
        *,
        keeps_text: bool = False,
        kept: int | None = None,
        keeps_end: bool = True,
    ) -> EncodedPrompt:
        """Return a prompt as tokens.

        Args:
            keeps_text: also keep the text, if the prompt is one.
            kept: result of `kept_tokens`.
            keeps_end: of a prompt that is cut, the end is kept, not the beginning.

        Raises:
            RequestError: it is empty, holds an invalid token id, or exceeds the model's length.
        """
        if isinstance(prompt, list):
            check_token_ids(prompt, self._vocab_size, "prompt")
            token_ids, text = prompt, None
        else:
            # Truncation happens after tokenising, because token boundaries depend on the preceding text.
            token_ids = self.tokenize(prompt, add_special_tokens, is_cut=kept is not None)
            if not token_ids:
                raise FieldError("prompt", "must not be empty")
            text = prompt if keeps_text else None
        if kept is not None and len(token_ids) > kept:
            token_ids, text = token_ids[-kept:] if keeps_end else token_ids[:kept], None
        self._check_length(token_ids)
        return EncodedPrompt(array("i", token_ids), text)

    def tokenize(self, text: str, add_special_tokens: bool, *, is_cut: bool = False) -> list[int]:
        """Return a text's tokens; one that exceeds the model's length however it is tokenised is refused before."""
        tokenizer = self.tokenizer
        longest = tokenizer.max_kept_token_bytes
        check_text_length(text, self._max_model_len, longest, tokenizer.dropped_bytes, is_cut=is_cut)
        return tokenizer.encode(text, add_special_tokens)

    def _check_length(self, token_ids: list[int]) -> None:
        if len(token_ids) > self._max_model_len:
            raise ContextLengthError(
                f"this model's maximum context length is {self._max_model_len} tokens, "
                f"but the prompt alone has {len(token_ids)}",
                param="prompt",
            )

    def render(
        self,
        body: ChatBody | TokenizeBody,
        chat: RenderedChat,
        variables: dict[str, Any],
        marks: Sequence[CacheMark] = (),
        kept: int | None = None,
    ) -> tuple[EncodedPrompt, str]:
        """Render a chat by the model's template, as tokens and as text.

        Special tokens are normally in the template already. The prefixes that `marks` end are measured in tokens.

        Raises:
            RequestError: the chat is invalid, or the template refuses it.
        """
        check_template_variables(variables)
        add_special_tokens = bool(body.add_special_tokens)
        messages = chat.messages
        marks = [replace(mark, index=chat.places[mark.index]) for mark in marks]
        render = partial(self.tokenizer.apply_chat_template, tools=chat.tools)
        if body.continue_final_message:
            if body.add_generation_prompt:
                raise FieldError("continue_final_message", "and add_generation_prompt cannot both be true")
            text = end_in_message(render(messages, False, **variables), messages[-1])
        else:
            text = render(messages, body.add_generation_prompt is not False, **variables)
        prompt = self.encode(text, add_special_tokens, keeps_text=True, kept=kept)
        if prompt.text is None:
            # Once a prompt has been truncated, the marked messages are no longer its beginning.
            marks = []

        def measure(index: int) -> int:
            """Return how many of the prompt's tokens belong to messages up to `index`, whatever the rest is."""
            try:
                beginning = render(messages[: index + 1], False, **variables)
            except RequestError:
                # Some templates refuse a chat that ends here. Then render the rest with changed texts: the prefix that
                # stays the same belongs to these messages.
                rest = [{**message, "content": "~" + message["content"]} for message in messages[index + 1 :]]
                beginning = render(messages[: index + 1] + rest, False, **variables)
            return common_length(prompt.token_ids, self.tokenizer.encode(beginning, add_special_tokens))

        pins = [PinRequest(measure(mark.index), mark.ttl_seconds) for mark in marks]
        return EncodedPrompt(prompt.token_ids, None, tuple(pin for pin in pins if pin.num_tokens)), text


class GivenPromptEncoder(PromptEncoder):
    """Encodes the one prompt of a body, whose text a router has tokenised."""

    def __init__(self, encoder: PromptEncoder, token_ids: list[int]) -> None:
        super().__init__(encoder._tokenizer, encoder._vocab_size, encoder._max_model_len)
        check_token_ids(token_ids, encoder._vocab_size, "prompt")
        self._token_ids = token_ids

    def tokenize(self, text: str, add_special_tokens: bool, *, is_cut: bool = False) -> list[int]:
        return self._token_ids


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a variable that only the server may set."""
    for name in variables:
        if name in _TEMPLATE_VARIABLES:
            raise FieldError("chat_template_kwargs", f"must not set {name!r}")


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
        raise FieldError("continue_final_message", "needs a last message whose content the chat template prints")
    whole = content.lstrip()
    return rendered[: where + len(whole if rendered.startswith(whole, where) else whole.rstrip())]
