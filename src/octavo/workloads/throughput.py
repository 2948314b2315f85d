"""Offline throughput: all requests are queued at once, and the whole run is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.sampling_params import SamplingParams
from octavo.workloads.workload import BenchRequest

if TYPE_CHECKING:
    from octavo.llm import LLM

WARM_UP_REQUESTS = 2


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """One timed pass over a workload."""

    requests: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    def rates(self) -> dict[str, float]:
        """Return tokens and requests per second; prompt tokens from the prefix cache are included."""
        return {
            "prompt_tok_s": self.prompt_tokens / self.seconds,
            "output_tok_s": self.output_tokens / self.seconds,
            "total_tok_s": (self.prompt_tokens + self.output_tokens) / self.seconds,
            "requests_s": self.requests / self.seconds,
        }


def measure(llm: LLM, requests: Sequence[BenchRequest], runs: int, *, use_tqdm: bool = False) -> list[ThroughputRun]:
    """Time `runs` passes, after an untimed warm-up with the first two requests.

    Each pass begins with an empty prefix cache; otherwise the second would find all prompts of the first. Only what the
    workload itself shares is found in the cache.
    """
    run_once(llm, requests[:WARM_UP_REQUESTS])
    timed = []
    for _ in range(runs):
        llm.reset_prefix_cache()
        timed.append(run_once(llm, requests, use_tqdm=use_tqdm))
    return timed


def run_once(llm: LLM, requests: Sequence[BenchRequest], *, use_tqdm: bool = False) -> ThroughputRun:
    """Generate all requests greedily, ignoring end-of-sequence, so that every engine does the same work."""
    prompts: list[Any] = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    params = [
        SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        for request in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - start
    return ThroughputRun(
        requests=len(requests),
        seconds=seconds,
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        output_tokens=sum(len(one.token_ids) for output in outputs for one in output.outputs),
    )


def summary(runs: Sequence[ThroughputRun]) -> Mapping[str, Any]:
    """Return the median of each figure over the runs, and the duration of every run."""
    rates = [run.rates() for run in runs]
    result: dict[str, Any] = {
        "runs": len(runs),
        "requests": runs[0].requests,
        "prompt_tokens": runs[0].prompt_tokens,
        "cached_tokens": round(statistics.median(run.cached_tokens for run in runs)),
        "output_tokens": runs[0].output_tokens,
        "seconds": round(statistics.median(run.seconds for run in runs), 4),
    }
    result |= {name: round(statistics.median(rate[name] for rate in rates), 2) for name in rates[0]}
    return result | {"seconds_of_runs": [round(run.seconds, 4) for run in runs]}
