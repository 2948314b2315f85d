"""What a prompt in token ids must hold, and how it is kept."""

from __future__ import annotations

import pytest

from octavo.errors import ContextLengthError, RequestError
from octavo.text.prompt_checks import check_text_length, copy_token_ids


def test_a_copied_prompt_is_equal_and_keeps_one_object_for_each_id() -> None:
    prompt = [1000 + int(f"{i % 3}") for i in range(20_000)]
    copy = copy_token_ids(prompt, 2000, "prompt")
    assert copy == prompt
    assert copy is not prompt
    assert len(set(map(id, copy))) == 3


@pytest.mark.parametrize("wrong", [2000, -1, True, 1.0, "1"])
def test_an_id_far_behind_is_refused_as_well(wrong: object) -> None:
    with pytest.raises(RequestError, match=r"token id|must hold token ids"):
        copy_token_ids([*[5] * 30_000, wrong], 2000, "prompt")  # type: ignore[list-item]


def test_a_text_that_is_cut_down_may_be_longer_but_not_without_end() -> None:
    text = "a" * 4000
    check_text_length(text, 100, 10, is_cut=True)
    with pytest.raises(ContextLengthError, match="at most 10 bytes each, but the prompt has 4000 bytes"):
        check_text_length(text, 100, 10)
    with pytest.raises(ContextLengthError, match=r"4001 bytes.*truncate_prompt_tokens.*at most 4000: 4 times"):
        check_text_length(text + "a", 100, 10, is_cut=True)
