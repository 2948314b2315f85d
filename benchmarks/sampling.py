"""Measure what drawing a step's tokens costs with the C++ library and with torch's operations, alternating.

    python -m benchmarks.sampling [--streams 64 256] [--tokens 16]
    python -m benchmarks.sampling --rows 64      without a model: changes of a row of logits, and beams, on one thread

Every stream decodes with the same parameters. Beside the steps, a thread sleeps for a millisecond over and over: how
late it wakes is how long a server's event loop would wait for the interpreter's lock, or for a processor.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch

from benchmarks.timed_sampler import SamplerTime
from octavo import LLM, SamplingParams, kernels
from octavo.request import RequestId
from octavo.sampling.batch import SamplingBatch, SamplingState
from octavo.sampling.choice import Choice, NativeChoice
from octavo.sampling.penalties import adjust
from octavo.sampling.sampler import Sampler
from octavo.scheduler.plan import SamplingSnapshot

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "logprobs 5": {"logprobs": 5},
}


VOCAB = 49_152
BEAMS: dict[str, Any] = {"n": 4, "use_beam_search": True, "temperature": 0.0}
# What changes logits before a draw, or replaces the draw.
CHANGES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty and frequency_penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit_bias of 300 tokens": {"logit_bias": dict.fromkeys(range(100, 400), 1.0)},
    "logit_bias of 1,024 tokens": {"logit_bias": dict.fromkeys(range(100, 1124), 1.0)},
    "128 bad_words": {"bad_words": ["of 1 to 3 tokens"]},
    "allowed_token_ids of 100, and the draw": {"allowed_token_ids": list(range(100, 200))},
    "allowed_token_ids of 4,096, and the draw": {"allowed_token_ids": list(range(100, 4196))},
    "beams of width 4": BEAMS,
    "beams of width 4, logprobs 5": {**BEAMS, "logprobs": 5},
    "beams of width 4, repetition_penalty": {**BEAMS, "repetition_penalty": 1.2},
    "beams of width 4, repetition_penalty, logprobs 5": {**BEAMS, "repetition_penalty": 1.2, "logprobs": 5},
}


class Waker(threading.Thread):
    """Sleeps for a millisecond over and over, and records how late it wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[float] = []
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            began = time.perf_counter()
            time.sleep(0.001)
            self.late.append(time.perf_counter() - began - 0.001)


def measure(llm: LLM, sampler: Sampler, streams: int, tokens: int, way: dict[str, Any]) -> dict[str, float]:
    """Measure steps in which all streams draw a token and nothing else is computed."""
    core, sampler_time = llm.core, SamplerTime(sampler)
    sampling, steps = [], []
    core.runner._sampler = sampler
    for i in range(streams):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **way)
        core.add(core.inputs.make([100 + i, *range(200, 232)], params))
    while core.scheduler.num_waiting or core.scheduler.num_running < streams:
        core.step()
    core.step()
    sampler_time.take()
    waker = Waker()
    waker.start()
    while core.scheduler.num_running == streams:
        began = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - began)
        sampling.append(sampler_time.take())
    waker.ends = True
    waker.join()
    while core.has_work:
        core.step()
    late = sorted(waker.late)
    return {
        "step_ms": _ms(statistics.median(steps)),
        "sampling_ms": _ms(statistics.median(sampling)),
        "late_p90_ms": _ms(late[int(len(late) * 0.9)]),
        "late_p99_ms": _ms(late[int(len(late) * 0.99)]),
        "late_most_ms": _ms(late[-1]),
    }


def measure_rows(rows: int) -> None:
    """Print the milliseconds for `rows` rows after prompts and outputs of 100 tokens, with logits not in a cache."""
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    rng = random.Random(0)
    words = tuple(tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 3]))) for _ in range(128))
    buffers = [torch.randn(rows, VOCAB) for _ in range(6)]
    sampler = Sampler(NativeChoice())
    for name, way in CHANGES.items():
        states = []
        for i in range(rows):
            snapshot = SamplingSnapshot(
                RequestId(f"r{i}"),
                SamplingParams(max_tokens=1000, seed=i, **way),
                seed=i,
                num_prompt_tokens=100,
                eos_token_ids=frozenset({2}),
                num_candidates=8 if "n" in way else 0,
                bad_word_ids=words if "bad_words" in way else (),
            )
            states.append(SamplingState.of(snapshot, np.array([rng.randrange(3, VOCAB) for _ in range(200)])))
        batch = SamplingBatch.of(states, [100] * rows)
        is_drawn = "n" in way or "allowed_token_ids" in way
        seconds = []
        for round_ in range(3):
            for logits in buffers:
                logits.normal_()
            for logits in buffers:
                began = time.perf_counter()
                if is_drawn:
                    sampler.sample(logits, batch, overwrite_logits=True)
                else:
                    adjust(logits, batch)
                seconds.append(time.perf_counter() - began)
            seconds = seconds if round_ else []  # the first round warms up
        middle = statistics.median(seconds)
        print(json.dumps({"change": name, "ms": _ms(middle), "us_a_row": round(middle / rows * 1e6, 1)}), flush=True)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only this; may be given several times")
    parser.add_argument("--rows", type=int, help="measure so many rows of logits without a model, and nothing else")
    args = parser.parse_args()
    if args.rows is not None:
        measure_rows(args.rows)
        return
    choices: dict[str, Choice] = {"library": NativeChoice(), "torch": Choice()}
    with LLM(args.model, max_model_len=1024, max_num_seqs=max(args.streams), kv_cache_memory="2GiB") as llm:
        for streams in args.streams:
            # One way is enough for more streams: the ways differ in the cost of a row.
            for way in args.way or (WAYS if streams == args.streams[0] else ["temperature 1"]):
                for name, choice in choices.items():
                    found = measure(llm, Sampler(choice), streams, args.tokens, WAYS[way])
                    print(json.dumps({"streams": streams, "way": way, "by": name, **found}), flush=True)


if __name__ == "__main__":
    main()
