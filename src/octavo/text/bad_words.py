"""The token sequences that spell a bad word, found as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer


def bad_word_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return each word's tokens at the beginning of a text and, if they begin with another token, after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if bare:
            found[tuple(bare)] = None
        # If the space is a token of its own, the second sequence would forbid nothing new.
        if spaced and spaced[:1] != bare[:1] and len(spaced) == len(bare):
            found[tuple(spaced)] = None
    return tuple(found)
