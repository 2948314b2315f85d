"""Thrash under oversubscription: `python -m benchmarks.preemption`. The real scheduler and KV cache, no model.

All requests wait from the start, and `--oversubscription` times as many run at once as the pool can hold at their full
length. A runner that draws token 7 replaces the model, and a virtual clock counts the time that the steps would take: a
fixed part (weights are read once per step), a part per computed token, a part per context token read, and a part per
block moved. Every token that is computed again is counted, exactly.

The first row is the baseline: preempted sequences are recomputed, and no block is held back.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import Literal

from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId, Sequence, SequenceId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.preemption import RestoreSpeed
from octavo.scheduler.scheduler import DEFAULT_HEADROOM_TOKENS, DEFAULT_WATERMARK

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepCost:
    """Seconds, like those of a 135M-parameter model on two cores: 8 ms of weights, 1,000 tokens/s of prefill."""

    step: float = 8e-3
    token: float = 1e-3
    context_token: float = 1e-6
    block_moved: float = 1e-4


@dataclass(frozen=True)
class Setup:
    """One row of the table; with a watermark and a headroom of 0, nothing is held back."""

    name: str
    mode: Literal["auto", "recompute", "swap"] = "recompute"
    watermark: float = DEFAULT_WATERMARK
    headroom: int = DEFAULT_HEADROOM_TOKENS
    prefix_caching: bool = False


@dataclass
class Result:
    computed: int = 0
    recomputed: int = 0
    preemptions: int = 0
    blocks_moved: int = 0
    steps: int = 0
    seconds: float = 0.0
    output_tokens: int = 0
    running: int = 0


def workload(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of 32 to 512 tokens, outputs of 64 to 512: (token ids, output length)."""
    rng = random.Random(seed)
    return [([rng.randrange(50_000) for _ in range(rng.randint(32, 512))], rng.randint(64, 512)) for _ in range(count)]


def measure(setup: Setup, arguments: argparse.Namespace, cost: StepCost) -> Result:
    requests = workload(arguments.requests, arguments.seed)
    spec = KVCacheSpec.build([LayerKVSpec(3, 64, 64)] * 30, BLOCK_SIZE, "bfloat16")
    full = sum(spec.blocks_for_tokens(len(p) + n) for p, n in requests) / len(requests)
    num_blocks = 1 + int(arguments.num_seqs * full / arguments.oversubscription)
    config = EngineConfig(
        max_num_seqs=arguments.num_seqs,
        preemption_mode=setup.mode,
        enable_prefix_caching=setup.prefix_caching,
    )
    num_host_blocks = 0 if setup.mode == "recompute" else arguments.host_blocks
    kv = assemble_cache(config, spec, num_blocks, num_host_blocks=num_host_blocks)
    scheduler = assemble_scheduler(
        config,
        kv,
        MAX_MODEL_LEN,
        restore_speed=RestoreSpeed(cost.token, cost.block_moved),
        watermark=setup.watermark,
        headroom_tokens=setup.headroom,
    )
    for i, (prompt, output) in enumerate(requests):
        # Clients request more tokens than they get: the scheduler knows the limit, not the length.
        params = SamplingParams(max_tokens=arguments.max_tokens or output, stop_token_ids=[8])
        scheduler.add(Request(RequestId(f"r{i}"), prompt, params, arrival_time=float(i)))
    lengths = {RequestId(f"r{i}"): output for i, (_, output) in enumerate(requests)}
    result = Result()
    reached: dict[SequenceId, int] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        account(plan, result, reached, cost)
        result.running += scheduler.num_running
        scheduler.update(plan, play_runner(scheduler.drawing, lengths))
    kv.audit()
    result.preemptions = scheduler.counters.num_preemptions
    result.output_tokens = sum(lengths.values())
    return result


def account(plan: StepPlan, result: Result, reached: dict[SequenceId, int], cost: StepCost) -> None:
    context = 0
    for seq_id, start, length in zip(plan.seq_ids, plan.starts, plan.lengths, strict=True):
        before, end = reached.get(seq_id, 0), start + length
        result.recomputed += max(0, min(end, before) - start)
        reached[seq_id] = max(before, end)
        context += end
    moved = len(plan.stores) + len(plan.loads)
    result.computed += plan.num_tokens
    result.blocks_moved += moved
    result.steps += 1
    result.seconds += cost.step + plan.num_tokens * cost.token + context * cost.context_token + moved * cost.block_moved


def play_runner(drawing: list[Sequence], lengths: dict[RequestId, int]) -> StepResult:
    """Draw token 8, which ends a sequence, at the length that the workload has set."""
    ends = (seq.num_output_tokens + 1 >= lengths[seq.request.request_id] for seq in drawing)
    return StepResult(tuple(8 if end else 7 for end in ends))


BASELINE = Setup("recompute, no watermark", watermark=0.0, headroom=0)
SETUPS = (
    BASELINE,
    Setup("recompute, watermark 1 %", headroom=0),
    Setup("recompute, watermark and headroom"),
    Setup("recompute, prefix cache", prefix_caching=True),
    Setup("swap, no watermark", mode="swap", watermark=0.0, headroom=0),
    Setup("swap", mode="swap"),
    Setup("auto (the default)", mode="auto"),
    Setup("auto, prefix cache (the default)", mode="auto", prefix_caching=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--num-seqs", type=int, default=48)
    parser.add_argument("--oversubscription", type=float, default=1.5)
    parser.add_argument("--host-blocks", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=1024, help="what clients ask for; 0: what they will get")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = {setup.name: measure(setup, arguments, StepCost()) for setup in SETUPS}
    base = results[BASELINE.name]
    print("| mode | preemptions | recomputed tokens | of the first | blocks moved | running | tokens/s | of |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, r in results.items():
        share = r.recomputed / max(1, base.recomputed)
        speed, base_speed = r.output_tokens / r.seconds, base.output_tokens / base.seconds
        print(
            f"| {name} | {r.preemptions} | {r.recomputed:,} | {share:.0%} | {r.blocks_moved:,} "
            f"| {r.running / r.steps:.1f} | {speed:.0f} | {speed / base_speed:.3f} |"
        )
    print(json.dumps({name: {**vars(r), "seconds": round(r.seconds, 3)} for name, r in results.items()}))


if __name__ == "__main__":
    main()
