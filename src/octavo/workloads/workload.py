"""Benchmark workloads: named ones, random lengths, arrival times. The same seed gives the same requests."""

from __future__ import annotations

import itertools
import math
import random
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.errors import ConfigError
from octavo.text_file import read_text

FIRST_TOKEN_ID = 100
"""The first id for random prompts; most vocabularies have their special tokens below it."""
END_TOKEN_ID = 40_000
"""Ids up to here exist in every vocabulary that is benchmarked by default."""

NAMED_WORKLOADS = "single, uniformN, mixedN, sharedN, prefillN, sharegptN, alpacaN (N requests, as in mixed64)"

LENGTH_FORMS = "128, uniform:16-512, lognormal:MEDIAN,SIGMA, or file:PATH to draw from the numbers in a file"
"""What `Lengths.parse` reads, for help."""

_DIALOGUES = {"sharegpt": (161.31, 1.2, 337.99, 0.9), "alpaca": (19.31, 0.6, 58.45, 0.9)}
"""Mean, and sigma of the logarithm, of prompt lengths and of output lengths. The means are those of the PagedAttention
paper (Kwon et al. 2023, figure 11); it only plots the spread, so the sigmas are our own estimates."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One benchmark request of a fixed output length (end-of-sequence is ignored).

    Attributes:
        arrival_s: seconds after the start at which the request is due; None if the workload has no times.
        client: the sender, if a trace names it.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float | None = None
    client: str | None = None


def random_token_ids(rng: random.Random, count: int, end: int = END_TOKEN_ID) -> list[int]:
    """Return `count` random ids from [100, end), or from [0, end) if the vocabulary is too small for that."""
    first = FIRST_TOKEN_ID if end > FIRST_TOKEN_ID else 0
    return [rng.randrange(first, end) for _ in range(count)]


def named_workload(name: str, seed: int = 0, end: int = END_TOKEN_ID) -> list[BenchRequest]:
    """Return one of the fixed workloads for comparing engines.

    single: one prompt of 64 tokens, 128 out. uniformN: N of those. mixedN: log-normal lengths of a chat service,
    16 to 1024 in and 8 to 256 out. sharedN: a shared prefix of 512 tokens, 32 more tokens each, 32 out. sharegptN and
    alpacaN: log-normal lengths with the means of those datasets (ShareGPT: 161 in, 338 out; Alpaca: 19 in, 58 out).
    prefillN: one prompt of N tokens, 1 out.

    Raises:
        ConfigError: there is no such workload.
    """
    match = re.fullmatch(r"(single)|(uniform|mixed|shared|sharegpt|alpaca|prefill)([1-9][0-9]*)", name)
    if not match:
        raise ConfigError(f"unknown workload {name!r}: {NAMED_WORKLOADS}")
    rng = random.Random(seed)
    kind, count = match[1] or match[2], int(match[3] or 1)
    if kind == "mixed":
        return [_mixed_request(rng, end) for _ in range(count)]
    if kind in _DIALOGUES:
        return [_dialogue_request(rng, end, *_DIALOGUES[kind]) for _ in range(count)]
    if kind == "prefill":
        return [BenchRequest(random_token_ids(rng, count, end), 1)]
    if kind == "shared":
        prefix = random_token_ids(rng, 512, end)
        return [BenchRequest(prefix + random_token_ids(rng, 32, end), 32) for _ in range(count)]
    return [BenchRequest(random_token_ids(rng, 64, end), 128) for _ in range(count)]


def _mixed_request(rng: random.Random, end: int) -> BenchRequest:
    # Both lengths are drawn before the ids; changing the order of the draws would change the workload.
    prompt_len = min(1024, max(16, int(rng.lognormvariate(5.0, 0.8))))
    output_len = min(256, max(8, int(rng.lognormvariate(4.4, 0.7))))
    return BenchRequest(random_token_ids(rng, prompt_len, end), output_len)


def _dialogue_request(
    rng: random.Random, end: int, prompt_mean: float, prompt_sigma: float, output_mean: float, output_sigma: float
) -> BenchRequest:
    prompt_len, output_len = (
        # The mean of a log-normal variable is exp(mu + sigma² / 2).
        max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
        for mean, sigma in ((prompt_mean, prompt_sigma), (output_mean, output_sigma))
    )
    return BenchRequest(random_token_ids(rng, prompt_len, end), output_len)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, from `parse`."""

    text: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse '128', 'uniform:16-512' (inclusive), 'lognormal:148,0.8' (median, sigma of the logarithm) or
        'file:PATH' (whole numbers between white space, of which each is equally likely).

        Raises:
            ConfigError: the text has none of these forms, a length is not positive, or the file cannot be read.
        """
        if text.startswith("file:"):
            lengths = _lengths_in(Path(text.removeprefix("file:")))
            return cls(text, lambda rng: rng.choice(lengths))
        number = r"[0-9]+(?:\.[0-9]+)?"
        if match := re.fullmatch(r"[1-9][0-9]*", text):
            fixed = int(text)
            return cls(text, lambda rng: fixed)
        if match := re.fullmatch(r"uniform:([1-9][0-9]*)-([1-9][0-9]*)", text):
            low, high = int(match[1]), int(match[2])
            if low <= high:
                return cls(text, lambda rng: rng.randint(low, high))
        if (match := re.fullmatch(rf"lognormal:({number}),({number})", text)) and float(match[1]) > 0:
            mu, sigma = math.log(float(match[1])), float(match[2])
            return cls(text, lambda rng: max(1, int(rng.lognormvariate(mu, sigma))))
        raise ConfigError(f"cannot read {text!r} as lengths: write 128, uniform:16-512, lognormal:148,0.8 or file:PATH")


def _lengths_in(path: Path) -> array[int]:
    words = read_text(path, "lengths from").split()
    try:
        lengths = array("q", map(int, words))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} must contain whole numbers and white space: {error}") from error
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{path} must contain at least one length, and none below 1")
    return lengths


def random_workload(
    count: int, prompt_lens: Lengths, output_lens: Lengths, seed: int = 0, end: int = END_TOKEN_ID
) -> list[BenchRequest]:
    """Return `count` requests of random tokens that share nothing."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt_len, output_len = prompt_lens.draw(rng), output_lens.draw(rng)
        requests.append(BenchRequest(random_token_ids(rng, prompt_len, end), output_len))
    return requests


