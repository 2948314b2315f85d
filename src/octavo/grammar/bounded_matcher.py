"""The limits within which llguidance compiles and follows grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Maximum numbers of parser items and lexer steps for one mask: at most 2.5 ms together.
STEP_ITEMS, STEP_FUEL = 20_000, 50_000
# Maximum number of parser items in one row. Time grows with their cube: with llguidance's 2,000, an ambiguous
# grammar took 730 ms per token, with 500 up to 26 ms, with 250 up to 4. All sequences of a step may have such a
# grammar. Schemas with 900 properties need fewer; n tools of which any may be called need n + 1.
ROW_ITEMS = 250


def compile_grammar(lark: str, tokenizer: Any) -> Any:
    """Return llguidance's matcher of a grammar within the limits; it may be in error."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=ROW_ITEMS, step_max_items=STEP_ITEMS, step_lexer_fuel=STEP_FUEL, verbose_errors=False
    )
    return LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def first_error(matcher: Any, ends: Iterable[int]) -> str:
    """Return the error that only the first mask or token reveals: nothing matches, or the grammar is too complex.

    Args:
        ends: the tokens that may end an output.
    """
    first = matcher.deep_copy()
    if not first.is_error():
        allowed = int.from_bytes(first.compute_bitmask(), "little")
        for token_id in ends:
            allowed &= ~(1 << token_id)
        # The number of items in the first row is only checked when a token follows; until then, masks may take long.
        if allowed and not first.is_error():
            first.consume_tokens([(allowed & -allowed).bit_length() - 1])
    return str(first.get_error())
