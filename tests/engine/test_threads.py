"""How many threads the kernels have, and which CPUs, while an engine loads its model and runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams, kernels
from octavo.engine import runner_builder
from tests.conftest import MakeLLM

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]


def counting_threads(function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """`function`, which notes at each call how many threads the kernels have."""

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(kernels.num_threads())
        return function(*args, **options)

    return counted


def test_a_model_is_loaded_in_as_many_threads_as_the_engine_is_given(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(runner_builder, "_load", counting_threads(runner_builder._load, seen))
    kernels.set_num_threads(7)
    make_llm(tiny_llama, num_threads=2)
    assert seen == [2]


def test_each_engine_of_a_process_keeps_its_number_of_threads(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    one, other = make_llm(tiny_llama, num_threads=3), make_llm(tiny_llama, num_threads=2)
    for llm, threads in ((one, 3), (other, 2), (one, 3)):
        seen: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(llm.core.runner.model, "forward", counting_threads(llm.core.runner.model.forward, seen))
            llm.generate(["Once"], params)
        assert set(seen) == {threads}
