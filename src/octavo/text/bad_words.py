"""The token sequences that a bad word is spelled with, as vLLM finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextEncoder(Protocol):
    """The part of a tokenizer needed here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def bad_word_token_ids(tokenizer: TextEncoder, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens where it begins a text, and where a space precedes it, if that begins with another token."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if bare:
            found[tuple(bare)] = None
        # A space that is a token of its own would forbid nothing new.
        if spaced and spaced[:1] != bare[:1] and len(spaced) == len(bare):
            found[tuple(spaced)] = None
    return tuple(found)
