from __future__ import annotations

import pytest
import torch

from octavo.workloads.timing import Timing, interleaved, paired_ratio, threads


def test_candidates_take_turns_and_every_other_round_runs_backwards() -> None:
    order = []
    candidates = {name: [lambda name=name: order.append(name)] for name in "ABC"}
    timings = interleaved(candidates, seconds=0.0, min_rounds=4)
    assert "".join(order[3:]) == "ABCCBAABCCBA"
    assert all(len(timing.seconds) == 4 for timing in timings.values())


def test_calls_of_a_candidate_are_gone_round() -> None:
    seen = []
    interleaved({"a": [lambda i=i: seen.append(i) for i in range(3)]}, seconds=0.0, min_rounds=5)  # type: ignore[misc]
    assert seen[2:] == [0, 1, 2, 0, 1]


def test_what_disturbs_both_cancels_in_the_ratio() -> None:
    other = Timing((1.0, 50.0, 2.0))
    one = Timing(tuple(1.02 * s for s in other.seconds))
    assert paired_ratio(one, other) == pytest.approx(1.02)
    assert (other.median, other.best) == (2.0, 1.0)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
