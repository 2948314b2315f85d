"""Counts that are kept up token by token are those of the whole output, for every fork."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling.batch import TokenCounts

tokens = st.lists(st.integers(0, 30), max_size=60)


def output_of(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.output_ids.tolist(), counts.output_counts.tolist(), strict=True))


@given(prompt=tokens, before=tokens, after=tokens, other=tokens)
def test_a_fork_goes_on_by_itself(prompt: list[int], before: list[int], after: list[int], other: list[int]) -> None:
    counts = TokenCounts(np.array(prompt + before, dtype=np.int32), len(prompt))
    child = counts.fork()
    for token_id in after:
        counts.append(token_id)
    for token_id in other:
        child.append(token_id)
    for each, output in ((counts, before + after), (child, before + other)):
        assert output_of(each) == Counter(output)
        assert each.prompt_ids.tolist() == sorted(set(prompt))
        assert each.num_tokens == len(prompt) + len(output)


def test_forks_share_what_is_known_of_the_prompt() -> None:
    counts = TokenCounts(np.arange(1000, dtype=np.int32), 1000)
    assert counts.fork().prompt_ids is counts.prompt_ids
