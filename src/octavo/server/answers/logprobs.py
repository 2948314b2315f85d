"""Log-probabilities in OpenAI's two formats, and prompt log-probabilities in vLLM's format."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

from octavo.logprobs import TokenLogprobs
from octavo.server.engine_client import EngineClient


def _finite(logprob: float) -> float:
    """Clip a log-probability at -9999, as OpenAI and vLLM do for masked tokens, because JSON has no infinity."""
    return max(logprob, -9999.0)


class TokenTexts:
    """The texts of single tokens, cached because the same tokens recur among the alternatives."""

    def __init__(self, engine: EngineClient) -> None:
        # Not `engine.tokenizer`, which raises if the model has none.
        self._engine = engine
        self._known: dict[int, tuple[str, bytes]] = {}

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._engine.tokenizer.special_ids)

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        """Return the token's text, with U+FFFD for an incomplete character, and its bytes."""
        if (known := self._known.get(token_id)) is None:
            raw = self._engine.tokenizer.token_bytes(token_id)
            known = self._known[token_id] = (raw.decode("utf-8", "replace"), raw)
        return known

    def text(self, token_id: int) -> str:
        return self[token_id][0]


class TokenOffsets:
    """The offsets in a choice's text at which each of its tokens begins and ends.

    A token that completes a character begins where the character does; a token that ends within a character has no
    length, nor have special tokens that are left out of the text.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip = texts.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_id: int) -> tuple[int, int]:
        """Return where the next token begins and ends."""
        begin = self._offset
        if token_id not in self._skip:
            self._offset += len(self._decoder.decode(self._texts[token_id][1]))
        return begin, self._offset


class CompletionLogprobs:
    """The log-probabilities of one choice in the format of completions, piece by piece.

    `text_offset` is where in the choice's text each token begins.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool, as_token_ids: bool) -> None:
        self._texts = texts
        self._as_token_ids = as_token_ids
        self._offsets = TokenOffsets(texts, skip_special_tokens=skip_special_tokens)

    def piece(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Format the next tokens; None stands for the first token of a prompt, which has no probability."""
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                None if entry is None else self._top(token_id, entry)
                for token_id, entry in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": [self._offsets.next(token_id)[0] for token_id in token_ids],
        }

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for candidate, logprob in (*entry.top, (token_id, entry.logprob)):
            # Several tokens can have the same text, such as parts of characters: the likeliest keeps the name.
            top.setdefault(self._name(candidate), _finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        return _token_id_name(token_id) if self._as_token_ids else self._texts.text(token_id)


def _token_id_name(token_id: int) -> str:
    """Return the replacement of a token's text under `return_tokens_as_token_ids`, as in vLLM."""
    return f"token_id:{token_id}"


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, as_token_ids: bool = False
) -> dict[str, list[dict[str, Any]] | None]:
    """Return log-probabilities in the format of chats: each token with its bytes and its alternatives."""
    content = [
        _chat_entry(texts, token_id, entry, as_token_ids=as_token_ids)
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_entry(texts: TokenTexts, token_id: int, entry: TokenLogprobs, *, as_token_ids: bool) -> dict[str, Any]:
    def entry_of(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = texts[token_id]
        name = _token_id_name(token_id) if as_token_ids else text
        return {"token": name, "logprob": _finite(logprob), "bytes": list(raw)}

    return {
        **entry_of(token_id, entry.logprob),
        "top_logprobs": [entry_of(other, logprob) for other, logprob in entry.top],
    }


class PartLogprobs:
    """The log-probabilities of the parts of one choice's text, in the format of chats.

    Tokens are added as they arrive, and taken once it is known which part they belong to. Tokens without a part, such
    as the marks of tool calls and the end-of-sequence token, are dropped.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._offsets = TokenOffsets(texts, skip_special_tokens=skip_special_tokens)
        # Tokens that are not taken yet, with where they begin and end.
        self._waiting: deque[tuple[int, int, int, TokenLogprobs]] = deque()

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the next tokens."""
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            self._waiting.append((*self._offsets.next(token_id), token_id, entry))

    def take(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return the tokens of the characters from `begin` to `end`, without those already taken; drop earlier ones."""
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            first, last, token_id, entry = self._waiting.popleft()
            # A token without a length counts as part of the character that follows.
            if max(last, first + 1) > begin:
                taken.append(_chat_entry(self._texts, token_id, entry, as_token_ids=False))
        return taken


def prompt_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's prompt log-probabilities: for each token but the first, token id -> logprob, rank, text."""
    return [
        None if entry is None else _ranked(texts, token_id, entry)
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _ranked(texts: TokenTexts, token_id: int, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
    ranked = {
        str(candidate): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(candidate)}
        for rank, (candidate, logprob) in enumerate(entry.top, start=1)
    }
    ranked[str(token_id)] = {
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": texts.text(token_id),
    }
    return ranked
