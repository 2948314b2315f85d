"""Every option that concerns the cache or the scheduler reaches its object, and only `assembly.py` joins them."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.config import EngineConfig
from octavo.kvcache.eviction import FifoEviction
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.policy import AgeingPriority, FirstComeFirstServed, VirtualTokenCounter
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.scheduler import Scheduler
from tests.kvcache.caches import FULL, Clock

SPEC = KVCacheSpec.build([FULL], 4, "float32")
SPEED = Preemption(1.0, 2.0)


def cache(num_host_blocks: int = 0, **options: Any) -> KVCacheManager:
    return assemble_cache(EngineConfig(**options), SPEC, 101, num_host_blocks=num_host_blocks, num_prefix_blocks=8)


def scheduler(num_host_blocks: int = 0, speed: Preemption | None = SPEED, **options: Any) -> Scheduler:
    return assemble_scheduler(EngineConfig(**options), cache(num_host_blocks, **options), 64, preemption=speed)


# Option, value -> what shows that it has arrived.
REACHED: dict[tuple[str, Any], Any] = {
    ("enable_prefix_caching", False): lambda s: not s.kv.caches_prefixes,
    ("prefix_cache", "hashed"): lambda s: s.waiting._prefix_length is None,
    ("prefix_cache", "radix"): lambda s: s.waiting._prefix_length is not None,
    ("eviction_policy", "fifo"): lambda s: isinstance(s.kv.pool._eviction, FifoEviction),
    ("pin_budget", 0.5): lambda s: s.kv.pins.budget_blocks == 50,
    ("scheduling_policy", "fcfs"): lambda s: type(s.policy) is FirstComeFirstServed,
    ("scheduling_policy", "vtc"): lambda s: isinstance(s.policy, VirtualTokenCounter),
    ("scheduling_policy", "priority"): lambda s: isinstance(s.policy, AgeingPriority) and s.policy.seconds == 60.0,
    ("kv_demotion", "all"): lambda s: s.kv.hierarchy._demotes == "all",
    ("tenant_share", 0.2): lambda s: s.kv.pins.tenant_blocks == 5,
    ("preemption_mode", "recompute"): lambda s: s.preemption.mode == "recompute",
    ("preemption_mode", "swap"): lambda s: s.preemption.mode == "swap",
    ("preemption_mode", "auto"): lambda s: s.preemption.mode == "auto" and s.preemption is SPEED,
    ("max_num_seqs", 7): lambda s: s.config.max_num_seqs == 7,
    ("itl_slo_ms", 50.0): lambda s: s.config.itl_slo_ms == 50.0,
    ("max_num_batched_tokens", 99): lambda s: s.config.max_num_batched_tokens == 99,
}

# Options of the model, the machine and the sizes, which the caller of the assembly works out.
ELSEWHERE = {
    "model", "dtype", "quantization", "device", "max_model_len", "block_size", "kv_cache_memory", "num_blocks",
    "gpu_memory_utilization", "kv_cache_dtype", "swap_space", "attention_backend", "deterministic", "num_threads",
    "seed", "tensor_parallel_size", "record_plans", "chat_template", "generation_config",
    "pooling", "enforce_eager", "calculate_kv_scales", "kv_scales", "kv_host_memory", "kv_disk", "kv_disk_size",
    "kv_events_config", "speculative_config", "kv_remote", "kv_remote_secret", "async_scheduling",
    "limits", "model_impl", "hf_file", "load_format", "hf_overrides", "tokenizer", "hf_token", "revision",
    "kv_budget", "kv_neighbours", "cpu_list", "nnodes", "node_rank", "master_addr", "master_port",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REACHED, ids=str)
def test_each_option_reaches_its_object(name: str, value: Any) -> None:
    assert REACHED[name, value](scheduler(num_host_blocks=5, **{name: value}))


def test_every_option_is_either_shown_to_arrive_or_not_the_schedulers() -> None:
    shown = {name for name, _ in REACHED}
    assert not shown & ELSEWHERE
    assert shown | ELSEWHERE == {field.name for field in fields(EngineConfig)}


def test_sizes_identity_policy_and_clock_arrive() -> None:
    clock = Clock()
    config = EngineConfig(eviction_policy="fifo")
    kv = assemble_cache(config, SPEC, 33, num_host_blocks=9, identity=("m", "bf16"), clock=clock)
    assert (kv.pool.num_blocks, kv.hierarchy.host.num_swap_slots, kv.pins.clock) == (33, 9, clock)
    assert kv.prefix_cache._identity == ("m", "bf16", "4")
    assert isinstance(kv.pool._eviction, FifoEviction)


def test_without_host_memory_everything_is_recomputed() -> None:
    for mode in ("auto", "swap", "recompute"):
        assert scheduler(0, speed=None, preemption_mode=mode).preemption.mode == "recompute"


def test_auto_begins_with_unknown_speeds_that_the_scheduler_measures() -> None:
    found = scheduler(5, speed=None)
    assert found.preemption.mode == "auto"
    assert found.preemption == Preemption(None, None, "auto")


@pytest.mark.parametrize(("deterministic", "mode"), [(False, "swap"), (True, "auto")])
def test_auto_swaps_where_recomputing_rounds_differently(deterministic: bool, mode: str) -> None:
    spec = KVCacheSpec.build([LayerKVSpec(1, 32, 32)], 16, "int8")
    config = EngineConfig(deterministic=deterministic)
    kv = assemble_cache(config, spec, 33, num_host_blocks=5)
    assert assemble_scheduler(config, kv, 64).preemption.mode == mode


def test_more_headroom_is_held_where_tenants_take_turns() -> None:
    configs = [EngineConfig(scheduling_policy=policy) for policy in ("fcfs", "vtc")]
    found = [assemble_scheduler(config, cache(), 64) for config in configs]
    assert [scheduler.config.headroom_tokens for scheduler in found] == [32, 96]


@pytest.mark.slow
def test_only_assembly_joins_a_cache_and_a_scheduler() -> None:
    """Neither in the package nor in benchmarks: whoever did would drop options silently."""
    package = Path(octavo.__file__).parent
    files = [*package.rglob("*.py"), *(package.parents[1] / "benchmarks").glob("*.py")]
    joining = {
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Scheduler", "KVCacheManager", "make_prefix_cache")
    }
    assert joining == {"assembly.py"}
