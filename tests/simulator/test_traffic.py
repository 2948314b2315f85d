"""Requests generated from traces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.simulator import traffic
from octavo.simulator.traffic import SimulatedRequest, Tenants, trace_shapes
from octavo.workloads.traces import TraceRequest

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


def prompts_of(trace: list[TraceRequest], count: int, scale_lengths: float = 1.0) -> list[list[int]]:
    shapes = itertools.islice(trace_shapes(trace, ANYBODY, scale_lengths=scale_lengths), count)
    return [SimulatedRequest(0.0, shape).prompt_token_ids() for shape in shapes]


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def workload(prompts: list[tuple[int, ...]]) -> list[TraceRequest]:
    return [TraceRequest(None, len(prompt), 2, token_ids=prompt) for prompt in prompts]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=8))
def test_prompts_of_a_workload_begin_alike_for_as_long_as_they_do(prompts: list[tuple[int, ...]]) -> None:
    count = len(prompts)
    simulated = prompts_of(workload(prompts), 2 * count)
    for i, j in itertools.product(range(count), repeat=2):
        assert num_alike(simulated[i], simulated[j]) == num_alike(prompts[i], prompts[j])
        assert simulated[i][0] != simulated[count + j][0], "a repetition stands for other people"
    assert [len(prompt) for prompt in simulated[:count]] == [len(prompt) for prompt in prompts]


def test_prompts_of_a_workload_are_truncated_but_do_not_grow() -> None:
    trace = workload([(1, 2, 3, 4), (1, 2, 5, 6)])
    first, second = prompts_of(trace, 2, scale_lengths=0.5)
    assert first == second
    assert len(first) == 2
    with pytest.raises(ConfigError, match="scaled down, not up"):
        prompts_of(trace, 1, scale_lengths=2.0)
