"""A draft model changes when tokens come, never which."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli import main
from octavo.engine.builder import load_draft_model
from octavo.engine.core import EngineCore
from octavo.engine.model_loading import choose_target
from octavo.errors import ConfigError
from octavo.planner.draft_memory import draft_config
from octavo.planner.sources import find_shape
from octavo.scheduler.step_time import StepTimeModel
from tests.engine.preempting import thrash
from tests.engine.test_speculation import make_jobs, run
from tests.engine.tiny_engine import MAX_MODEL_LEN, tiny_core, tiny_model
from tests.models.tiny import make_model, write_tokenizer


@cache
def another_model() -> Path:
    """A smaller random model with the same tokenizer, which draws other tokens."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-tiny-draft-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = make_model("Qwen2", max_position_embeddings=MAX_MODEL_LEN, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def drafting_core(folder: Path, **options: Any) -> Any:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    return tiny_core(speculative_config=config, **options)


class _Cheap(StepTimeModel):
    """Step times as if rows cost nothing, and those of a draft model a hundredth."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._each = seconds

    def decode_seconds(self, rows: int, context: float) -> float:
        return self._each


def make_drafts_cheap(core: EngineCore) -> None:
    speculator = core.scheduler.speculator
    assert speculator is not None
    assert speculator._model is not None
    speculator.times, speculator._model.times = _Cheap(1.0), _Cheap(0.01)


@pytest.mark.parametrize(("which", "least", "most"), [(tiny_model, 0.98, 1), (another_model, 0, 0.1)])
def test_a_draft_model_changes_no_output(which: Callable[[], Path], least: float, most: float) -> None:
    jobs = make_jobs(3, 8, max_tokens=60)
    with tiny_core() as core:
        expected = run(core, jobs)
    with drafting_core(which()) as core:
        make_drafts_cheap(core)
        assert run(core, jobs) == expected
        speculator = core.scheduler.speculator
        assert speculator is not None
        counters = speculator.counters
        model = speculator._model
        assert model is not None
        assert not model._cached, "all its blocks are free again"
    assert counters.num_drafts > 0
    assert least <= counters.num_accepted_tokens / counters.num_draft_tokens <= most
    if least:
        assert core.stats.num_steps < 40
    else:
        assert counters.num_draft_tokens < 60, "it is hardly asked any more"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_draft_model_changes_no_output_of_requests_that_are_preempted(mode: str) -> None:
    jobs = make_jobs(6, 10, frequency_penalty=0.1)
    with tiny_core() as core:
        expected = run(core, jobs)
    with drafting_core(tiny_model(), num_blocks=14, preemption_mode=mode) as core:
        thrash(core)
        make_drafts_cheap(core)
        assert run(core, jobs) == expected
        assert core.scheduler.counters.num_preemptions > 0
        assert core.scheduler.speculator is not None
        assert core.scheduler.speculator.counters.num_accepted_tokens > 20


def test_requests_go_on_without_a_draft_model_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    jobs = make_jobs(4, 4)
    with tiny_core() as core:
        expected = run(core, jobs)
    with drafting_core(tiny_model()) as core:
        make_drafts_cheap(core)
        speculator = core.scheduler.speculator
        assert speculator is not None
        assert speculator._model is not None

        def fail(plan: Any) -> Any:
            raise RuntimeError("no memory")

        speculator._model._execute = fail
        assert run(core, jobs) == expected
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the draft model failed; no drafts from it for a while"
    ]


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copytree(another_model(), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(described))
    with (
        pytest.raises(ConfigError, match=r"same tokenizer.* differs in 2 of 320 tokens: 40 is"),
        drafting_core(tmp_path),
    ):
        pass


def test_a_draft_model_takes_the_longrope_factors_of_the_engines_longest_sequence(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "factor": 4.0, **factors}
    original = {"original_max_position_embeddings": 2 * MAX_MODEL_LEN}
    sizes = {"pad_token_id": 0, "max_position_embeddings": 8 * MAX_MODEL_LEN, **original}
    make_model("Phi3", rope_parameters=rope | original, **sizes).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with drafting_core(tmp_path) as core:  # of a model for MAX_MODEL_LEN tokens
        assert core.scheduler.speculator is not None
        assert core.scheduler.speculator._model is not None
        assert core.scheduler.speculator._model._max_model_len == MAX_MODEL_LEN
    for longest, key in [(MAX_MODEL_LEN, "short_factor"), (4 * MAX_MODEL_LEN, "long_factor")]:
        target = choose_target(draft_config(core.config, str(tmp_path), find_shape(str(tmp_path)), longest))
        assert target.model.rope.frequency_factors == tuple(factors[key])


def test_the_plan_counts_what_a_draft_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"method": "draft_model", "model": str(another_model())}
    options = ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", "64", "--memory", "4GiB"]
    assert main(["plan", str(tiny_model()), *options, "--speculative-config", json.dumps(config), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["plan", str(tiny_model()), *options, "--json"]) == 0
    without = json.loads(capsys.readouterr().out.splitlines()[-1])
    with drafting_core(another_model()) as core, ExitStack() as resources:
        assert core.config.draft_model is not None
        loaded = load_draft_model(core.config, core.config.draft_model, MAX_MODEL_LEN, resources)
        sizes = planned["draft_model_bytes"]
        assert sizes["cache"] == loaded.cache_bytes
        assert sizes["weights"] == pytest.approx(loaded.facts.weight_bytes, rel=0.01)
    assert planned["memory"]["kv_cache_bytes_per_device"] < without["memory"]["kv_cache_bytes_per_device"]
