"""What speculative decoding gains and costs: repetitive work and natural text, one stream and many, on and off in turn.

    python -m benchmarks.speculation [--minutes 6] [--streams 1,4,16,64] [--model MODEL] [--draft-model MODEL]
    python -m benchmarks.speculation --processor-time        # while other processes compute

Two engines over one model, one of which speculates, run the same requests one after the other, each round in the other
order. Both are deterministic, and the tokens must be the same. A round has each kind of work with each number of
streams; rounds go on until the time is up. A pair's ratio is the time without speculation through the time with it; the
table has the geometric mean of the pairs and its 95 % interval, from a bootstrap. Each run begins with an empty prefix
cache and no outputs to draft from, but two kinds of work begin with an answer that is not timed: to the same request,
and to another like it.

With --processor-time, both engines have one thread, and the clock that they measure their own steps with is the
process's, so that other processes disturb neither the times nor the decisions.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from math import exp, fsum, log
from typing import Any, NamedTuple

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


_MANY = ("edit", "json", "natural")
"""Work that many streams do."""


class Pair(NamedTuple):
    """Seconds of the same work without drafts and with them, and the tokens of the second."""

    off: float
    on: float
    num_tokens: int
    num_drafted: int
    num_accepted: int


def main() -> None:
    """Run the benchmark and print its table, and one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", help="method draft_model; default: suffix")
    parser.add_argument("--streams", default="1,4,16,64", help="numbers of requests that run at once")
    parser.add_argument(
        "--work", help="only this work, such as edit,natural; default: all, a few of it with many streams"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="after which no further round begins")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--processor-time", action="store_true", help="measure processor time, with one thread")
    args = parser.parse_args()
    options: dict[str, Any] = {"model": args.model, "max_model_len": 2048, "num_blocks": 4096, "deterministic": True}
    if args.processor_time:
        options["num_threads"], time.perf_counter = 1, time.process_time
    method = {"method": "suffix"} if args.draft_model is None else {"method": "draft_model", "model": args.draft_model}
    off, on = LLM(**options), LLM(**options, speculative_config=method)
    wanted = None if args.work is None else args.work.split(",")
    cells = [
        (work, streams)
        for streams in map(int, args.streams.split(","))
        for work in wanted or ((*WORK, *_WARMED) if streams == 1 else _MANY)
    ]
    for llm in (off, on):  # touch memory for the first time
        run(llm, "natural", max(streams for _, streams in cells), 0, 16)
    pairs: dict[tuple[str, int], list[Pair]] = defaultdict(list)
    ends, number = time.monotonic() + 60 * args.minutes, 0
    while time.monotonic() < ends or number % 2:  # so that each goes first equally often
        for work, streams in cells:
            pairs[work, streams].append(measure(off, on, work, streams, number, args.max_tokens))
        number += 1
    print(f"{'work':<12} {'streams':>7} {'pairs':>5} {'off, tokens/s':>14} {'on, tokens/s':>13}", end=" ")
    print(" ".join(f"{name:>8}" for name in ("ratio", "from", "to", "accepted")))
    rows = [row_of(work, streams, pairs[work, streams]) for work, streams in cells]
    for row in rows:
        print(
            f"{row['work']:<12} {row['streams']:>7} {row['pairs']:>5} {row['off']:>14.1f} {row['on']:>13.1f}", end=" "
        )
        print(" ".join(f"{row[name]:>8.3f}" for name in ("ratio", "from", "to", "accepted")))
    repetitive = [row["ratio"] for row in rows if row["streams"] == 1 and row["work"] in ("asked again", *WORK)[:-1]]
    if repetitive:
        print(
            f"repetitive work, one stream, cold: geometric mean {exp(fsum(map(log, repetitive)) / len(repetitive)):.3f}"
        )
    saved = on.core.scheduler.speculator
    assert saved is not None
    print(f"octavo:speculation_saved_seconds {saved.counters.saved_seconds:.2f}")
    print(json.dumps({"model": args.model, **method, "processor_time": args.processor_time, "rows": rows}))


def row_of(work: str, streams: int, pairs: list[Pair]) -> dict[str, Any]:
    """Return a row of the table."""
    logs = [log(pair.off / pair.on) for pair in pairs]
    rng = random.Random(0)
    means = sorted(fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(2000))
    return {
        "work": work,
        "streams": streams,
        "pairs": len(pairs),
        "off": sum(pair.num_tokens for pair in pairs) / fsum(pair.off for pair in pairs),
        "on": sum(pair.num_tokens for pair in pairs) / fsum(pair.on for pair in pairs),
        "ratio": exp(fsum(logs) / len(logs)),
        "from": exp(means[50]),
        "to": exp(means[-51]),
        "accepted": sum(pair.num_accepted for pair in pairs) / max(1, sum(pair.num_drafted for pair in pairs)),
    }


def measure(off: LLM, on: LLM, work: str, streams: int, number: int, max_tokens: int) -> Pair:
    """Do some work with both engines in turn; `number` is the round, in every other one of which `on` goes first."""
    assert on.core.scheduler.speculator is not None
    counters = on.core.scheduler.speculator.counters
    drafted, accepted = counters.num_draft_tokens, counters.num_accepted_tokens
    seconds: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name, llm in (("off", off), ("on", on)) if number % 2 else (("on", on), ("off", off)):
        seconds[name], tokens[name] = run(llm, work, streams, number, max_tokens)
    if tokens["off"] != tokens["on"]:
        raise SystemExit(f"{work}, {streams} streams: speculation has changed the tokens")
    return Pair(
        seconds["off"],
        seconds["on"],
        sum(map(len, tokens["off"])),
        counters.num_draft_tokens - drafted,
        counters.num_accepted_tokens - accepted,
    )


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
