"""The rounds of a calibration, and what is read from its recording besides the times of steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep
from octavo.simulator import calibration
from octavo.simulator.calibration import RoundSender, Sent, overheads, rounds
from octavo.workloads.serving import RequestRecord, Target
from octavo.workloads.workload import BenchRequest


def step(at: float, seqs: tuple[int, ...], draws: tuple[int, ...]) -> RecordedStep:
    return RecordedStep(1, at, 0.01, seqs, (0,) * len(seqs), (8,) * len(seqs), draws, num_moved=0)


def test_intake_and_reply_are_measured_with_requests_that_find_the_server_idle() -> None:
    """The second's prompt takes two steps; of the last, which drew its tokens in one step, nothing is known."""
    steps = [step(1.004, (1,), (1,)), step(1.014, (1,), (1,))]
    steps += [step(2.006, (2,), (0,)), step(2.016, (2,), (1,)), step(2.026, (2,), (1,)), step(3.5, (3,), (1,))]
    requests = [Sent("paused", 1.0, 1.017), Sent("paused", 2.0, 2.027), Sent("paused", 3.0, 3.6)]
    intake, reply = overheads([steps], requests)
    assert intake == pytest.approx(0.005)
    assert reply == pytest.approx(0.002)
    with pytest.raises(ConfigError, match="too short to send a prompt to the idle server"):
        overheads([steps[-1:]], requests[2:])


def test_requests_that_follow_others_or_are_disturbed_by_other_programs_are_not_counted() -> None:
    """A "prompt" followed another request at once, and one of the others came while another program ran."""
    steps, requests = [], []
    for number, (kind, began, intake) in enumerate(
        (("paused", 1.0, 0.002), ("prompt", 2.0, 0.5), ("paused", 3.0, 0.8))
    ):
        steps += [step(began + intake, (number,), (1,)), step(began + intake + 0.01, (number,), (1,))]
        requests.append(Sent(kind, began, began + intake + 0.011))
    assert overheads([[], steps], requests, left_out=[(2.9, 4.0)]) == pytest.approx((0.002, 0.001))


def test_every_round_fits_the_server_that_it_is_sent_to() -> None:
    for each in itertools.islice(rounds(max_num_seqs=6, max_model_len=100, max_step=64), 60):
        assert len(each.prompt_lens) <= 6 or each.rate is not None
        assert max(each.prompt_lens) + each.output_len <= 100


class FakeServer:
    """A server that takes a millisecond for each token, one after the other, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.prompts: list[int] = []
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

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
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=fake.monotonic, sleep=fake.sleep))
    monkeypatch.setattr(calibration, "run_load", fake.run_load)
    return fake


def sender() -> RoundSender:
    options = {"max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 512}
    return RoundSender(Target("", ""), options, 1000)


def test_rounds_are_sent_until_the_time_is_up_and_none_that_would_take_longer(server: FakeServer) -> None:
    sent = sender().send_for(30.0)
    assert 25 < server.now <= 30.0 + 0.1
    assert len(sent) == len(server.prompts)
    assert {each.kind for each in sent} >= {"streams", "prompt", "paused", "contexts"}
    paused = sum(each.kind == "paused" for each in sent)
    assert sum(0.1 <= pause <= 0.5 for pause in server.slept) == paused
    assert all(each.sent <= each.first_token for each in sent)
