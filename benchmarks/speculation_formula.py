"""What verified drafts gain at a given acceptance, next to what a formula says.

    python -m benchmarks.speculation_formula [--model MODEL] [--acceptance 0.5,0.7,0.9,1] [--lengths 1,3,7]

    .venv/bin/python benchmarks/peers/random_llama.py --types Q4_0           # 8 layers in the shape of Llama 3 8B
    python -m benchmarks.speculation_formula --model ~/.cache/peers/llama8b-8-Q4_0.gguf

One request is answered without drafts; then again, verifying drafts of k tokens in each step, of which each token is
made right with probability a. With T(n) the median time of a step of n rows as measured in these runs, the formula is

    (1 - a^(k + 1)) / (1 - a) · T(1) / T(k + 1)

as in Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8, with the cost of
verification, and without that of drafting.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from statistics import median
from typing import Any

from octavo import LLM, SamplingParams
from octavo.request import Sequence
from octavo.scheduler.drafts import DraftMethod
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.speculation import Drafts, Speculator

_PROMPT = list(range(100, 164))


class Forced(Speculator):
    """Verifies a draft in every step, whatever it costs.

    Attributes:
        expected: the output.
        acceptance: probability with which each drafted token is right.
        length: tokens of a draft; 0 for none.
        by_rows: seconds of each step of decodes, by its rows.
    """

    def __init__(self, most: int, max_model_len: int) -> None:
        super().__init__(DraftMethod(2, 8), most, max_model_len)
        self.expected: Seq[int] = ()
        self.acceptance, self.length = 1.0, 0
        self.by_rows: dict[int, list[float]] = defaultdict(list)
        self._random = random.Random(0)

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        (seq,) = streams
        right = self.expected[seq.num_output_tokens :][: min(self.length, self._num_left(seq))]
        draft = [token_id if self._random.random() < self.acceptance else (token_id + 1) % 1000 for token_id in right]
        return {seq.seq_id: (seq, tuple(draft))} if draft else {}

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self.by_rows[plan.num_tokens].append(seconds)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--acceptance", default="0.5,0.7,0.9,1")
    parser.add_argument("--lengths", default="1,3,7")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true", help="measure processor time, with one thread")
    args = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "deterministic": True}
    if args.processor_time:
        options["num_threads"], time.perf_counter = 1, time.process_time
    llm = LLM(args.model, **options, num_blocks=128, speculative_config={"method": "ngram"})
    scheduler = llm.core.scheduler
    forced = scheduler.speculator = Forced(16, scheduler.config.max_model_len)
    scheduler._composer._speculator = forced
    forced.expected = run(llm, args.max_tokens)[1]
    without = [run(llm, args.max_tokens)[0] for _ in range(args.rounds)]
    print(f"{'a':>5} {'k':>3} {'gain':>7} {'formula':>8} {'T(k + 1) / T(1)':>16}")
    for forced.length in map(int, args.lengths.split(",")):
        for forced.acceptance in map(float, args.acceptance.split(",")):
            seconds = []
            for _ in range(args.rounds):
                took, tokens = run(llm, args.max_tokens)
                if tokens != forced.expected:
                    raise SystemExit("drafts have changed the tokens")
                seconds.append(took)
            a, k = forced.acceptance, forced.length
            tokens_a_step = k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
            cost = median(forced.by_rows[k + 1]) / median(forced.by_rows[1])
            gain = median(without) / median(seconds)
            print(f"{a:>5.2f} {k:>3} {gain:>7.2f} {tokens_a_step / cost:>8.2f} {cost:>16.2f}", flush=True)


def run(llm: LLM, max_tokens: int) -> tuple[float, list[int]]:
    """Return the seconds of the request after its prompt, and its tokens."""
    llm.core.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm.core.add(llm.core.inputs.make(_PROMPT, params))
    llm.core.step()  # the prompt
    began, outputs = time.perf_counter(), []
    while llm.core.has_work:
        outputs += llm.core.step()
    return time.perf_counter() - began, list(outputs[-1].outputs[0].token_ids)


if __name__ == "__main__":
    main()
