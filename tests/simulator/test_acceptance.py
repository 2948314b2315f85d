"""A simulated server speculates as a recorded one did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.planner.roofline import StepTimes
from octavo.request import SequenceId
from octavo.scheduler.plan_log import RecordedStep
from octavo.simulator.acceptance import KnownText, RecordedDrafts, outputs_of
from octavo.simulator.options import Demand
from octavo.simulator.questions import simulate
from octavo.simulator.speed import MEASURED, Speed
from tests.engine.test_draft_model import drafting_core, make_drafts_cheap
from tests.engine.test_speculation import make_jobs, run
from tests.engine.tiny_engine import tiny_model
from tests.scheduler.test_speculation import sequence
from tests.simulator.test_simulation import plan


def step(number: int, *rows: tuple[int, int, int, int]) -> RecordedStep:
    """A step of (sequence, start, length, draws) rows."""
    ids, starts, lengths, draws = zip(*rows, strict=True)
    return RecordedStep(number, 0.0, 1.0, tuple(map(SequenceId, ids)), starts, lengths, draws, 0)


def test_what_a_recording_says_of_its_drafts() -> None:
    steps = [
        step(1, (7, 0, 8, 0)),
        step(2, (7, 8, 2, 1)),  # a prompt of 10 tokens, which draws output 0
        step(3, (7, 10, 1, 1), (8, 0, 5, 1)),
        step(4, (7, 11, 5, 5), (8, 5, 1, 1)),  # outputs 2 to 5 are drafted, 2 and 3 accepted
        step(5, (7, 14, 3, 3)),  # 5 and 6 are, both accepted
        step(6, (7, 17, 2, 2)),  # 8 is, and accepted: 7 was drawn
        step(7, (7, 19, 3, 3)),  # not known how far these hold
    ]
    assert outputs_of(steps) == [(KnownText(2, 4, 2), KnownText(5, 9, 0)), ()]


def test_drafts_hold_as_far_as_recorded() -> None:
    method, seq = RecordedDrafts([(KnownText(2, 4, 2), KnownText(6, 6, 1))]), sequence(5, 6, max_tokens=9)
    found = []
    for _ in range(7):
        draft = method.draft(seq, 8)
        found.append(draft and draft.token_ids)
        seq.output_token_ids.append(1)
    assert found == [None, (1, 1, 0, 0), (1, 0, 0), None, None, (0,), None]


def test_a_simulated_server_takes_fewer_steps_where_drafts_held() -> None:
    times = Speed("", MEASURED, StepTimes(0.01, ((1.0, 0.0), (100.0, 0.01))))
    demand = Demand(num_requests=20, concurrency=1, input_len="8", output_len="60")
    off = simulate(plan().replace(speed=times), demand)
    config = '{"method": "suffix", "num_speculative_tokens": 4}'
    right, wrong = ((KnownText(1, 60, 0),),), ((*(KnownText(i, i, 4) for i in range(1, 60)),),)
    on = simulate(plan().replace(speed=times, speculative_config=config, drafts=right), demand)
    assert off.output_tokens == on.output_tokens == 1200
    assert on.duration_s < 0.3 * off.duration_s
    refuted = simulate(plan().replace(speed=times, speculative_config=config, drafts=wrong), demand)
    assert refuted.duration_s < 1.01 * off.duration_s
    again = simulate(plan().replace(speed=times, speculative_config=config, drafts=right), demand)
    assert again.duration_s == on.duration_s
    with pytest.raises(ConfigError, match="needs a recording"):
        plan().replace(speculative_config=config)


def test_the_recording_of_a_server_says_how_far_its_drafts_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plans.gz"
    with drafting_core(tiny_model(), record_plans=str(file), max_num_seqs=1) as core:
        make_drafts_cheap(core)
        run(core, make_jobs(3, 30, max_tokens=60))
        steps = core.stats.num_steps
        core.close()
    traffic = ["--num-requests", "30", "--concurrency", "1", "--input-len", "20", "--output-len", "60", "--json"]
    elsewhere = ["simulate", "--model", "llama-3-8b", "--machine", "h100", *traffic]
    assert main(elsewhere) == 0
    off = json.loads(capsys.readouterr().out.splitlines()[-1])
    speculating = ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 4}', "--drafts", str(file)]
    assert main([*elsewhere, *speculating]) == 0
    on = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert steps < 600
    assert off["points"][0]["steps"] == 30 * 60
    assert steps <= on["points"][0]["steps"] < 750
    assert main(["simulate", *elsewhere[1:], *speculating[2:]]) == 1
    assert "no --speculative-config is given" in capsys.readouterr().err
