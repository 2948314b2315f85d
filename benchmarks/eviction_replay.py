"""Compare eviction policies on a recorded hour of a chat service.

    python -m benchmarks.eviction_replay TRACE.jsonl [--pools 1000 4000 ...] [--out benchmarks/results]

Replays a Mooncake trace through the real `KVCacheManager`, one request after the other: match, admit, commit, forget.
One hash id of the trace stands for one block, so a block here is 512 tokens of the trace and one token of the replay.
Every policy is given the same accesses as Belady's optimum, which knows the future, and as an unbounded cache. Times
are processor time, not wall-clock time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from octavo.config import EngineConfig
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache
from octavo.workloads.traces import TOKENS_PER_HASH, read_trace

POOLS = [1_000, 4_000, 16_000, 40_000, 80_000]
HOST_PER_BLOCK = 4

SPEC = KVCacheSpec.build([LayerKVSpec(num_kv_heads=1, key_dim=1, value_dim=1)], block_size=1, dtype="float32")

Prompt = tuple[int, ...]
Operation = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Result:
    """One replay; `hit_rate` is the share of block references that were found."""

    policy: str
    pool_blocks: int
    hit_rate: float
    evictions: int
    us_per_block: float


def options(policy: str) -> EngineConfig:
    return EngineConfig.from_options({"eviction_policy": policy})


def make_requests(prompts: Sequence[Prompt]) -> list[Request]:
    params = SamplingParams(max_tokens=1)
    # A hit never covers the last token, so add one that is not computed.
    return [Request(RequestId(str(i)), [*prompt, -1], params) for i, prompt in enumerate(prompts)]


def replay(manager: KVCacheManager, requests: Sequence[Request]) -> Counter[str]:
    """Replay the requests; returns the blocks found, by tier."""
    found: Counter[str] = Counter()
    transfers = manager.hierarchy.host
    for request in requests:
        seq = request.sequences[0]
        length = seq.num_tokens - 1
        hit = manager.match(seq)
        found["host"] += len(hit.loads)
        found["device"] += hit.num_tokens - len(hit.loads)
        if not manager.admit(seq, hit, length - hit.num_tokens):
            raise SystemExit(f"a prompt of {length} blocks does not fit a pool of {manager.pool.num_blocks - 1}")
        transfers.take()
        transfers.complete()
        seq.num_computed = length
        manager.commit(seq)
        manager.forget(seq)
    manager.audit()
    return found


def measure(policy: str, pool_blocks: int, prompts: Sequence[Prompt]) -> Result:
    manager = assemble_cache(options(policy), SPEC, pool_blocks + 1)
    requests = make_requests(prompts)
    total = sum(map(len, prompts))
    started = time.process_time()
    hits = replay(manager, requests).total()
    seconds = time.process_time() - started
    # Every miss publishes a block: those not cached at the end were evicted.
    evictions = total - hits - manager.pool.num_cached
    return Result(policy, pool_blocks, hits / total, evictions, 1e6 * seconds / total)


@dataclass(frozen=True)
class TieredResult:
    """One replay over two tiers: the shares of block references found on the device and in host memory."""

    policy: str
    pool_blocks: int
    host_blocks: int
    device_hit_rate: float
    host_hit_rate: float


def measure_two_tiers(policy: str, pool_blocks: int, host_blocks: int, prompts: Sequence[Prompt]) -> TieredResult:
    """Replay with two tiers: blocks evicted from the device go to host memory, and hits there are loaded back.

    Both tiers evict by the policy.
    """
    config = replace(options(policy), kv_demotion="on_evict")
    manager = assemble_cache(config, SPEC, pool_blocks + 1, num_prefix_blocks=host_blocks)
    found, total = replay(manager, make_requests(prompts)), sum(map(len, prompts))
    return TieredResult(policy, pool_blocks, host_blocks, found["device"] / total, found["host"] / total)


def belady(prompts: Sequence[Prompt], pool_blocks: int) -> float:
    """Hit rate of the optimum (Belady 1966): evict what is never used again, then what is used again last.

    Blocks are taken one by one and none is held by its own request, which makes this an upper bound for every policy. A
    block's next use is never before that of its parent, so the optimum, too, keeps prefixes whole.
    """
    references = [block for prompt in prompts for block in prompt]
    never = len(references)
    next_use = [never] * never
    seen: dict[Any, int] = {}
    for time_ in range(never - 1, -1, -1):
        next_use[time_] = seen.get(references[time_], never)
        seen[references[time_]] = time_
    resident: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for time_, block in enumerate(references):
        if block in resident:
            hits += 1
        elif len(resident) == pool_blocks:
            while True:
                use, _, victim = heapq.heappop(farthest)
                if resident.get(victim) == -use:
                    del resident[victim]
                    break
        resident[block] = next_use[time_]
        heapq.heappush(farthest, (-next_use[time_], -time_, block))
    return hits / never


def infinite(prompts: Sequence[Prompt]) -> float:
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        hits += sum(block in seen for block in prompt)
        seen.update(prompt)
    return hits / sum(map(len, prompts))


def run(prompts: Sequence[Prompt], pools: Sequence[int]) -> dict[str, Any]:
    results = []
    for pool in pools:
        for policy in EVICTION_POLICIES:
            results.append(measure(policy, pool, prompts))
            print(f"{pool:>7} {policy:<9} {results[-1].hit_rate:7.2%}", flush=True)
    return {
        "requests": len(prompts),
        "block_references": sum(map(len, prompts)),
        "unique_blocks": len({block for prompt in prompts for block in prompt}),
        "tokens_per_block": TOKENS_PER_HASH,
        "infinite": infinite(prompts),
        "belady": {pool: belady(prompts, pool) for pool in pools},
        "results": [asdict(result) for result in results],
        "two_tiers": [
            asdict(measure_two_tiers(p, pools[0], HOST_PER_BLOCK * pools[0], prompts)) for p in EVICTION_POLICIES
        ],
        "python": platform.python_version(),
    }


def table(report: dict[str, Any], trace: str) -> str:
    pools = list(report["belady"])
    by_key = {(r["policy"], r["pool_blocks"]): r for r in report["results"]}
    lines = [
        "# Eviction policies on a recorded hour of chat",
        "",
        f"`python -m benchmarks.eviction_replay {trace}`, Python {report['python']}, one core. "
        f"{report['requests']:,} requests, {report['block_references']:,} block references, "
        f"{report['unique_blocks']:,} different blocks of {report['tokens_per_block']} tokens, one request at a time.",
        "",
        "Share of block references found in the cache, by blocks in the pool (and tokens they hold):",
        "",
        "| policy | " + " | ".join(f"{p:,} ({p * TOKENS_PER_HASH / 1e6:.1f} M)" for p in pools) + " |",
        "|---|" + "---:|" * len(pools),
    ]
    for policy in EVICTION_POLICIES:
        rates = (f"{by_key[policy, pool]['hit_rate']:.2%}" for pool in pools)
        lines.append(f"| {policy} | " + " | ".join(rates) + " |")
    lines.append("| Belady's optimum | " + " | ".join(f"{report['belady'][pool]:.2%}" for pool in pools) + " |")
    lines.append("| infinite cache | " + " | ".join(f"{report['infinite']:.2%}" for _ in pools) + " |")
    middle = pools[len(pools) // 2]
    device, host = report["two_tiers"][0]["pool_blocks"], report["two_tiers"][0]["host_blocks"]
    lines += [
        "",
        f"Two tiers (`--kv-demotion on_evict`): {device:,} blocks on the device and {host:,} in host memory, "
        "both evicting by the same policy (host memory without priorities).",
        "",
        "| policy | device | host memory | together |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {r['policy']} | {r['device_hit_rate']:.2%} | {r['host_hit_rate']:.2%} "
        f"| {r['device_hit_rate'] + r['host_hit_rate']:.2%} |"
        for r in report["two_tiers"]
    ]
    lines += [
        "",
        f"Processor time of all that the manager does for one block of a prompt, at {middle:,} blocks:",
        "",
        "| policy | µs per reference |",
        "|---|---:|",
    ]
    lines += [f"| {policy} | {by_key[policy, middle]['us_per_block']:.2f} |" for policy in EVICTION_POLICIES]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="a Mooncake trace (JSON lines with hash_ids)")
    parser.add_argument("--pools", type=int, nargs="+", default=POOLS, help="blocks in the pool")
    parser.add_argument("--limit", type=int, help="only the first requests of the trace")
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for eviction_mooncake.md and .json")
    options = parser.parse_args()
    prompts = [request.hash_ids for request in read_trace(options.trace)[: options.limit] if request.hash_ids]
    report = run(prompts, options.pools)
    text = table(report, options.trace.name)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "eviction_mooncake.md").write_text(text)
        (options.out / "eviction_mooncake.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
