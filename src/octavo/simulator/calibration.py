"""Measure the step times of a real server with rounds of requests that exercise every term of the step-time model.

    streams    1, 2, 4, … requests at once: decode steps with that many rows
    prompt     one request alone, from 8 tokens to the longest step: chunks
    paused     the same for an engine that has been idle: its slower first step, and a request's time outside its steps
    contexts   a few streams with long prompts: reading keys and values
    mixed      random arrivals: chunks in steps with streams

Meanwhile the server records its plans. Server and client share a clock, so the recording also shows how long a request
alone takes outside its steps (`overheads`). Rounds repeat, with different lengths, until the time is up.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep, read_facts, read_plans
from octavo.simulator.speed import Speed, speed_of_plans
from octavo.workloads import report, serving
from octavo.workloads.processor_time import ProcessorTime, ProcessorWatch, disturbed
from octavo.workloads.server_process import fetch_json, running_server
from octavo.workloads.serving import RequestRecord, Target
from octavo.workloads.workload import END_TOKEN_ID, BenchRequest, arrival_times, random_token_ids

# Long enough that a round has steps in which all of its streams run.
_STREAMED = 24
_AFTER_PAUSE = 8
_CONTEXTS = (24, 100, 300)
_MOST_IN_PROMPTS = 2000
_RATES = (4.0, 8.0, 16.0)
_PAUSED, _PAUSES_S = 6, (0.1, 0.5)  # rounds in each sweep, and the shortest and the longest pause before one

WARM_UP_S = 4.0
"""For the first 1.5 seconds, steps took up to five times as long as later: a new server also starts the process that
reads chats, and its first steps of each size touch new memory."""

DISTURBED = 0.05
"""Share of the processors' time: where others had more of it for half a second, that half second is left out."""

_WARM_UP = ((600,), (100, 50, 20), (12,))  # lengths of prompts sent together


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are sent together, or at `rate` per second, `pause_s` seconds after those of the round before."""

    kind: str
    prompt_lens: tuple[int, ...]
    output_len: int
    rate: float | None = None
    pause_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt_lens) + len(self.prompt_lens) * self.output_len


@dataclass(frozen=True, slots=True)
class Sent:
    """When a request was sent and had its first token, by `time.perf_counter`.

    Attributes:
        kind: of its round: a "paused" one found the server idle.
    """

    kind: str
    sent: float
    first_token: float


def rounds(max_num_seqs: int, max_model_len: int, max_step: int, seed: int = 0) -> Iterator[Round]:
    """Yield rounds endlessly: sweep after sweep over all kinds, each with different lengths."""
    rng = random.Random(seed)
    longest = max(1, min(max_step, max_model_len - 2))

    def jittered(length: float, output_len: int = _STREAMED) -> int:
        return max(1, min(round(length * rng.uniform(0.75, 1.25)), max_model_len - output_len, longest))

    for sweep in itertools.count():
        found = []
        for exponent in range(20):
            if (streams := 1 << exponent) > max_num_seqs:
                break
            # Later sweeps also measure between the powers of two, and with the contexts of a conversation.
            count = min(max_num_seqs, max(1, round(streams * (1 if sweep == 0 else rng.uniform(0.75, 1.4)))))
            context = 24 if sweep == 0 else min(rng.choice(_CONTEXTS), _MOST_IN_PROMPTS / count)
            found.append(Round("streams", tuple(jittered(context) for _ in range(count)), _STREAMED))
        length = 8
        while length <= longest:
            found.append(Round("prompt", (length if sweep == 0 else jittered(length),), 2))
            length *= 2
        for _ in range(_PAUSED):
            length = jittered(rng.lognormvariate(5.0, 0.9), _AFTER_PAUSE)
            found.append(Round("paused", (length,), _AFTER_PAUSE, pause_s=rng.uniform(*_PAUSES_S)))
        for count, context in ((2, 3000), (6, 1200), (16, 500), (48, 250)):
            if count <= max_num_seqs:
                found.append(Round("contexts", tuple(jittered(context) for _ in range(count)), _STREAMED))
        for rate in rng.sample(_RATES, 2):
            lengths = tuple(jittered(rng.lognormvariate(5.0, 0.9), 2 * _STREAMED) for _ in range(24))
            found.append(Round("mixed", lengths, 2 * _STREAMED, rate))
        if sweep:
            rng.shuffle(found)
        yield from found


def calibrate(argv: Sequence[str], seconds: float, vocab_size: int, plans: str | None = None) -> Speed:
    """Start `octavo serve ARGV`, send it rounds of requests for `seconds`, and fit step times to the recorded plans.

    Args:
        plans: file that keeps the recording; by default it is deleted.

    Raises:
        ConfigError: a request failed, or the time was too short for a fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, processors = plans or str(Path(folder) / "plans"), ProcessorTime()
        with running_server([*argv, f"--record-plans={path}"]) as server:
            model = fetch_json(server.base_url + "/v1/models")["data"][0]
            target = Target(server.base_url, str(model["id"]))
            recorded, token_end = read_facts(path), min(vocab_size, END_TOKEN_ID)
            warm_up(target, recorded["max_model_len"], token_end)
            began = time.perf_counter()
            with ProcessorWatch() as watch:
                sent = RoundSender(target, recorded, token_end).send_for(seconds)
            left_out = [(span.began, span.ended) for span in disturbed(watch.spans, DISTURBED)]
        shares, machine = processors.shares(), report.machine()
        speed = speed_of_plans(
            [path],
            origin=f"measured: {recorded['model']} on {machine['cores']} cores of {machine['cpu']}",
            since=began,
            left_out=left_out,
        )
        steps = [step for step in read_plans(path) if step.at >= began]
        intake, reply = overheads([steps], sent, left_out)
    taken = {"others": None, "stolen": None} if shares is None else asdict(shares)
    seconds_left_out = sum(end - start for start, end in left_out)
    facts = {**speed.facts, "machine": machine, **taken, "left_out_s": seconds_left_out}
    return replace(speed, intake_s=intake, reply_s=reply, facts=facts)


