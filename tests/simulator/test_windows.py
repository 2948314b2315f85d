"""Estimates of models whose layers have sliding windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.planner.roofline import find_machine
from octavo.planner.sources import find_shape
from octavo.simulator.questions import Demand, simulate
from octavo.simulator.setup import Plan
from octavo.simulator.speed import MEASURED, Speed
from octavo.simulator.windows import WindowedLayers


def estimated(model: str, max_model_len: int = 32768) -> Plan:
    return Plan(find_shape(model), EngineConfig(max_model_len=max_model_len), machine=find_machine("h200"))


@given(start=st.integers(0, 60), length=st.integers(1, 60), size=st.integers(1, 40))
def test_queries_save_what_lies_before_their_windows(start: int, length: int, size: int) -> None:
    reading, computing = WindowedLayers(size, 1.0, 0.0), WindowedLayers(size, 0.0, 1.0)
    beyond = [max(0, start + i + 1 - size) for i in range(length)]
    assert reading.saved([start], [length]) == (beyond[0] if start >= size else 0)
    # `StepLoad.chunk_work` counts the queries of a chunk but one, at the mean of their contexts.
    assert computing.saved([start], [length]) == pytest.approx(sum(beyond), abs=beyond[-1])
    assert computing.saved([start], [1]) == 0.0
    assert reading.saved([start, 5], [length, 1]) == reading.saved([start], [length]) + reading.saved([5], [1])


@pytest.mark.slow
def test_long_contexts_take_less_time_with_windows_and_short_ones_do_not() -> None:
    # The same architecture; v0.1 has windows of 4,096 tokens.
    for prompt, is_less in (("3000", False), ("20000", True)):
        demand = Demand(count=2, users=1, input_len=prompt, output_len="50")
        windowed, full = (simulate(estimated(f"mistral-7b-v0.{n}"), demand) for n in (1, 2))
        assert (windowed.itl.percentile(50) < full.itl.percentile(50)) == is_less
        assert (windowed.ttft.percentile(50) < full.ttft.percentile(50)) == is_less
        assert (windowed.duration_s == full.duration_s) != is_less


def test_only_some_of_a_models_layers_have_windows() -> None:
    plan = estimated("gemma-3-4b")
    (layers,) = plan.server().windowed
    times, num_windowed = (
        plan.effective_speed.times,
        sum(layer.sliding_window is not None for layer in plan.spec.layers),
    )
    assert 0 < num_windowed < len(plan.spec.layers)
    assert layers.size == 1024
    share = num_windowed / len(plan.spec.layers)
    assert layers.per_context_token == pytest.approx(share * times.per_context_token)
    assert layers.per_chunk_work == pytest.approx(share * times.per_chunk_work)


def test_nothing_is_taken_off_measured_times_or_where_no_context_exceeds_the_window() -> None:
    plan = estimated("mistral-7b-v0.1")
    assert plan.server().windowed
    assert not estimated("mistral-7b-v0.1", 4096).server().windowed
    assert not estimated("llama-3.1-8b").server().windowed
    measured = plan.replace(machine=None, speed=Speed("made up", MEASURED, plan.effective_speed.times), num_blocks=99)
    assert not measured.server().windowed
