"""Turns prompts and chats into tokens: texts are tokenised, and chats rendered by the model's template."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.errors import ContextLengthError, RequestError, shown
from octavo.request import PinRequest
from octavo.server.bodies.dialects import RenderedChat
from octavo.server.bodies.openai_bodies import ChatBody, TokenizeBody
from octavo.server.bodies.pinning import CacheMark
from octavo.server.bodies.prompt_forms import EncodedPrompt, check_template_variables, common_length, end_in_message
from octavo.server.engine_client import TokenizerLike
from octavo.text.prompt_checks import check_text_length, check_token_ids


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
            raise RequestError(
                f"truncate_prompt_tokens must be -1, or between 1 and {longest}, this model's maximum context length, "
                f"got {shown(kept)}",
                param="truncate_prompt_tokens",
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
            keeps_text: keep the text beside them, if the prompt is one.
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
                raise RequestError("prompt must not be empty", param="prompt")
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
        marks = [replace(mark, index=mark.index + chat.num_added) for mark in marks]
        render = partial(self.tokenizer.apply_chat_template, tools=chat.tools)
        if body.continue_final_message:
            if body.add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt cannot both be true",
                    param="continue_final_message",
                )
            text = end_in_message(render(messages, False, **variables), messages[-1])
        else:
            text = render(messages, body.add_generation_prompt is not False, **variables)
        prompt = self.encode(text, add_special_tokens, kept=kept)
        if kept == len(prompt.token_ids):
            # Once a prompt has been truncated, the marked messages are no longer its beginning.
            marks = []

        def measure(index: int) -> int:
            """Return how many of the prompt's tokens belong to messages up to `index`, whatever follows them."""
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
