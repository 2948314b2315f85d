"""What speculative decoding gains and costs: repetitive work and natural text, on and off in turn.

    python -m benchmarks.speculation [--model MODEL] [--streams 1,4,16] [--rounds 3] [--max-tokens 128]

Two engines over one model, one of which speculates, run the same requests one after the other, each round in the other
order. Both are deterministic, and the tokens must be the same. A pair's ratio is the time without speculation through
the time with it; the table has the median and the least and largest of the pairs, and the ratio of the processor times
of all, which other processes disturb less. Each round begins with an empty prefix cache and no outputs to draft from,
but two kinds of work begin with an answer that is not timed: to the same request, and to another like it.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import geometric_mean, median
from typing import Any

from octavo import LLM, SamplingParams
from octavo.structured_outputs import StructuredOutputsParams

_CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance -= amount
"""
_LETTER = """Dear Ms Okafor, thank you for your order 48213 of 12 May. The oak table (article T-90) left our workshop in
Lyon on 16 May with the carrier Transalpin, and will reach you in Geneva on 19 May between 8 and 11 in the morning. The
two chairs (article C-17) follow on 24 May, because the fabric that you chose was out of stock. Your invoice of 1,284
euros is attached. Please write to orders@menuiserie.example if the date does not suit you. Kind regards, Jean Perrin"""

WORK = {
    "edit": f"Rename `balance` to `funds` in this code, and print the whole code again.\n\n{_CODE}",
    "form": f"Fill this form from the letter.\n\nName:\nOrder:\nDate of order:\nArticle 1:\nArticle 2:\n\n{_LETTER}",
    "extract": f"Copy each sentence of this letter that has a date, word for word.\n\n{_LETTER}",
    "json": f"Fill a form from the letter, as JSON: customer, order, date, articles and their deliveries.\n\n{_LETTER}",
    "natural": "Tell a story about a lighthouse keeper who finds a letter in a bottle.",
}

_ARTICLE = {"name": {"type": "string"}, "number": {"type": "string"}, "delivery_date": {"type": "string"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string"},
        "order_number": {"type": "string"},
        "date_of_order": {"type": "string"},
        "ordered_articles": {
            "type": "array",
            "minItems": 2,
            "items": {"type": "object", "properties": _ARTICLE, "required": [*_ARTICLE], "additionalProperties": False},
        },
    },
    "required": ["customer_name", "order_number", "date_of_order", "ordered_articles"],
    "additionalProperties": False,
}
_WARMED = {"asked again": "natural", "another JSON": "json"}
"""Work that an answer comes before, and the work that was asked for."""


def main() -> None:
    """Run the benchmark and print its table, and one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="suffix", choices=("ngram", "suffix"))
    parser.add_argument("--streams", default="1,4,16", help="numbers of requests that run at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    options: dict[str, Any] = {"model": args.model, "max_model_len": 2048, "num_blocks": 4096, "deterministic": True}
    off, on = LLM(**options), LLM(**options, speculative_config={"method": args.method})
    rows = []
    print(
        f"{'work':<12} {'streams':>7} {'off, tokens/s':>14} {'on, tokens/s':>13} "
        + " ".join(f"{name:>9}" for name in ("ratio", "least", "largest", "processor", "accepted"))
    )
    for streams in map(int, args.streams.split(",")):
        for work in (*WORK, *_WARMED):
            row = measure(off, on, work, streams, args.rounds, args.max_tokens)
            rows.append(row)
            ratios = " ".join(f"{row[name]:>9.3f}" for name in ("ratio", "least", "largest", "processor", "accepted"))
            print(f"{work:<12} {streams:>7} {row['off']:>14.1f} {row['on']:>13.1f} {ratios}", flush=True)
        apart = ("natural", "another JSON")
        of_work = [row["ratio"] for row in rows if row["streams"] == streams and row["work"] not in apart]
        print(f"{'repetitive work':<20} geometric mean {geometric_mean(of_work):.3f}")
    print(json.dumps({"model": args.model, "method": args.method, "rows": rows}))


def measure(off: LLM, on: LLM, work: str, streams: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Run one kind of work on both engines in turn; returns a row of the table."""
    off_seconds: list[float] = []
    on_seconds: list[float] = []
    processor = {"off": 0.0, "on": 0.0}
    num_tokens = 0
    assert on.core.scheduler.speculator is not None
    counters = on.core.scheduler.speculator.counters
    drafted, accepted = counters.num_draft_tokens, counters.num_accepted_tokens
    for number in range(rounds):
        tokens: dict[str, list[list[int]]] = {}
        for name, llm in (("off", off), ("on", on)) if number % 2 else (("on", on), ("off", off)):
            began = time.process_time()
            seconds, tokens[name] = run(llm, work, streams, number, max_tokens)
            processor[name] += time.process_time() - began
            (off_seconds if name == "off" else on_seconds).append(seconds)
        if tokens["off"] != tokens["on"]:
            raise SystemExit(f"{work}: speculation has changed the tokens")
        num_tokens = sum(map(len, tokens["off"]))
    ratios = [without / using for without, using in zip(off_seconds, on_seconds, strict=True)]
    return {
        "work": work,
        "streams": streams,
        "off": num_tokens / median(off_seconds),
        "on": num_tokens / median(on_seconds),
        "ratio": median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "processor": processor["off"] / processor["on"],
        "accepted": (counters.num_accepted_tokens - accepted) / max(1, counters.num_draft_tokens - drafted),
    }


def run(llm: LLM, work: str, streams: int, seed: int, max_tokens: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of `streams` requests at once, and their tokens."""
    llm.core.reset_prefix_cache()
    warmed = _WARMED.get(work, work)
    first, again = (
        [[{"role": "user", "content": f"Request {i}. {WORK[warmed]}"}] for i in range(start, start + streams)]
        for start in (0, streams)
    )
    params = [
        SamplingParams(
            temperature=0.7 if work == "natural" else 0.0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            structured_outputs=StructuredOutputsParams(json=SCHEMA) if "json" in work.lower() else None,
        )
        for _ in range(streams)
    ]
    if work in _WARMED:
        llm.chat(first, params, use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.chat(again if work == "another JSON" else first, params, use_tqdm=False)
    return time.perf_counter() - began, [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
