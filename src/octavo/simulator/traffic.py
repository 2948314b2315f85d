"""Requests and when they come: from traces or distributions, one at a time, so that a million take no memory.

    shapes (what is asked for)      trace of any known format, repeated | lengths by distribution, shared prefixes
      │
    traffic (when)                  OpenTraffic: at given times, whatever is done | ClosedTraffic: users who wait
      │
    SimulatedRequest                arrival, tenant, output tokens, prompt as runs of equal tokens

What a prompt says does not matter, only what it shares: each prefix that is shared has a token id of its own, and so
has what is a request's own. No vocabulary bounds them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.bench.traces import TOKENS_PER_HASH, TraceRequest
from octavo.bench.workload import Lengths
from octavo.errors import ConfigError

# Token ids: of shared prefixes below, of each request's own tokens above. Repetitions of a trace are this far apart.
_OWN = 1 << 30
_REPEAT = 1 << 24


class Shape(NamedTuple):
    """What one request asks for.

    Attributes:
        runs: (token id, how many): the prompt.
        arrival_s: as a trace has it, repetitions behind each other; None where it has none.
    """

    runs: tuple[tuple[int, int], ...]
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A shape at its time."""

    arrival_s: float
    shape: Shape
    user: int = 0

    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens, made anew."""
        runs = self.shape.runs
        if len(runs) == 1:
            return [runs[0][0]] * runs[0][1]
        return list(itertools.chain.from_iterable(itertools.repeat(token, count) for token, count in runs))


@dataclass(frozen=True, slots=True)
class Tenants:
    """Who the requests are from where a trace does not say: by name, weight and share of the requests."""

    names: tuple[str, ...] = ("",)
    weights: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)

    @classmethod
    def parse(cls, text: str) -> Tenants:
        """'alice:2,bob:1:9': names, weights, and how many requests each sends relative to the others (1).

        Raises:
            ConfigError: it reads otherwise.
        """
        names, weights, shares = [], [], []
        for part in text.split(","):
            name, *numbers = part.split(":")
            try:
                weight, share = ([float(number) for number in numbers] + [1.0, 1.0])[:2]
            except ValueError:
                weight = share = 0.0
            if not name or len(numbers) > 2 or not 0 < weight < math.inf or not 0 < share < math.inf:
                raise ConfigError(f"cannot read {part!r} as a tenant: write NAME, NAME:WEIGHT or NAME:WEIGHT:SHARE")
            names.append(name)
            weights.append(weight)
            shares.append(share)
        if len(set(names)) < len(names):
            raise ConfigError(f"a tenant occurs twice in {text!r}")
        return cls(tuple(names), tuple(weights), tuple(shares))

    def weight_of(self, name: str) -> float:
        """1 for whoever is not named."""
        return self.weights[self.names.index(name)] if name in self.names else 1.0

    def draw(self, rng: random.Random) -> str:
        return self.names[0] if len(self.names) == 1 else rng.choices(self.names, self.shares)[0]


def trace_shapes(
    trace: Sequence[TraceRequest], tenants: Tenants, *, scale_lengths: float = 1.0, seed: int = 0
) -> Iterator[Shape]:
    """The trace's requests, again and again: a repetition follows the one before, and shares no prefix with it.

    Raises:
        ConfigError: a scale that is not positive.
    """
    if not 0 < scale_lengths < math.inf:
        raise ConfigError(f"lengths are to be scaled by {scale_lengths:g}: it must be above 0")
    rng, size = random.Random(seed), max(1, round(TOKENS_PER_HASH * scale_lengths))
    times = [request.arrival_s for request in trace]
    timed = None not in times
    last = max((at for at in times if at is not None), default=0.0)
    period = last * len(trace) / max(1, len(trace) - 1)
    numbers = itertools.count(_OWN)
    for repetition in itertools.count():
        for request in trace:
            # The last piece may be shorter: it is scaled by itself, so that those before stay aligned.
            whole, rest = divmod(request.prompt_tokens, TOKENS_PER_HASH)
            if request.hash_ids is None:
                length = max(1, round(request.prompt_tokens * scale_lengths))
                runs: tuple[tuple[int, int], ...] = ((next(numbers), length),)
            else:
                length = max(1, whole * size + round(rest * scale_lengths))
                runs = _cut([(1 + h + repetition * _REPEAT, size) for h in request.hash_ids], length)
            tenant = tenants.draw(rng) if request.client is None else request.client
            arrival = repetition * period + (request.arrival_s or 0.0) if timed else None
            yield Shape(runs, length, max(1, round(request.output_tokens * scale_lengths)), tenant, arrival)
        if not timed or not last:
            period = 0.0


def _cut(runs: Sequence[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """The first `length` tokens of `runs`."""
    cut, left = [], length
    for token, count in runs:
        if left <= 0:
            break
        cut.append((token, min(count, left)))
        left -= count
    return tuple(cut)


def drawn_shapes(
    prompt_lens: Lengths,
    output_lens: Lengths,
    tenants: Tenants,
    *,
    prefix_lens: Lengths | None = None,
    num_prefixes: int = 1,
    zipf: float = 1.0,
    seed: int = 0,
) -> Iterator[Shape]:
    """Requests of random lengths; with `prefix_lens`, each begins with one of `num_prefixes` shared prefixes.

    Args:
        zipf: the i-th prefix is asked for in proportion to i ** -zipf.
    """
    rng, prefix_rng = random.Random(seed), random.Random(f"{seed}/prefixes")
    prefixes = [] if prefix_lens is None else [prefix_lens.draw(prefix_rng) for _ in range(num_prefixes)]
    popularity = list(itertools.accumulate((i + 1) ** -zipf for i in range(len(prefixes))))
    for number in itertools.count(_OWN):
        prompt_len, output_len = prompt_lens.draw(rng), output_lens.draw(rng)
        if not prefixes:
            yield Shape(((number, prompt_len),), prompt_len, output_len, tenants.draw(rng))
            continue
        chosen = min(bisect(popularity, rng.random() * popularity[-1]), len(prefixes) - 1)
        runs = ((1 + chosen, prefixes[chosen]), (number, prompt_len))
        yield Shape(runs, prefixes[chosen] + prompt_len, output_len, tenants.draw(rng))


def clip(shape: Shape, max_model_len: int) -> Shape:
    """The shape cut to what a model takes: the prompt loses its tail to the output, but keeps a token."""
    if shape.prompt_tokens + shape.output_tokens <= max_model_len:
        return shape
    output = min(shape.output_tokens, max_model_len - 1)
    length = min(shape.prompt_tokens, max_model_len - output)
    return shape._replace(runs=_cut(shape.runs, length), prompt_tokens=length, output_tokens=output)


class Traffic(Protocol):
    """Who sends what when."""

    def due(self) -> float | None:
        """When the next request comes, as far as is known by now; None: no more come before one has ended."""

    def take(self) -> SimulatedRequest:
        """That request."""

    def ended(self, request: SimulatedRequest, at: float) -> None:
        """A request has its last token."""


class OpenTraffic:
    """Requests at their times, whether or not earlier ones have ended.

    Args:
        timed: seconds, rising, and what is asked for then.
    """

    def __init__(self, timed: Iterator[tuple[float, Shape]]) -> None:
        self._timed = timed
        self._next = next(timed, None)

    def due(self) -> float | None:
        """See `Traffic.due`."""
        return None if self._next is None else self._next[0]

    def take(self) -> SimulatedRequest:
        """See `Traffic.take`."""
        assert self._next is not None
        at, shape = self._next
        self._next = next(self._timed, None)
        return SimulatedRequest(at, shape)

    def ended(self, request: SimulatedRequest, at: float) -> None:
        """See `Traffic.ended`."""


class ClosedTraffic:
    """Users who each send a request, wait for its end, think, and send the next.

    Args:
        count: requests in all.
        think_s: mean of the exponentially distributed time between an answer and the next request.
    """

    def __init__(self, shapes: Iterator[Shape], users: int, count: int, think_s: float = 0.0, seed: int = 0) -> None:
        self._shapes = shapes
        self._left = count
        self._think_s = think_s
        self._rng = random.Random(f"{seed}/think")
        self._ready: list[tuple[float, int]] = [(self._think() if think_s else 0.0, user) for user in range(users)]
        heapq.heapify(self._ready)

    def _think(self) -> float:
        return self._rng.expovariate(1 / self._think_s) if self._think_s else 0.0

    def due(self) -> float | None:
        """See `Traffic.due`."""
        return self._ready[0][0] if self._ready and self._left else None

    def take(self) -> SimulatedRequest:
        """See `Traffic.take`."""
        at, user = heapq.heappop(self._ready)
        self._left -= 1
        return SimulatedRequest(at, next(self._shapes), user)

    def ended(self, request: SimulatedRequest, at: float) -> None:
        """See `Traffic.ended`."""
        heapq.heappush(self._ready, (at + self._think(), request.user))


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """The times of `bench.workload.arrival_times`, one by one.

    Raises:
        ConfigError: a rate or burstiness that is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"request rate and burstiness must be above 0, got {rate:g} and {burstiness:g}")
    if rate == math.inf:
        return itertools.repeat(0.0, count)
    rng = random.Random(seed)
    gaps = (rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count - 1))
    return itertools.islice(itertools.accumulate(gaps, initial=0.0), count)
