"""Log-probabilities in OpenAI's two formats, and prompt log-probabilities in vLLM's."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from octavo.request import TokenLogprobs
from octavo.server.engine_client import EngineClient


def _finite(logprob: float) -> float:
    """JSON has no infinity, so a masked token gets OpenAI's and vLLM's least value."""
    return max(logprob, -9999.0)


class TokenTexts:
    """The texts of single tokens, cached: the twenty alternatives of each token repeat."""

    def __init__(self, engine: EngineClient) -> None:
        # The engine and not its tokenizer, for which it raises where the model has none.
        self._engine = engine
        self._known: dict[int, tuple[str, bytes]] = {}

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._engine.tokenizer.special_ids)

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        """The token's text (with U+FFFD where it is part of a character) and its bytes."""
        if (known := self._known.get(token_id)) is None:
            raw = self._engine.tokenizer.token_bytes(token_id)
            known = self._known[token_id] = (raw.decode("utf-8", "replace"), raw)
        return known

    def text(self, token_id: int) -> str:
        return self[token_id][0]


class CompletionLogprobs:
    """Completion format of one choice, piece by piece.

    `text_offset` says where in the choice's text each token begins: a token that completes a character begins where
    the character does, and special tokens that the text leaves out take no room in it.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool, as_token_ids: bool) -> None:
        self._texts = texts
        self._skip = texts.special_ids if skip_special_tokens else frozenset()
        self._as_token_ids = as_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """The next tokens; None stands for the first token of a prompt, which has no probability."""
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._skip:
                self._offset += len(self._decoder.decode(self._texts[token_id][1]))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                None if entry is None else self._top(token_id, entry)
                for token_id, entry in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for candidate, logprob in (*entry.top, (token_id, entry.logprob)):
            # Several tokens can read the same, such as parts of characters: the likeliest keeps the name.
            top.setdefault(self._name(candidate), _finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._texts.text(token_id)


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, list[dict[str, Any]] | None]:
    """Chat format: each token with its bytes and its alternatives."""
    content = [
        {
            **_chat_token(texts, token_id, entry.logprob),
            "top_logprobs": [_chat_token(texts, other, logprob) for other, logprob in entry.top],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = texts[token_id]
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def prompt_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's format: for each prompt token but the first, token id -> logprob, rank, text."""
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
