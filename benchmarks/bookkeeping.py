"""The cost of scheduler and KV cache per running sequence and step: `python benchmarks/bookkeeping.py`. No model.

A runner that always draws token 7 replaces the model. Only `schedule` and `update` are timed, in decode steps of
`--num-seqs` sequences; blocks are allocated as they fill, hashed and published as in serving. Prints one JSON object on
the last line of standard output; `--profile` shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import time

from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 4096


def make_scheduler(arguments: argparse.Namespace) -> Scheduler:
    layers = [LayerKVSpec(8, 128, 128, sliding_window=arguments.window if i % 2 else None) for i in range(32)]
    spec = KVCacheSpec.build(layers, arguments.block_size, "bfloat16")
    blocks_per_seq = len(spec.groups) * spec.blocks_for_tokens(arguments.prompt_tokens + arguments.steps + 1)
    num_blocks = arguments.num_seqs * blocks_per_seq * 2
    config = EngineConfig(
        max_num_seqs=arguments.num_seqs,
        max_num_batched_tokens=arguments.num_seqs * MAX_MODEL_LEN,
        enable_prefix_caching=arguments.prefix_caching,
    )
    return assemble_scheduler(config, assemble_cache(config, spec, num_blocks), MAX_MODEL_LEN)


def play_runner(plan: StepPlan) -> StepResult:
    return StepResult((7,) * plan.num_draws)


def measure(arguments: argparse.Namespace, profile: cProfile.Profile | None) -> list[float]:
    """Seconds of `schedule` + `update` of each decode step."""
    scheduler = make_scheduler(arguments)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=arguments.steps + 1, ignore_eos=True)
    for i in range(arguments.num_seqs):
        # Lengths differ; otherwise all sequences would fill their blocks in the same step.
        prompt = [rng.randrange(50_000) for _ in range(arguments.prompt_tokens - rng.randrange(16))]
        scheduler.add(Request(RequestId(f"r{i}"), prompt, params))
    prompts = scheduler.schedule()
    scheduler.update(prompts, play_runner(prompts))
    seconds = []
    while scheduler.has_work:
        if profile is not None:
            profile.enable()
        started = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        result = play_runner(plan)
        resumed = time.perf_counter()
        scheduler.update(plan, result)
        seconds.append(planned - started + time.perf_counter() - resumed)
        if profile is not None:
            profile.disable()
        assert plan.num_rows == arguments.num_seqs
    scheduler.kv.audit()
    return seconds[:-1]  # in the last step all sequences end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--window", type=int, default=None, help="every other layer slides by this many tokens")
    parser.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    profile = cProfile.Profile() if arguments.profile else None
    gc.freeze()
    microseconds = sorted(s * 1e6 / arguments.num_seqs for s in measure(arguments, profile))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    print(
        json.dumps(
            {
                **{key: value for key, value in vars(arguments).items() if key != "profile"},
                "us_per_seq_step_median": round(statistics.median(microseconds), 3),
                "us_per_seq_step_mean": round(statistics.fmean(microseconds), 3),
                "us_per_seq_step_p99": round(microseconds[int(len(microseconds) * 0.99)], 3),
                "us_per_seq_step_min": round(microseconds[0], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
