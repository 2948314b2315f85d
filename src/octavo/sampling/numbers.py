"""Keeps JSON's numbers short: after many digits in a row, a number goes on only if its grammar leaves nothing else.

JSON sets no limit to a number's digits, and a small model may write them without end. No number that a schema demands
is lost: where only digits may follow, they do.
"""

from __future__ import annotations

import numpy as np

from octavo.grammar.state import GrammarState
from octavo.sampling.mask_words import Words, positions_of

MAX_DIGITS = 40
"""Digits in a row, before or after a number's point: enough for 128-bit integers and for SQL's NUMERIC(38)."""

_DIGITS = frozenset(b"0123456789")
_QUOTE = ord('"')


def end_long_number(word: Words, grammar: GrammarState) -> None:
    """Forbid digits, in place, where a JSON number that is long enough may end.

    Args:
        word: the mask of the tokens that may come next, uint32 [ceil(vocab / 32)].
    """
    if not grammar.compiled.has_json or not _follows_many_digits(grammar):
        return
    vocabulary = grammar.compiled.vocabulary
    _, token_ids = positions_of(word[None])
    first = {token_id: vocabulary.spelling(token_id)[:1] for token_id in token_ids.tolist()}
    digits = [token_id for token_id, byte in first.items() if byte and byte[0] in _DIGITS]
    # A quotation mark cannot follow a number, but may follow the digits of a string.
    is_string = any(byte and byte[0] == _QUOTE for byte in first.values())
    if is_string or len(digits) == len(first):
        return
    for token_id in digits:
        word[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _follows_many_digits(grammar: GrammarState) -> bool:
    spelling, count = grammar.compiled.vocabulary.spelling, 0
    for token_id in reversed(grammar.token_ids):
        text = spelling(token_id)
        if not text.isdigit():
            return False
        count += len(text)
        if count >= MAX_DIGITS:
            return True
    return False
