"""The model that `octavo calibrate` measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo import LLM
from octavo.runner.runner import ModelRunner


@contextmanager
def loaded(options: dict[str, Any], length: int) -> Iterator[tuple[LLM, ModelRunner]]:
    """Load the model with a small cache, which calibration does not use."""
    small: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": length, "kv_cache_memory": "512MiB"}
    alone = {**options, "kv_cache_dtype": "auto", "swap_space": 0, "preemption_mode": "recompute"}
    with LLM(**{**small, **alone}) as llm:
        runner = llm.core.runner
        assert isinstance(runner, ModelRunner), "the options name no other executor"
        yield llm, runner
