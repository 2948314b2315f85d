"""Latency of one batch: all prompts are submitted at once, and each engine step is timed.

A step belongs to *prefill* as long as some prompt of the batch is not completely in the cache when it begins, and to
*decode* after that, when each step generates one token of every unfinished sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.engine.outputs import OutputKind
from octavo.errors import ConfigError
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.workloads.report import summarise
from octavo.workloads.workload import BenchRequest

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass(frozen=True, slots=True)
class LatencyRun:
    """The times of one pass over the batch, in seconds.

    Attributes:
        prefill: time until every prompt had its first token.
        decode_steps: time of each step after that.
        first_tokens: time until each prompt's first token.
        total: time until the last token.
    """

    prefill: float
    decode_steps: tuple[float, ...]
    first_tokens: tuple[float, ...]
    total: float


def measure(llm: LLM, requests: Sequence[BenchRequest], runs: int, warm_ups: int = 1) -> list[LatencyRun]:
    """Time `runs` passes after `warm_ups` untimed ones, each with an empty prefix cache.

    Raises:
        ConfigError: with the engine's options, the sequences of the batch cannot all run at the same time.
    """
    limit = llm.config.max_num_seqs
    if len(requests) > limit:
        raise ConfigError(f"a batch of {len(requests)} prompts, but max_num_seqs is {limit}: raise --max-num-seqs")
    kv = llm.core.scheduler.kv
    step = llm.config.max_num_batched_tokens
    needed = sum(kv.spec.peak_blocks(len(r.prompt_token_ids) + r.max_tokens, step) for r in requests)
    if needed > kv.pool.num_blocks - 1:
        raise ConfigError(
            f"the cache is too small for a batch of {len(requests)}: they need {needed} blocks at once, it has "
            f"{kv.pool.num_blocks - 1}; raise --kv-cache-memory"
        )
    timed = []
    for index in range(warm_ups + runs):
        llm.reset_prefix_cache()
        run = _run_once(llm, requests)
        if index >= warm_ups:
            timed.append(run)
    return timed


def summary(runs: Sequence[LatencyRun]) -> Mapping[str, Any]:
    """Summarise the times in milliseconds: prefill and total per run, decode steps and first tokens over all runs."""
    return {
        "prefill_ms": summarise([run.prefill for run in runs], 1e3),
        "decode_step_ms": summarise([step for run in runs for step in run.decode_steps], 1e3),
        "ttft_ms": summarise([first for run in runs for first in run.first_tokens], 1e3),
        "total_ms": summarise([run.total for run in runs], 1e3),
    }


def rates(runs: Sequence[LatencyRun], prompt_tokens: int, batch_size: int, weight_bytes: int) -> Mapping[str, float]:
    """Rates of the median run and step: prompt and output tokens per second, and 10^9 bytes of weights per second.

    A decode step is taken to read every weight once. A mixture of experts reads fewer, and no model reads a whole
    embedding that is not also its head: for those the rate of weights is an upper bound.
    """
    prefill = statistics.median(run.prefill for run in runs)
    steps = [step for run in runs for step in run.decode_steps]
    found = {"prefill_tokens_s": round(prompt_tokens / prefill, 1)}
    if steps:
        step = statistics.median(steps)
        found["decode_tokens_s"] = round(batch_size / step, 1)
        found["weights_gb_s"] = round(weight_bytes / step / 1e9, 3)
    return found


def _run_once(llm: LLM, requests: Sequence[BenchRequest]) -> LatencyRun:
    core = llm.core
    batch = [
        core.inputs.make(
            request.prompt_token_ids,
            SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0.0, detokenize=False),
        )
        for request in requests
    ]
    first_tokens: list[float] = []
    decode_steps: list[float] = []
    prefill = 0.0
    pending = list(batch)
    start = time.perf_counter()
    for request in batch:
        core.add(request, kind=OutputKind.FINAL)
    try:
        while core.has_work:
            began = time.perf_counter()
            core.step()
            ended = time.perf_counter()
            if not pending:
                decode_steps.append(ended - began)
                continue
            waiting = [request for request in pending if not _has_a_token(request)]
            first_tokens += [ended - start] * (len(pending) - len(waiting))
            if not (pending := waiting):
                prefill = ended - start
    finally:
        for request in batch:
            core.abort(request.request_id)
    return LatencyRun(prefill, tuple(decode_steps), tuple(first_tokens), time.perf_counter() - start)


def _has_a_token(request: Request) -> bool:
    return request.sequences[0].num_output_tokens > 0
