"""What is read from a recording beside the steps' times."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep
from octavo.simulator import calibration
from octavo.simulator.calibration import RoundSender, rounds
from octavo.simulator.overheads import Sent, overheads
from octavo.workloads.serving import RequestRecord, Target
from octavo.workloads.workload import BenchRequest

RECORDED = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}


def step(at: float, seqs: tuple[int, ...], draws: tuple[int, ...]) -> RecordedStep:
    return RecordedStep(1, at, 0.01, seqs, (0,) * len(seqs), (8,) * len(seqs), draws, 0, 0, 0, 0, 0, 0, 0)


def test_a_lone_request_tells_what_the_way_in_takes_and_what_the_way_back() -> None:
    """The second's prompt takes two steps; of the last, which drew its tokens in one step, nothing is known."""
    steps = [step(1.004, (1,), (1,)), step(1.014, (1,), (1,))]
    steps += [step(2.006, (2,), (0,)), step(2.016, (2,), (1,)), step(2.026, (2,), (1,)), step(3.5, (3,), (1,))]
    requests = [Sent("prompt", 1.0, 1.017), Sent("prompt", 2.0, 2.027), Sent("prompt", 3.0, 3.6)]
    intake, reply = overheads(steps, requests, RECORDED)
    assert intake == pytest.approx(0.005)
    assert reply == pytest.approx(0.002)
    with pytest.raises(ConfigError, match="too short to send a prompt alone"):
        overheads(steps[-1:], requests[2:], RECORDED)


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


def test_a_request_beside_others_has_its_token_later() -> None:
    """One alone comes in within 2 ms. The first beside others took 4, the second between 14 and 24."""
    intake, reply = overheads(BESIDE, REQUESTS, RECORDED)
    assert intake == pytest.approx((0.004 + 0.014) / 2)
    assert reply == pytest.approx((0.004 + 0.006) / 2)


@pytest.mark.parametrize("full", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 8}])
def test_a_request_that_waited_for_a_place_says_nothing_about_the_way_in(full: dict[str, int]) -> None:
    intake, _ = overheads(BESIDE, REQUESTS, RECORDED | full)
    assert intake == pytest.approx(0.004)


def test_the_way_in_is_not_what_a_request_waits_for_that_just_misses_a_long_step() -> None:
    """Every request takes 3 ms. One misses a step of 400 ms by a millisecond, the others come in during steps of 8."""
    begins = [0.008 * number for number in range(40)] + [0.4 + 0.008 * number for number in range(5)]
    sent = [
        at + phase - 0.003 for at, phase in zip(begins[4:38:4], itertools.cycle((0.002, 0.004, 0.006)), strict=False)
    ]
    sent.append(begins[39] + 0.001 - 0.003)
    came = [bisect.bisect_left(begins, at + 0.003) for at in sent]
    seqs = [(0, *(number + 1 for number, first in enumerate(came) if first <= index)) for index in range(len(begins))]
    steps = [step(at, each, (1,) * len(each)) for at, each in zip(begins, seqs, strict=True)]
    requests = [Sent("prompt", -0.001, 0.009)] + [Sent("mixed", at, at + 0.5) for at in sent]
    intake, _ = overheads(steps, requests, RECORDED)
    assert intake == pytest.approx(0.003, abs=0.0011)


def test_requests_beside_other_programs_are_not_counted() -> None:
    assert overheads(BESIDE, REQUESTS, RECORDED, left_out=[(4.0, 6.0)]) == pytest.approx((0.002, 0.001))


def test_every_round_fits_the_server_that_it_is_sent_to() -> None:
    for each in itertools.islice(rounds(max_num_seqs=6, max_model_len=100, max_step=64), 60):
        assert len(each.prompt_lens) <= 6 or each.rate is not None
        assert max(each.prompt_lens) + each.output_len <= 100


class FakeServer:
    """A server that takes a millisecond for each token, one after the other, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.prompts: list[int] = []

    def monotonic(self) -> float:
        return self.now

    def run_load(
        self, target: Target, requests: Sequence[BenchRequest], arrivals: Sequence[float]
    ) -> tuple[float, list[RequestRecord]]:
        began = self.now
        self.prompts += [len(request.prompt_token_ids) for request in requests]
        self.now += sum(len(request.prompt_token_ids) + request.max_tokens for request in requests) / 1000
        return began, [RequestRecord(at, sent_s=at, chunk_times=[max(at, self.now - began)]) for at in arrivals]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=fake.monotonic))
    monkeypatch.setattr(calibration, "run_load", fake.run_load)
    return fake


def sender() -> RoundSender:
    options = {"max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 512}
    return RoundSender(Target("", ""), options, 1000)


def test_rounds_are_sent_until_the_time_is_up_and_none_that_would_take_longer(server: FakeServer) -> None:
    sent = sender().send_for(30.0)
    assert 25 < server.now <= 30.0 + 0.1
    assert len(sent) == len(server.prompts)
    assert {each.kind for each in sent} >= {"streams", "prompt", "contexts"}
    assert all(each.sent <= each.first_token for each in sent)


def test_pieces_go_on_with_the_rounds_where_the_one_before_stopped(server: FakeServer) -> None:
    whole, pieces = sender(), sender()
    one = [each.kind for each in whole.send_whole(20.0)]
    seconds, server.now = server.now, 0.0
    parts: list[str] = []
    while server.now < seconds:
        parts += [each.kind for each in pieces.send_whole(1.0)]
    assert parts[: len(one)] == one
