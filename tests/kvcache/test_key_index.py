"""The flat table of keys against a dictionary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.key_index import KeyIndex, LatestKeys

# Few keys of few beginnings, so that they collide, move back over each other and wrap around.
KEYS = [(i % 5).to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(40)]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    factor=st.sampled_from([1, 1 << 63 | 1, (1 << 64) - 1]),
    operations=st.lists(
        st.tuples(st.sampled_from(["put", "discard"]), st.integers(0, 39), st.integers(0, 39)), max_size=120
    ),
)
def test_any_history_leaves_what_a_dictionary_would_hold(factor: int, operations: list[tuple[str, int, int]]) -> None:
    index = KeyIndex(40)
    index._factor = factor  # the least random ones
    model: dict[bytes, int] = {}
    for operation, which, entry_id in operations:
        if operation == "put":
            if entry_id not in model.values():
                assert index.put(KEYS[which], entry_id) == (KEYS[which] not in model)
                model.setdefault(KEYS[which], entry_id)
        else:
            assert index.discard((entry_id,)) == (entry_id in model.values())
            model = {key: known for key, known in model.items() if known != entry_id}
    assert list(index.check()) == []
    assert (len(index), sorted(index)) == (len(model), sorted(model.values()))
    expected = [model.get(key) for key in KEYS]
    assert [index.get(key) for key in KEYS] == expected
    for keys in (KEYS, KEYS[7:], [*model, *KEYS]):
        leading = [*itertools.takewhile(lambda known: known is not None, map(model.get, keys))]
        assert index.find_leading(np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)).tolist() == leading


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 12),
    factor=st.sampled_from([1, (1 << 64) - 1]),
    batches=st.lists(st.lists(st.integers(0, 20), max_size=12), max_size=30),
)
def test_the_latest_keys_are_those_of_a_bounded_list(capacity: int, factor: int, batches: list[list[int]]) -> None:
    latest = LatestKeys(capacity)
    latest.index._factor = factor
    places: dict[int, int] = {}  # the model: by key
    following = 0
    for keys in batches:
        keys = keys[:capacity]
        given_places, _ = latest.add(keys)
        for key in keys:
            places = {known: place for known, place in places.items() if place != following}
            places[key] = following
            following = (following + 1) % capacity
        assert list(given_places) == [(following - len(keys) + i) % capacity for i in range(len(keys))]
        assert list(latest.index.check()) == []
        assert {key: latest.index.get(key.to_bytes(8, "little")) for key in places} == places
        assert len(latest.index) == len(places)


def test_a_damaged_table_is_reported() -> None:
    index = KeyIndex(4)
    index._factor = 1 << 63 | 1  # the home is the beginning's lowest bit: not that of another key
    index.put(KEYS[3], 2)
    index._keys[2 * 3] = int.from_bytes(KEYS[4][:8], "little")
    assert list(index.check()) == ["id 2 is not found by its key"]


@pytest.mark.parametrize("width", [8, 16])
def test_an_id_is_in_the_index_as_long_as_it_has_a_key(width: int) -> None:
    index = KeyIndex(4, width)
    assert 0 not in index
    assert 9 not in index, "beyond the capacity"
    index.put(KEYS[3], 2)
    assert 2 in index
    index.discard((2,))
    assert 2 not in index
