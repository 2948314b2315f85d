"""What `--record-plans` writes of an engine's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan_log import read_facts, read_plans
from tests.engine.tiny_engine import tiny_model

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one by one", "planned ahead"])
def test_plans_are_recorded_with_their_seconds(tmp_path: Path, is_ahead: bool) -> None:
    path = tmp_path / "plans"
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 100, "num_threads": 1, "record_plans": str(path)}
    with LLM(model=str(tiny_model()), async_scheduling=is_ahead, **options) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5] * 20}, {"prompt_token_ids": [6] * 3}], params, use_tqdm=False)
    steps = list(read_plans(path))
    assert [step.lengths for step in steps][:2] == [(20, 3), (1, 1)]
    assert [sum(step.starts) + step.num_tokens for step in steps] == [23, 25, 27, 29, 31]
    assert all(step.seconds > 0 for step in steps)
    ends = [step.at + step.seconds for step in steps]
    assert all(step.at >= end for step, end in zip(steps[1:], ends, strict=False)), "no moment counts twice"
    assert read_facts(path)["block_size"] == 16
