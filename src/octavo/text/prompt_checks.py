"""Checks of prompts: token ids must be in the vocabulary, and a text must not exceed the model's context."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Sequence

import numpy as np

from octavo.errors import ContextLengthError, FieldError, shown

# Number of ids converted at a time, which takes a fraction of a millisecond; other threads may run in between.
SLICE_TOKENS = 8192


def packed_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> array[int]:
    """Return a prompt's ids as an `array("i")`; raises as `check_token_ids` does.

    A given array is checked and returned, not copied, so it must not change afterwards. Thread-safe; for a long
    prompt, other threads may run between slices.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        check_token_ids(token_ids, vocab_size, param)
        return token_ids
    packed = array("i")
    for start in range(0, len(token_ids), SLICE_TOKENS):
        if start:
            time.sleep(0)
        part = token_ids[start : start + SLICE_TOKENS]
        check_token_ids(part, vocab_size, param)
        packed.extend(array("i", part))
    return packed


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise `RequestError` naming the first entry that is not an id of the vocabulary."""
    ids = token_ids if isinstance(token_ids, Sequence) else list(token_ids)
    for start in range(0, len(ids), SLICE_TOKENS):
        part = ids[start : start + SLICE_TOKENS]
        if not _are_all_known(part, vocab_size):
            _refuse_first_unknown(part, vocab_size, param)


# How much longer a text may be if the prompt is truncated after tokenising.
CUT_TEXT_FACTOR = 4


def check_text_length(
    text: str, max_model_len: int, max_token_bytes: int | None, dropped: bytes = b"", *, is_cut: bool = False
) -> None:
    """Raise `ContextLengthError` for a text that is certainly too long, without tokenising it.

    Args:
        max_token_bytes: maximum number of bytes of text that one token stands for; None if unknown.
        dropped: byte values that leave no trace in the tokens, and are not counted.
        is_cut: whether only the last tokens are kept, so that the text may be `CUT_TEXT_FACTOR` times as long.
    """
    # Most texts pass the cheap check below: a character has at most 4 bytes.
    if max_token_bytes is None:
        return
    most = max_model_len * max_token_bytes * (CUT_TEXT_FACTOR if is_cut else 1)
    if 4 * len(text) <= most:
        return
    num_bytes = len(text.encode(errors="surrogatepass").translate(None, dropped))
    if num_bytes > most and is_cut:
        raise ContextLengthError(
            f"the prompt has {num_bytes} bytes, but even with truncate_prompt_tokens it may have at most "
            f"{most}: {CUT_TEXT_FACTOR} times this model's maximum context length, {max_model_len} tokens of at most "
            f"{max_token_bytes} bytes each",
            param="prompt",
        )
    if num_bytes > most:
        raise ContextLengthError(
            f"this model's maximum context length is {max_model_len} tokens of at most {max_token_bytes} bytes each, "
            f"but the prompt has {num_bytes} bytes: at least {-(-num_bytes // max_token_bytes)} tokens",
            param="prompt",
        )


def _are_all_known(ids: Sequence[int], vocab_size: int) -> bool:
    if isinstance(ids, array):
        packed = np.array(ids)
    # Not isinstance: True is an int, but not a token id.
    elif set(map(type, ids)) != {int}:
        return False
    else:
        try:
            packed = np.frombuffer(array("q", ids), dtype=np.int64)
        except OverflowError:
            return False
    return bool(packed.min() >= 0 and packed.max() < vocab_size)


def _refuse_first_unknown(ids: Sequence[int], vocab_size: int, param: str) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise FieldError(param, f"must contain token ids from 0 to {vocab_size - 1}, got {shown(token_id)}")
