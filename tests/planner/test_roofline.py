"""Step times estimated from data sheets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.planner.roofline import (
    BANDWIDTH_REACHED,
    MACHINES,
    RATE_REACHED,
    StepTimes,
    WindowedLayers,
    find_machine,
    without_overlap,
)
from octavo.planner.sources import find_shape
from octavo.simulator.setup import Plan


def estimated(model: str, machine: str, num_devices: int = 1) -> StepTimes:
    plan = Plan(find_shape(model), EngineConfig(max_model_len=4096), machine=find_machine(machine))
    return plan.replace(num_devices=num_devices).effective_speed.times


@pytest.mark.parametrize(("machine", "gb_s"), [("h100", 64), ("h200", 64), ("a100-80gb", 32), ("l4", 32)])
def test_a_gpus_blocks_go_to_the_host_at_the_speed_of_its_link(machine: str, gb_s: float) -> None:
    block_bytes = 2 << 20
    assert estimated("llama-3.1-8b", machine).per_moved_block == pytest.approx(
        block_bytes / (gb_s * 1e9 * BANDWIDTH_REACHED)
    )


def test_a_cpus_blocks_are_read_and_written_in_its_memory() -> None:
    gb_s = MACHINES["epyc-9654"].gb_s * BANDWIDTH_REACHED
    assert estimated("llama-3.1-8b", "epyc-9654").per_moved_block == pytest.approx(2 * (2 << 20) / (gb_s * 1e9))


def test_all_gpus_have_a_link_to_their_host() -> None:
    assert all(bool(machine.host_gb_s) != machine.on_cpu for machine in MACHINES.values())


def test_a_mixture_reads_the_experts_that_its_rows_use_and_computes_those_of_each_row() -> None:
    shape, times = find_shape("qwen3-30b-a3b"), estimated("qwen3-30b-a3b", "h200")
    assert shape.experts is not None
    assert shape.active_parameters == pytest.approx(3.35e9, rel=0.01)
    byte_s = 1 / (4.8e12 * BANDWIDTH_REACHED)
    dense, routed = shape.parameters.total - shape.experts.parameters, shape.experts.parameters
    assert times.product_seconds(1) == pytest.approx(2 * (dense + routed * 8 / 128) * byte_s)
    assert times.product_seconds(2) == pytest.approx(2 * (dense + routed * (1 - (120 / 128) ** 2)) * byte_s)
    assert times.product_seconds(256) == pytest.approx(2 * (dense + routed) * byte_s, rel=1e-4)
    assert times.product_seconds(9000) == pytest.approx(9000 * 2 * shape.active_parameters / (989e12 * RATE_REACHED))
    seconds = [times.product_seconds(rows) for rows in range(1, 6000, 7)]
    assert seconds == sorted(seconds)
    plan = Plan(shape, EngineConfig(max_model_len=4096), machine=find_machine("h200"))
    added = without_overlap(shape, plan.spec, "bfloat16", 100.0, 1000.0)
    assert added.product_seconds(1) == pytest.approx(2 * shape.active_parameters / 1e12)


def test_devices_that_share_a_mixture_read_their_parts_of_its_experts() -> None:
    alone, halves = (estimated("mixtral-8x7b", "h200", devices).product_seconds(1) for devices in (1, 2))
    assert halves == pytest.approx(alone / 2, rel=0.02)


@given(start=st.integers(0, 60), length=st.integers(1, 60), size=st.integers(1, 40))
def test_queries_save_what_lies_before_their_windows(start: int, length: int, size: int) -> None:
    reading, computing = WindowedLayers(size, 1.0, 0.0), WindowedLayers(size, 0.0, 1.0)
    beyond = [max(0, start + i + 1 - size) for i in range(length)]
    assert reading.saved([start], [length]) == (beyond[0] if start >= size else 0)
    # `StepLoad.chunk_work` counts the queries of a chunk but one, at the mean of their contexts.
    assert computing.saved([start], [length]) == pytest.approx(sum(beyond), abs=beyond[-1])
    assert computing.saved([start], [1]) == 0.0
    assert reading.saved([start, 5], [length, 1]) == reading.saved([start], [length]) + reading.saved([5], [1])
