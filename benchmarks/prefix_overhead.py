"""The cost of prefix caching if nothing is shared: `python -m benchmarks.prefix_overhead [--out benchmarks/results]`.

Unique prompts go through the real scheduler and KV cache, arriving as others end, in a pool small enough that blocks
are evicted all the time. A runner that always draws token 7 replaces the model, so that only bookkeeping is timed. The
difference from no caching is compared with the time that a model would take for the same steps. Prints one JSON object
on the last line of standard output.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time

from benchmarks import this_machine
from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult

CACHES = {"none": None, "hashed": "hashed", "radix": "radix"}

# Seconds a step takes: a decode step of the batch, plus its prompt tokens at the rate of prefill. Orders of magnitude
# of Llama 3.1 8B in bf16 on an H200 (16 GB of weights read at 4 TB/s, plus KV and launches; 25,000 prompt tokens a
# second), and of SmolLM2-135M on two CPU cores. Assumed, not measured.
MACHINES = {"8B on a GPU": (0.008, 25_000.0), "135M on two cores": (0.050, 3_000.0)}


def run(cache: str | None, eviction: str, arguments: argparse.Namespace) -> dict[str, float]:
    layer = LayerKVSpec(8, 128, 128)
    spec = KVCacheSpec.build([layer] * 32, 16, "bfloat16")
    most = spec.blocks_for_tokens(arguments.prompt_tokens + arguments.output_tokens)
    options = {"max_num_seqs": arguments.num_seqs, "eviction_policy": eviction}
    caching = {"enable_prefix_caching": False} if cache is None else {"prefix_cache": cache}
    config = EngineConfig.from_options({**options, **caching})
    kv = assemble_cache(config, spec, 2 * arguments.num_seqs * most)
    scheduler = assemble_scheduler(config, kv, max_model_len=8192)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=arguments.output_tokens, ignore_eos=True)
    requests = [
        Request(RequestId(str(i)), [rng.randrange(50_000) for _ in range(arguments.prompt_tokens)], params)
        for i in range(arguments.requests)
    ]
    arriving = iter(requests)
    steps = prompt_tokens = 0
    started = time.process_time()
    while True:
        while scheduler.num_running + scheduler.num_waiting < arguments.num_seqs + 32:
            if (request := next(arriving, None)) is None:
                break
            scheduler.add(request)
        if not (plan := scheduler.schedule()):
            break
        scheduler.update(plan, StepResult((7,) * plan.num_draws))
        steps += 1
        prompt_tokens += sum(length for length in plan.lengths if length > 1)
    seconds = time.process_time() - started
    return {"seconds": seconds, "steps": steps, "prompt_tokens": prompt_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=150)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for prefix_overhead.md")
    arguments = parser.parse_args()
    variants = [("none", "lru"), ("hashed", "lru"), ("hashed", "fifo"), ("radix", "lru"), ("radix", "fifo")]
    # Alternating, so that a busy minute of the machine affects all alike; the least disturbed run of each counts.
    runs = [[run(CACHES[cache], policy, arguments) for cache, policy in variants] for _ in range(arguments.runs)]
    best = [min((turn[i] for turn in runs), key=lambda r: r["seconds"]) for i in range(len(variants))]
    rows = []
    for (cache, policy), result in zip(variants, best, strict=True):
        extra = result["seconds"] - best[0]["seconds"]
        row: dict[str, object] = {
            "prefix_cache": cache,
            "policy": policy,
            "us_per_step": 1e6 * result["seconds"] / result["steps"],
            "extra_us_per_step": 1e6 * extra / result["steps"],
        }
        for machine, (decode, prefill) in MACHINES.items():
            model = result["steps"] * decode + result["prompt_tokens"] / prefill
            row[f"extra, {machine}"] = extra / model
        rows.append(row)
    lines = [
        "# What prefix caching costs where nothing is shared",
        "",
        f"`python -m benchmarks.prefix_overhead`, Python {platform.python_version()}, one core, processor time, best "
        f"of {arguments.runs} runs. {arguments.requests} unique prompts of {arguments.prompt_tokens:,} tokens, "
        f"{arguments.output_tokens} tokens out, {arguments.num_seqs} sequences at a time, blocks of 16, every block "
        "evicted in the end. A step here is `add`, `schedule` and `update` of the real scheduler and cache, nothing "
        "computed; the shares are of the time a model is assumed to take for the same steps: "
        + "; ".join(f"{m}: {d * 1e3:g} ms a decode step, {p:,.0f} prompt tokens/s" for m, (d, p) in MACHINES.items())
        + ".",
        "",
        "| cache | policy | µs per step | more than without | " + " | ".join(f"of {m}" for m in MACHINES) + " |",
        "|---|---|---:|---:|" + "---:|" * len(MACHINES),
    ]
    for row in rows:
        shares = " | ".join(f"{row[f'extra, {machine}']:.2%}" for machine in MACHINES)
        lines.append(
            f"| {row['prefix_cache']} | {row['policy']} | {row['us_per_step']:.0f} | {row['extra_us_per_step']:.0f} "
            f"| {shares} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "prefix_overhead.md").write_text(text)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
