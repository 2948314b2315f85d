"""What drawing a step's tokens costs: by the C++ library, and by torch's operations, in turns.

    python benchmarks/sampling.py [--streams 64 256] [--tokens 16]

Every stream decodes under the same parameters. Beside the step there is a thread that sleeps for a millisecond over and
over: how late it wakes is what the event loop of a server would wait for the interpreter's lock, or for a processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

from octavo import LLM, SamplingParams, kernels
from octavo.sampling.choice import TorchChoice
from octavo.sampling.native_choice import NativeChoice
from octavo.sampling.sampler import Sampler
from timed_sampler import SamplerTime

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "logprobs 5": {"logprobs": 5},
}


class Waker(threading.Thread):
    """Sleeps for a millisecond over and over."""

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
    """Steps in which all streams draw a token and nothing else is computed."""
    core, sampler_time = llm.core, SamplerTime(sampler)
    sampling, steps = [], []
    core.runner._sampler = sampler
    for i in range(streams):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **way)
        core.add(core.make_request([100 + i, *range(200, 232)], params))
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


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only this; may be given several times")
    args = parser.parse_args()
    choices = {"library": NativeChoice(), "torch": TorchChoice(kernels.argmax)}
    with LLM(args.model, max_model_len=1024, max_num_seqs=max(args.streams), kv_cache_memory="2GiB") as llm:
        for streams in args.streams:
            # Of many streams one way is enough: what differs is a row's cost.
            for way in args.way or (WAYS if streams == args.streams[0] else ["temperature 1"]):
                for name, choice in choices.items():
                    found = measure(llm, Sampler(choice), streams, args.tokens, WAYS[way])
                    print(json.dumps({"streams": streams, "way": way, "by": name, **found}), flush=True)


if __name__ == "__main__":
    main()
