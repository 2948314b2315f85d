"""What speculative decoding gains and costs: repetitive work and natural text, one stream and many, on and off in turn.

    python -m benchmarks.speculation [--minutes 6] [--streams 1,4,16,64] [--model MODEL] [--draft-model MODEL]
    python -m benchmarks.speculation --processor-time        # while other processes compute

Two engines over one model, one of which speculates, run the same requests one after the other, each round in the other
order. Both are deterministic, and the tokens must be the same; with --no-deterministic they may differ within rounding,
and the times of a pair are for as many tokens. A round has each kind of work with each number of streams; two rounds
have the same prompts. Rounds go on until the time is up. A pair's ratio is the time without speculation divided by the
time with it; the table has the geometric mean of the pairs and its 95 % interval, from a bootstrap. Each run begins
with an empty prefix cache and no outputs to draft from, but two kinds of work begin with an answer that is not timed:
to the same request, and to another like it.

Below the table are the seconds saved in each minute of the engine that speculates, by its own estimate
(`octavo:speculation_saved_seconds`), and the minimum of these.

With --processor-time, both engines have one thread, and the clock that they measure their own steps with is the
process's, so that other processes disturb neither the times nor the decisions.

    .venv/bin/python benchmarks/peers/random_llama.py --types Q4_0           # 8 layers in the shape of Llama 3 8B
    python -m benchmarks.speculation --acceptance 0.5,0.7,0.9,1 --model ~/.cache/peers/llama8b-8-Q4_0.gguf

With --acceptance, one request is answered without drafts; then again, verifying drafts of k tokens in each step
(--lengths), of which each token is made right with probability a. With T(n) the median time of a step of n rows as
measured in these runs, the formula is

    (1 - a^(k + 1)) / (1 - a) · T(1) / T(k + 1)

as in Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8, with the cost of
verification, and without that of drafting.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import exp, fsum, log
from statistics import median
from typing import Any, NamedTuple

from octavo import LLM, SamplingParams
from octavo.request import Sequence
from octavo.scheduler.drafts import DraftMethod
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.speculation import Drafts, Speculator
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

_PARSER = """def parse_line(line, separator=","):
    fields = []
    current = ""
    quoted = False
    for char in line:
        if char == '"':
            quoted = not quoted
        elif char == separator and not quoted:
            fields.append(current)
            current = ""
        else:
            current += char
    fields.append(current)
    return fields
