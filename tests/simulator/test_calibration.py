"""What is read from a recording beside the steps' times."""

from __future__ import annotations

import itertools

import pytest

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep
from octavo.simulator.calibration import Alone, overheads, rounds


def step(at: float, start: int, length: int, draws: int) -> RecordedStep:
    return RecordedStep(1, at, 0.01, (1,), (start,), (length,), (draws,), 0, 0, 0, 0, 0, 0, 0)


def test_a_lone_request_tells_what_the_way_in_takes_and_what_the_way_back() -> None:
    """The second's prompt takes two steps; of the last, which drew its tokens in one step, nothing is known."""
    steps = [step(1.004, 0, 8, 1), step(1.014, 8, 1, 1)]
    steps += [step(2.006, 0, 8, 0), step(2.016, 8, 4, 1), step(2.026, 12, 1, 1), step(3.5, 0, 8, 1)]
    requests = [Alone(1.0, 1.017, 1.03), Alone(2.0, 2.027, 2.05), Alone(3.0, 3.6, 3.7)]
    intake, reply = overheads(steps, requests)
    assert intake == pytest.approx(0.005)
    assert reply == pytest.approx(0.002)
    with pytest.raises(ConfigError, match="too short to send a prompt alone"):
        overheads(steps, requests[2:])


def test_every_round_fits_the_server_that_it_is_sent_to() -> None:
    for each in itertools.islice(rounds(max_num_seqs=6, max_model_len=100, max_step=64), 60):
        assert len(each.prompt_lens) <= 6 or each.rate is not None
        assert max(each.prompt_lens) + each.output_len <= 100
