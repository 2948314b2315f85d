"""Step times estimated from data sheets."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.planner.roofline import BANDWIDTH_REACHED, MACHINES, find_machine
from octavo.planner.sources import find_shape
from octavo.scheduler.step_time import StepTimes
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
