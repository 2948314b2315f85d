"""The tokens of bad words, with a space before them and without."""

from __future__ import annotations

from typing import Any

from octavo.text.bad_words import bad_word_token_ids


class Words:
    """One token for each known piece, longest first."""

    pieces = (" cat", "cat", "s", " ", "dog")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        ids = []
        while text:
            piece = next(piece for piece in self.pieces if text.startswith(piece))
            ids.append(self.pieces.index(piece))
            text = text.removeprefix(piece)
        return ids


WORDS: Any = Words()


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space() -> None:
    assert bad_word_token_ids(WORDS, ["cats"]) == ((1, 2), (0, 2))


def test_a_space_that_is_a_token_of_its_own_forbids_nothing_new() -> None:
    assert bad_word_token_ids(WORDS, [" dog", "dog"]) == ((4,),)
