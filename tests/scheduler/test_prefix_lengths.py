"""Lengths of cached prefixes that are remembered: as `match` finds them, and seldom looked up."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from tests.kvcache.caches import make_manager, make_request

SIZE = 4


def compute(kv: KVCacheManager, tokens: list[int]) -> None:
    """A sequence of these tokens runs and ends."""
    seq = make_request(tokens).sequences[0]
    if kv.admit(seq, hit := kv.match(seq), len(tokens) - hit.num_tokens):
        seq.num_computed = len(tokens)
        kv.commit(seq)
    kv.forget(seq)


def waiting(tokens: list[int]) -> Sequence:
    return make_request(tokens).sequences[0]


def test_a_prefix_is_looked_up_again_only_where_it_became_longer_or_shorter() -> None:
    kv = make_manager(num_blocks=64, block_size=SIZE)
    seqs = [waiting([*range(20), 100 + i]) for i in range(8)]
    assert [kv.cached_length(seq) for seq in seqs] == [0] * 8
    with patch.object(kv, "match", side_effect=kv.match) as match:
        compute(kv, [900 + i for i in range(12)])
        assert [kv.cached_length(seq) for seq in seqs] == [0] * 8
        assert match.call_count == 1  # of the one that was computed
        compute(kv, list(range(12)))
        assert [kv.cached_length(seq) for seq in seqs] == [12] * 8
        kv.reset_prefix_cache()
        assert [kv.cached_length(seq) for seq in seqs] == [0] * 8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.booleans()), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=6),
)
def test_the_remembered_length_is_what_the_cache_has(
    computed: list[tuple[int, int, bool]], line: list[tuple[int, int]]
) -> None:
    # Few blocks, so that what was cached is evicted.
    kv = make_manager(num_blocks=12, block_size=SIZE)
    seqs = [waiting([1000 * kind + i for i in range(length)]) for kind, length in line]
    for kind, length, ask in computed:
        compute(kv, [1000 * kind + i for i in range(length)])
        if ask:
            assert [kv.cached_length(seq) for seq in seqs] == [kv.match(seq).num_tokens for seq in seqs]
