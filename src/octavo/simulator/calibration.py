"""Measure how long the steps of a real server take: rounds of requests that fill every corner of the model's terms.

    streams    1, 2, 4, … requests of short prompts at once: steps of so many rows
    prompts    one alone, 8 to as long as a step may be: chunks, and what a request costs beside its steps
    contexts   a few streams of long prompts: keys and values to read
    mixed      arrivals at random: chunks beside streams

The server records its plans meanwhile, and what a client sees of a lone request's first token beyond its steps is the
intake. Rounds are repeated, with other lengths, until the time is up.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.bench import report, serving
from octavo.bench.server_process import fetch_json, running_server
from octavo.bench.serving import RequestRecord, Target
from octavo.bench.workload import END_TOKEN_ID, BenchRequest, arrival_times, random_token_ids
from octavo.errors import ConfigError
from octavo.scheduler.step_time import StepLoad
from octavo.simulator.speed import Speed, speed_of_plans

# Steps between the first and the last of a round's streams are what is wanted of it.
_STREAMED = 24


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are sent together, or at `rate` a second."""

    kind: str
    prompt_lens: tuple[int, ...]
    output_len: int
    rate: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt_lens) + len(self.prompt_lens) * self.output_len


def rounds(max_num_seqs: int, max_model_len: int, max_step: int, seed: int = 0) -> Iterator[Round]:
    """Without end: one sweep over all kinds after the other, each with other lengths."""
    rng = random.Random(seed)
    longest = max(1, min(max_step, max_model_len - 2))

    def jittered(length: float) -> int:
        return max(1, min(round(length * rng.uniform(0.75, 1.25)), max_model_len - _STREAMED - 1, longest))

    for sweep in itertools.count():
        found = []
        for exponent in range(20):
            if (streams := 1 << exponent) > max_num_seqs:
                break
            # Between the powers of two in later sweeps.
            count = min(max_num_seqs, max(1, round(streams * (1 if sweep == 0 else rng.uniform(0.75, 1.4)))))
            found.append(Round("streams", tuple(jittered(24) for _ in range(count)), _STREAMED))
        length = 8
        while length <= longest:
            found.append(Round("prompt", (length if sweep == 0 else jittered(length),), 2))
            length *= 2
        for count, context in ((2, 3000), (6, 1200), (16, 500), (48, 250)):
            if count <= max_num_seqs:
                found.append(Round("contexts", tuple(jittered(context) for _ in range(count)), _STREAMED))
        lengths = tuple(jittered(rng.lognormvariate(5.0, 0.9)) for _ in range(24))
        found.append(Round("mixed", lengths, 2 * _STREAMED, rate=rng.choice((4.0, 8.0, 16.0))))
        if sweep:
            rng.shuffle(found)
        yield from found


def calibrate(argv: Sequence[str], seconds: float, vocab_size: int, plans: str | None = None) -> Speed:
    """Start `octavo serve ARGV`, send it rounds for so many seconds, and fit to what it recorded.

    Args:
        plans: keep the recording there.

    Raises:
        ConfigError: a request failed, or the time was too short for a fit.
    """
    if not seconds > 0:
        raise ConfigError(f"--seconds must be above 0, got {seconds:g}")
    with tempfile.TemporaryDirectory() as folder:
        path = plans or str(Path(folder) / "plans")
        with running_server([*argv, f"--record-plans={path}"]) as server:
            model = fetch_json(server.base_url + "/v1/models")["data"][0]
            target = Target(server.base_url, str(model["id"]))
            recorded = _recorded_options(path)
            alone = _send_rounds(target, recorded, seconds, min(vocab_size, END_TOKEN_ID))
        machine = report.machine()
        speed = speed_of_plans(
            [path], origin=f"measured: {recorded['model']} on {machine['cores']} cores of {machine['cpu']}"
        )
    return replace(speed, intake_s=_intake(speed, alone), facts={**speed.facts, "machine": machine})


def _recorded_options(path: str) -> Mapping[str, Any]:
    from octavo.scheduler.plan_log import read_facts

    return read_facts(path)


def _send_rounds(
    target: Target, options: Mapping[str, Any], seconds: float, token_end: int
) -> list[tuple[Round, RequestRecord]]:
    """Send rounds until the time is up; the lone prompts and their records come back."""
    rng, alone = random.Random(1), []
    ends_at = time.monotonic() + seconds
    slowest = 0.0  # seconds a token
    passed_over = 0
    endless = rounds(options["max_num_seqs"], options["max_model_len"], options["max_num_batched_tokens"])
    for number, each in enumerate(endless):
        left = ends_at - time.monotonic()
        if left <= 0 or passed_over > 20:
            break
        if slowest * each.num_tokens > left:
            passed_over += 1
            continue
        passed_over = 0
        requests = [BenchRequest(random_token_ids(rng, n, token_end), each.output_len) for n in each.prompt_lens]
        count = len(requests)
        arrivals = [0.0] * count if each.rate is None else arrival_times(count, each.rate, seed=number)
        began = time.monotonic()
        records = asyncio.run(serving.run_load(target, requests, arrivals))
        if failed := [record.error for record in records if record.error is not None]:
            raise ConfigError(f"a request of the calibration failed: {failed[0]}")
        if each.kind != "mixed":
            slowest = (time.monotonic() - began) / each.num_tokens
        if each.kind == "prompt":
            alone.append((each, records[0]))
        print(f"\r{seconds - max(0.0, left):.0f} of {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return alone


def _intake(speed: Speed, alone: Sequence[tuple[Round, RequestRecord]]) -> float:
    """What lone requests waited for their first token beyond the step that computed it."""
    if not alone:
        raise ConfigError("the time was too short to send a prompt alone: give more --seconds")
    beyond = [
        record.chunk_times[0] - record.sent_s - speed.times.predict(StepLoad().with_chunk(0, each.prompt_lens[0]))
        for each, record in alone
    ]
    return max(0.0, statistics.median(beyond))
