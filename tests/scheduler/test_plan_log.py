"""What a recording holds is what was executed, in numbers, and never more than it may."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.plan_log import PlanLog, read_facts, read_plans
from tests.scheduler.kit import Harness


def played(num_blocks: int, prompts: list[int], n: int) -> list[StepPlan]:
    engine = Harness(num_blocks=num_blocks)
    for prompt in prompts:
        engine.add(prompt, n=n, prompt_logprobs=0)
    plans = []
    while engine.scheduler.has_work:
        plans.append(engine.step(draw=lambda seq: seq.index))
    return plans


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    num_blocks=st.integers(20, 60), prompts=st.lists(st.integers(1, 40), min_size=1, max_size=6), n=st.integers(1, 3)
)
def test_the_steps_are_read_as_they_were_executed(
    tmp_path_factory: pytest.TempPathFactory, num_blocks: int, prompts: list[int], n: int
) -> None:
    path = tmp_path_factory.mktemp("plans") / "plans"
    plans = played(num_blocks, prompts, n)
    log = PlanLog(path, {"block_size": 4})
    for i, plan in enumerate(plans):
        log.record(plan, float(i), 0.25 * i)
    log.close()
    assert read_facts(path) == {"block_size": 4}
    steps = list(read_plans(path))
    assert len(steps) == len(plans)
    for i, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        assert (step.step, step.at, step.seconds) == (plan.step, pytest.approx(i), 0.25 * i)  # type: ignore[comparison-overlap]
        assert (step.seq_ids, step.starts) == (plan.seq_ids, plan.starts)
        assert (step.lengths, step.draws) == (plan.lengths, plan.draws)
        assert step.num_tokens == plan.num_tokens
        assert step.num_moved == len(plan.copies) + len(plan.stores) + len(plan.loads)


def test_no_token_is_in_it(tmp_path: Path) -> None:
    """Two recordings of prompts of the same lengths differ in nothing, whatever the prompts say."""
    plans = [StepPlan(1, (1,), (0,), (3,), (0,), tokens) for tokens in ((7, 8, 9), (1, 1, 1))]  # type: ignore[arg-type]
    written = []
    for plan in plans:
        log = PlanLog(tmp_path / "plans", {})
        log.record(plan, 1.5, 0.5)
        log.close()
        written.append((tmp_path / "plans").read_bytes())
    assert written[0] == written[1]


def test_a_recording_ends_where_it_has_its_size_and_nothing_else_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = PlanLog(tmp_path / "plans", {}, max_bytes=20_000)
    plan = StepPlan(1, tuple(range(64)), tuple(range(64)), (1,) * 64, (1,) * 64, (5,) * 64)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for step in range(20_000):
            log.record(plan, step * 0.137, 0.001 * (step % 17))
        log.close()
    assert (tmp_path / "plans").stat().st_size <= 20_000
    assert 0 < len(list(read_plans(tmp_path / "plans"))) < 20_000
    assert len([r for r in caplog.records if "no more plans are recorded" in r.message]) == 1


def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    log = PlanLog(path, {})
    plan = StepPlan(1, tuple(range(64)), tuple(range(64)), (1,) * 64, (1,) * 64, (5,) * 64)  # type: ignore[arg-type]
    for step in range(200):
        log.record(plan, float(step), 0.5)
    log.close()
    whole = len(list(read_plans(path)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    assert 0 < len(list(read_plans(path))) < whole == 200


def test_a_file_that_is_not_a_recording_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("something else\n")
    with pytest.raises(ConfigError, match="not a recording of plans of version 3"):
        list(read_plans(tmp_path / "other"))
    with pytest.raises(ConfigError, match="record_plans: cannot write"):
        PlanLog(tmp_path / "missing" / "plans", {})
    if Path("/dev/full").exists():
        with pytest.raises(ConfigError, match="record_plans: cannot write '/dev/full': No space left"):
            PlanLog("/dev/full", {})


def test_a_recording_that_is_damaged_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    log = PlanLog(path, {"block_size": 4})
    log.record(StepPlan(1, (7,), (0,), (1,), (1,), (5,)), 0.0, 0.5)  # type: ignore[arg-type]
    log.close()
    written = path.read_bytes()
    facts = gzip.compress(b'{"octavo plans":3}\n')
    for content, message in (
        (b"", "is not a recording of plans of version 3"),
        (written[:20], "whose first line is incomplete"),
        (gzip.compress(b"[]\n"), "is not a recording of plans of version 3"),
        (gzip.compress(b'{"octavo plans":2}\n'), "is not a recording of plans of version 3"),
        (gzip.compress(b"{\n"), "is not a recording of plans of version 3: Expecting"),
        (written[:-1] + bytes([written[-1] ^ 1]), "is a damaged recording of plans, version 3: Incorrect length"),
        (facts + gzip.compress(b"[1,2]\n"), "is a damaged recording of plans, version 3: not enough values"),
        (facts + gzip.compress(b"7\n"), "is a damaged recording of plans, version 3"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            list(read_plans(path))
    for read in (read_facts, lambda path: list(read_plans(path))):
        with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
            read(tmp_path / "missing")
        with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
            read(tmp_path)


def test_a_recording_says_what_its_engine_is_before_the_first_step(tmp_path: Path) -> None:
    log = PlanLog(tmp_path / "plans", {"block_size": 4})
    assert read_facts(tmp_path / "plans") == {"block_size": 4}
    log.close()
