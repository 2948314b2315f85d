"""What is read from a recording beside the steps' times."""

from __future__ import annotations

import itertools

import pytest

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep
from octavo.simulator.calibration import rounds
from octavo.simulator.overheads import Sent, overheads


def step(at: float, seqs: tuple[int, ...], draws: tuple[int, ...]) -> RecordedStep:
    return RecordedStep(1, at, 0.01, seqs, (0,) * len(seqs), (8,) * len(seqs), draws, 0, 0, 0, 0, 0, 0, 0)


def test_a_lone_request_tells_what_the_way_in_takes_and_what_the_way_back() -> None:
    """The second's prompt takes two steps; of the last, which drew its tokens in one step, nothing is known."""
    steps = [step(1.004, (1,), (1,)), step(1.014, (1,), (1,))]
    steps += [step(2.006, (2,), (0,)), step(2.016, (2,), (1,)), step(2.026, (2,), (1,)), step(3.5, (3,), (1,))]
    requests = [Sent("prompt", 1.0, 1.017), Sent("prompt", 2.0, 2.027), Sent("prompt", 3.0, 3.6)]
    intake, reply = overheads(steps, requests, 8)
    assert intake == pytest.approx(0.005)
    assert reply == pytest.approx(0.002)
    with pytest.raises(ConfigError, match="too short to send a prompt alone"):
        overheads(steps[-1:], requests[2:], 8)


BESIDE = [
    step(1.0, (1,), (1,)),
    step(1.01, (1,), (1,)),
    step(5.00, (2,), (1,)),
    step(5.01, (2,), (1,)),
    step(5.02, (2,), (1,)),
    step(5.03, (2, 3), (1, 1)),
    step(5.04, (2, 3), (1, 1)),
]
REQUESTS = [Sent("prompt", 0.998, 1.011), Sent("mixed", 4.996, 5.014), Sent("mixed", 5.006, 5.046)]


def test_a_request_beside_others_may_miss_a_step_and_has_its_token_later() -> None:
    """One alone comes in within 2 ms. The first beside others took 4, the second missed the step that began at 5.01."""
    intake, reply = overheads(BESIDE, REQUESTS, 8)
    assert intake == pytest.approx(0.002 + (0.002 + 0.02) / 2)
    assert reply == pytest.approx((0.004 + 0.006) / 2)


def test_a_request_that_waited_for_a_place_says_nothing_about_the_way_in() -> None:
    intake, _ = overheads(BESIDE, REQUESTS, 1)
    assert intake == pytest.approx(0.002 + 0.002)


def test_requests_beside_other_programs_are_not_counted() -> None:
    assert overheads(BESIDE, REQUESTS, 8, left_out=[(4.0, 6.0)]) == pytest.approx((0.002, 0.001))


def test_every_round_fits_the_server_that_it_is_sent_to() -> None:
    for each in itertools.islice(rounds(max_num_seqs=6, max_model_len=100, max_step=64), 60):
        assert len(each.prompt_lens) <= 6 or each.rate is not None
        assert max(each.prompt_lens) + each.output_len <= 100