def clip(
    requests: Sequence[BenchRequest],
    *,
    max_model_len: int | None = None,
    vocab_size: int | None = None,
) -> tuple[list[BenchRequest], int]:
    """Truncate requests to the model's limits; return them and the number of truncated ones.

    A prompt loses its tail, never its head, so that shared prefixes stay shared. Prompts are shortened in favour of the
    output, which is what is measured, but keep at least one token. Token ids that a vocabulary lacks wrap around.
    """
    clipped = []
    num_cut = 0
    for request in requests:
        prompt_len, output_len = len(request.prompt_token_ids), request.max_tokens
        if max_model_len is not None:
            output_len = min(output_len, max_model_len - 1)
            prompt_len = min(prompt_len, max_model_len - output_len)
        if (prompt_len, output_len) != (len(request.prompt_token_ids), request.max_tokens):
            num_cut += 1
            request = replace(request, prompt_token_ids=request.prompt_token_ids[:prompt_len], max_tokens=output_len)
        if vocab_size is not None and max(request.prompt_token_ids) >= vocab_size:
            request = replace(request, prompt_token_ids=[token % vocab_size for token in request.prompt_token_ids])
        clipped.append(request)
    return clipped, num_cut


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Yield arrival times of `count` requests in seconds from 0, at `rate` per second on average; all 0 if infinite.

    The gaps follow a gamma distribution with shape `burstiness`: 1 is a Poisson process, lower values are burstier,
    higher values more even (as in vLLM's serving benchmark).

    Raises:
        ConfigError: the rate or the burstiness is not positive, or the burstiness is infinite.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"request rate and burstiness must be above 0, got {rate:g} and {burstiness:g}")
    if burstiness == math.inf:
        raise ConfigError("burstiness must be finite: 1000 makes nearly even gaps")
    if rate == math.inf:
        return itertools.repeat(0.0, count)
    rng = random.Random(seed)
    gaps = (rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count - 1))
    return itertools.islice(itertools.accumulate(gaps, initial=0.0), count)