def warm_up(target: Target, max_model_len: int, token_end: int, seconds: float = WARM_UP_S) -> None:
    """Send requests to a server that has just started until its step times have settled."""
    rng, ends_at = random.Random(5), time.perf_counter() + seconds
    for prompt_lens in itertools.cycle(_WARM_UP):
        if time.perf_counter() >= ends_at:
            break
        lengths = (max(1, min(length, max_model_len - 8)) for length in prompt_lens)
        requests = [BenchRequest(random_token_ids(rng, length, token_end), 8) for length in lengths]
        run_load(target, requests, [0.0] * len(requests))


class RoundSender:
    """Sends rounds of requests to a server.

    Args:
        options: of the server, as its recording has them.
        token_end: prompts are random token ids below this one.
    """

    def __init__(self, target: Target, options: Mapping[str, Any], token_end: int) -> None:
        self._target = target
        self._token_end = token_end
        self._rng = random.Random(1)
        endless = rounds(options["max_num_seqs"], options["max_model_len"], options["max_num_batched_tokens"])
        self._rounds = enumerate(endless)

    def send_for(self, seconds: float) -> list[Sent]:
        """Send rounds until the time is up, and return when their requests were sent and answered.

        Rounds that would take longer than the time left are skipped.
        """
        sent: list[Sent] = []
        ends_at = time.monotonic() + seconds
        slowest = 0.0  # seconds per token
        passed_over = 0
        for number, each in self._rounds:
            left = ends_at - time.monotonic()
            if left <= 0 or passed_over > 20:
                break
            if each.pause_s + slowest * each.num_tokens > left:
                passed_over += 1
                continue
            time.sleep(each.pause_s)
            passed_over, began = 0, time.monotonic()
            sent += self._send(each, number)
            if each.rate is None:
                slowest = (time.monotonic() - began) / each.num_tokens
            print(f"\r{seconds - max(0.0, left):.0f} of {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return sent

    def _send(self, each: Round, number: int) -> list[Sent]:
        requests = [
            BenchRequest(random_token_ids(self._rng, n, self._token_end), each.output_len) for n in each.prompt_lens
        ]
        count = len(requests)
        arrivals = [0.0] * count if each.rate is None else list(arrival_times(count, each.rate, seed=number))
        zero, records = run_load(self._target, requests, arrivals)
        if failed := [record.error for record in records if record.error is not None]:
            raise ConfigError(f"a request of the calibration failed: {failed[0]}")
        return [Sent(each.kind, zero + record.sent_s, zero + record.chunk_times[0]) for record in records]


def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
) -> tuple[float, list[RequestRecord]]:
    """Run `workloads.serving.run_load`; returns the `time.perf_counter` that its times count from, and its records."""

    async def run() -> tuple[float, list[RequestRecord]]:
        return time.perf_counter(), await serving.run_load(target, requests, arrivals, max_concurrency)

    return asyncio.run(run())


def overheads(
    recordings: Sequence[Sequence[RecordedStep]],
    requests: Sequence[Sent],
    left_out: Sequence[tuple[float, float]] = (),
) -> tuple[float, float]:
    """Return two times in seconds, each the median of the requests that found all servers idle.

        sent ── intake ──> first step begins │ … │ step that drew the first token ends ── reply ──> its client has it

    Args:
        recordings: the steps of the server, or of each of several behind a router.
        requests: the requests sent during the recordings.
        left_out: spans of time whose requests are not counted.

    Raises:
        ConfigError: no "paused" one is among them.
    """
    intakes, replies = [], []
    for each in requests:
        if each.kind != "paused" or any(began <= each.first_token and each.sent <= ended for began, ended in left_out):
            continue
        for steps in recordings:
            first = bisect_left(steps, each.sent, key=lambda step: step.at)
            drew = next((number for number in range(first, len(steps)) if any(steps[number].draws)), len(steps))
            # A step ends when the next one begins, if that has the request too.
            if (
                drew + 1 < len(steps)
                and steps[drew].at < each.first_token
                and steps[drew].seq_ids == steps[drew + 1].seq_ids
            ):
                intakes.append(steps[first].at - each.sent)
                replies.append(each.first_token - steps[drew + 1].at)
    if not intakes:
        raise ConfigError("the time was too short to send a prompt to the idle server: give more --seconds")
    return max(0.0, statistics.median(intakes)), max(0.0, statistics.median(replies))