"""
_MINUTES = """Meeting of 3 March 2024. Present: Anna Lindqvist (chair), Tom Becker, Rosa Diaz. The depot's budget is
418,000 euros, of which 120,000 are for the roof. Tom Becker orders the steel by 15 March. Rosa Diaz asks the town for a
permit; the form B-12 is due on 2 April. The next meeting is on 10 April at 14:00 in room 204. The caterer was paid 612
euros on 28 February."""

WORK = {
    "edit": (
        f"Rename `balance` to `funds` in this code, and print the whole code again.\n\n{_CODE}",
        f"Rename `fields` to `cells` in this code, and print the whole code again.\n\n{_PARSER}",
    ),
    "form": (
        f"Fill this form from the letter.\n\nName:\nOrder:\nDate of order:\nArticle 1:\nArticle 2:\n\n{_LETTER}",
        f"Fill this form from the minutes.\n\nChair:\nDate:\nBudget:\nNext meeting:\nRoom:\n\n{_MINUTES}",
    ),
    "extract": (
        f"Copy each sentence of this letter that has a date, word for word.\n\n{_LETTER}",
        f"Copy each sentence of these minutes that has a date, word for word.\n\n{_MINUTES}",
    ),
    "json": (
        f"Fill a form from the letter, as JSON: customer, order, date, articles and their deliveries.\n\n{_LETTER}",
        f"Fill a form from the minutes, as JSON: customer, order, date, articles and their deliveries.\n\n{_MINUTES}",
    ),
    "natural": (
        "Tell a story about a lighthouse keeper who finds a letter in a bottle.",
        "Explain to a child why the sky is blue.",
    ),
}
"""The prompts of each kind of work, which rounds take in turn."""

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
    """Seconds of the same tokens without drafts and with them, and how many they are."""

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
    parser.add_argument(
        "--no-deterministic", action="store_true", help="both engines as by default; their answers may differ"
    )
    parser.add_argument("--acceptance", help="compare with a formula at these acceptances, such as 0.5,0.7,0.9,1")
    parser.add_argument("--lengths", default="1,3,7", help="with --acceptance: tokens in a draft")
    args = parser.parse_args()
    options: dict[str, Any] = {"model": args.model, "max_model_len": 2048, "num_blocks": 4096}
    options["deterministic"] = not args.no_deterministic
    if args.processor_time:
        options["num_threads"], time.perf_counter = 1, time.process_time
    if args.acceptance is not None:
        acceptances = [float(each) for each in args.acceptance.split(",")]
        compare_with_formula(options, acceptances, map(int, args.lengths.split(",")), args.max_tokens)
        return
    method = {"method": "suffix"} if args.draft_model is None else {"method": "draft_model", "model": args.draft_model}
    off, on = LLM(**options), LLM(**options, speculative_config=method)
    wanted = None if args.work is None else args.work.split(",")
    cells = [
        (work, streams)
        for streams in map(int, args.streams.split(","))
        for work in wanted or ((*WORK, *_WARMED) if streams == 1 else _MANY)
    ]
    for llm in (off, on):  # touch memory for the first time, and do what a server does when it is first idle
        run(llm, "natural", max(streams for _, streams in cells), 0, 16)
        if llm.core.inputs.grammars is not None:
            llm.core.inputs.grammars.prepare()
    pairs: dict[tuple[str, int], list[Pair]] = defaultdict(list)
    saved = Saved(on)
    ends, number = time.monotonic() + 60 * args.minutes, 0
    while time.monotonic() < ends or number % 2:  # so that each goes first equally often
        for work, streams in cells:
            pairs[work, streams].append(pair := measure(off, on, work, streams, number, args.max_tokens))
            saved.add(pair.on)
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
    print(
        "octavo:speculation_saved_seconds in each minute with speculation:", *(f"{each:.2f}" for each in saved.minutes)
    )
    print(f"minimum: {min(saved.minutes):.2f}, which is {min(saved.minutes) / 60:.2%} of the minute")
    print(
        json.dumps(
            {"model": args.model, **method, "processor_time": args.processor_time, "rows": rows, "saved": saved.minutes}
        )
    )


class Saved:
    """What speculation has saved in each minute of an engine's time.

    Attributes:
        minutes: seconds saved in each; if the runs took less than a minute, scaled to one.
    """

    def __init__(self, llm: LLM) -> None:
        assert llm.core.scheduler.speculator is not None
        self._counters = llm.core.scheduler.speculator.counters
        self._seconds, self._before = 0.0, self._counters.saved_seconds
        self._whole: list[float] = []

    def add(self, seconds: float) -> None:
        """Count the time of a run."""
        self._seconds += seconds
        if self._seconds >= 60:
            self._whole.append(self._scaled)
            self._seconds, self._before = 0.0, self._counters.saved_seconds

    @property
    def minutes(self) -> list[float]:
        return self._whole if self._whole else [self._scaled]

    @property
    def _scaled(self) -> float:
        return (self._counters.saved_seconds - self._before) * 60 / self._seconds


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
    if on.core.config.deterministic and tokens["off"] != tokens["on"]:
        raise SystemExit(f"{work}, {streams} streams: speculation has changed the tokens")
    num_tokens = sum(map(len, tokens["on"]))
    return Pair(
        seconds["off"] * num_tokens / sum(map(len, tokens["off"])),
        seconds["on"],
        num_tokens,
        counters.num_draft_tokens - drafted,
        counters.num_accepted_tokens - accepted,
    )


def run(llm: LLM, work: str, streams: int, seed: int, max_tokens: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of `streams` requests at once, and their tokens."""
    llm.core.reset_prefix_cache()
    prompts = WORK[_WARMED.get(work, work)]
    prompt = prompts[seed // 2 % len(prompts)]
    first, again = (
        [[{"role": "user", "content": f"Request {i}. {prompt}"}] for i in range(start, start + streams)]
        for start in (0, streams)
    )
    params = [
        SamplingParams(
            temperature=0.7 if work == "natural" else 0.0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=work == "natural",  # what follows the end of an edit is none
            structured_outputs=StructuredOutputsParams(json=SCHEMA) if "json" in work.lower() else None,
        )
        for _ in range(streams)
    ]
    if work in _WARMED:
        llm.chat(first, params, use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.chat(again if work == "another JSON" else first, params, use_tqdm=False)
    return time.perf_counter() - began, [output.outputs[0].token_ids for output in outputs]


class Forced(Speculator):
    """Verifies a draft in every step, whatever it costs.

    Attributes:
        expected: the output.
        chance: probability with which each drafted token is right.
        length: tokens of a draft; 0 for none.
        by_rows: seconds of each step of decodes, by its rows.
    """

    def __init__(self, most: int, max_model_len: int) -> None:
        super().__init__(DraftMethod(2, 8), most, max_model_len)
        self.expected: Seq[int] = ()
        self.chance, self.length = 1.0, 0
        self.by_rows: dict[int, list[float]] = defaultdict(list)
        self._random = random.Random(0)

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        (seq,) = streams
        right = self.expected[seq.num_output_tokens :][: min(self.length, self._num_left(seq))]
        draft = [token_id if self._random.random() < self.chance else (token_id + 1) % 1000 for token_id in right]
        return {seq.seq_id: (seq, tuple(draft))} if draft else {}

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self.by_rows[plan.num_tokens].append(seconds)


def compare_with_formula(
    options: dict[str, Any], acceptances: Seq[float], lengths: Iterable[int], max_tokens: int, rounds: int = 3
) -> None:
    """Print what drafts of given lengths and acceptances gain, and what the formula says."""
    llm = LLM(**options, speculative_config={"method": "ngram"})
    scheduler = llm.core.scheduler
    forced = scheduler.speculator = Forced(16, scheduler.config.max_model_len)
    scheduler._composer._speculator = forced
    forced.expected = decode(llm, max_tokens)[1]
    without = [decode(llm, max_tokens)[0] for _ in range(rounds)]
    print(f"{'a':>5} {'k':>3} {'gain':>7} {'formula':>8} {'T(k + 1) / T(1)':>16}")
    for forced.length in lengths:
        for forced.chance in acceptances:
            runs = [decode(llm, max_tokens) for _ in range(rounds)]
            if any(tokens != forced.expected for _, tokens in runs):
                raise SystemExit("drafts have changed the tokens")
            a, k = forced.chance, forced.length
            tokens_a_step = k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
            cost = median(forced.by_rows[k + 1]) / median(forced.by_rows[1])
            gain = median(without) / median(seconds for seconds, _ in runs)
            print(f"{a:>5.2f} {k:>3} {gain:>7.2f} {tokens_a_step / cost:>8.2f} {cost:>16.2f}", flush=True)


def decode(llm: LLM, max_tokens: int) -> tuple[float, list[int]]:
    """Return the seconds of one request after its prompt, and its tokens."""
    llm.core.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm.core.add(llm.core.inputs.make(list(range(100, 164)), params))
    llm.core.step()  # the prompt
    began, outputs = time.perf_counter(), []
    while llm.core.has_work:
        outputs += llm.core.step()
    return time.perf_counter() - began, list(outputs[-1].outputs[0].token_ids)


if __name__ == "__main__":
    main()
