"""Requests generated from traces."""

from __future__ import annotations

import itertools

import pytest

from octavo.bench.traces import TraceRequest
from octavo.simulator import traffic
from octavo.simulator.traffic import Tenants, trace_shapes

ANYBODY = Tenants()


def prefix_ids(trace: list[TraceRequest], count: int) -> list[list[int]]:
    """The ids of the runs of each request's prompt."""
    return [[token for token, _ in shape.runs] for shape in itertools.islice(trace_shapes(trace, ANYBODY), count)]


@pytest.mark.parametrize("first", [0, 1 << 63, -7])
def test_token_ids_fit_an_int32_whatever_the_hash_ids_and_however_often_a_trace_is_repeated(first: int) -> None:
    trace = [TraceRequest(float(i), 1024, 3, hash_ids=(first, first + 1 + i)) for i in range(5)]
    requests = prefix_ids(trace, 1000)
    assert all(1 <= token < 1 << 31 for tokens in requests for token in tokens)
    for start in range(0, 1000, 5):
        assert len({tokens[0] for tokens in requests[start : start + 5]}) == 1
        assert len({tokens[1] for tokens in requests[start : start + 5]}) == 5
    assert len({tokens[0] for tokens in requests}) == 200, "a repetition stands for other people"


def test_ids_of_prefixes_are_used_again_when_none_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_OWN", 8)
    trace = [TraceRequest(float(i), 1024, 3, hash_ids=(0, 1 + i)) for i in range(2)]
    requests = prefix_ids(trace, 10)
    assert requests[:6] == [[1, 2], [1, 3], [4, 5], [4, 6], [7, 1], [7, 2]]
    assert all(token < 8 for tokens in requests for token in tokens)
