"""The flat table of keys against a dictionary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.block import BlockId
from octavo.kvcache.key_index import Children, KeyIndex, LatestKeys

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
    latest = LatestKeys[int](capacity, [-1])
    latest._index._factor = factor
    added: list[tuple[int, int]] = []  # keys and values, the newest last
    for keys in batches:
        before = dict(added[-capacity:])
        values = [len(added) + i for i in range(len(keys))]
        displaced = latest.add(keys, values)
        added += zip(keys, values, strict=True)
        known = dict(added[-capacity:])
        assert sorted(displaced) == sorted({*before.values(), *values} - {*known.values()})
        assert list(latest.check()) == []
        assert {key: latest.get(key.to_bytes(8, "little")) for key in known} == known
        assert len(latest) == len(known)
    if known := dict(added[-capacity:]):
        key = min(known)
        assert [latest.take(key.to_bytes(8, "little")) for _ in range(2)] == [known[key], None]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(operations=st.lists(st.tuples(st.booleans(), st.integers(1, 15), st.sampled_from(KEYS[:3])), max_size=80))
def test_the_children_of_a_prefix_are_those_of_a_list(operations: list[tuple[bool, int, bytes]]) -> None:
    children = Children(16)
    model: dict[BlockId, int] = {}  # parent's first 8 bytes by block, the latest last
    for adds, number, key in operations:
        block = BlockId(number)
        if adds and block not in model:
            model[block] = int.from_bytes(key[:8], "little")
            children.add([block], [model[block]])
        elif block in model:
            gone = [block, *(other for other in model if other < block and not adds)]
            children.remove(gone)
            model = {other: parent for other, parent in model.items() if other not in gone}
        assert list(children.check(np.array(sorted(model), np.intp))) == []
    for key in KEYS:
        listed = [block for block, parent in model.items() if parent == int.from_bytes(key[:8], "little")]
        assert list(children.of(key)) == listed[::-1]
        assert children.latest(key) == (listed[-1] if listed else None)


def test_a_damaged_table_is_reported() -> None:
    index = KeyIndex(4)
    index._factor = 1 << 63 | 1  # the home is the beginning's lowest bit: not that of another key
    index.put(KEYS[3], 2)
    index._keys[2 * 3] = int.from_bytes(KEYS[4][:8], "little")
    assert list(index.check()) == ["id 2 is not found by its key"]
