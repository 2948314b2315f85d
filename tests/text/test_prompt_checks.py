"""What a prompt in token ids must hold, and how it is kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ContextLengthError, RequestError
from octavo.text.prompt_checks import SLICE_TOKENS, check_text_length, packed_token_ids


class Sliced(list[int]):
    """A prompt that notes how much of it is read at once."""

    longest = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.longest = max(self.longest, len(found))
        return found

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read at once, while no other thread can run")


def test_a_long_prompt_becomes_an_array_slice_by_slice() -> None:
    prompt = Sliced(range(3 * SLICE_TOKENS + 5))
    packed = packed_token_ids(prompt, 1 << 20, "prompt")
    assert packed == array("i", range(3 * SLICE_TOKENS + 5))
    assert prompt.longest == SLICE_TOKENS


def test_an_array_is_checked_and_kept() -> None:
    prompt = array("i", [5] * 30_000)
    assert packed_token_ids(prompt, 2000, "prompt") is prompt
    prompt[-1] = 2000
    with pytest.raises(RequestError, match="prompt must contain token ids from 0 to 1999, got 2000"):
        packed_token_ids(prompt, 2000, "prompt")


@pytest.mark.parametrize("wrong", [2000, -1, True, 1.0, "1"])
def test_an_id_far_behind_is_refused_as_well(wrong: object) -> None:
    with pytest.raises(RequestError, match="must contain token ids"):
        packed_token_ids([*[5] * 30_000, wrong], 2000, "prompt")  # type: ignore[list-item]


def test_a_text_that_is_cut_down_may_be_longer_but_not_without_end() -> None:
    text = "a" * 4000
    check_text_length(text, 100, 10, is_cut=True)
    with pytest.raises(ContextLengthError, match="at most 10 bytes each, but the prompt has 4000 bytes"):
        check_text_length(text, 100, 10)
    with pytest.raises(ContextLengthError, match=r"4001 bytes.*truncate_prompt_tokens.*at most 4000: 4 times"):
        check_text_length(text + "a", 100, 10, is_cut=True)
