"""Generate requests from traces or distributions, one at a time, so that a million of them need no memory.

    shapes: what is requested       a trace, repeated | lengths from distributions, shared prefixes
      │
    traffic: when                   OpenTraffic: at given times | ClosedTraffic: users who wait for their answers
      │
    SimulatedRequest                arrival time, tenant, output tokens, prompt as runs of equal tokens

The content of a prompt does not matter, only which parts it shares. So each shared prefix is a run of one token id, and
the rest of each prompt a run of an id of its own; the ids are not bounded by a vocabulary.
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

from octavo.errors import ConfigError
from octavo.workloads.traces import TraceRequest, scaled, tokens_per_hash
from octavo.workloads.workload import Lengths

# Token ids below are shared prefixes, ids above are unshared parts of prompts; all of them fit an int32. Each
# repetition of a trace takes new ids for its prefixes, and when none are left, those of repetitions long ago.
_OWN = 1 << 30

PREFILL, DECODE = "prefill", "decode"


class Shape(NamedTuple):
    """The lengths and prefixes of one request.

    Attributes:
        runs: the prompt as pairs of a token id and a count.
        arrival_s: arrival time in the trace, later for each repetition; None if the trace has no times.
    """

    runs: tuple[tuple[int, int], ...]
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request with its arrival time.

    Attributes:
        kv_hint: the neighbour that has more of its prompt, if the router knows one.
        stage: `PREFILL` if only its prompt is computed, for another server; `DECODE` if it comes to that server then.
    """

    arrival_s: float
    shape: Shape
    user: int = 0
    kv_hint: str | None = None
    stage: str = ""

    def prompt_token_ids(self) -> list[int]:
        """Return the tokens of the prompt, in a new list."""
        runs = self.shape.runs
        if len(runs) == 1:
            return [runs[0][0]] * runs[0][1]
        return list(itertools.chain.from_iterable(itertools.repeat(token, count) for token, count in runs))


@dataclass(frozen=True, slots=True)
class Tenants:
    """Names, weights and shares of the requests of the tenants, used if a trace does not name them."""

    names: tuple[str, ...] = ("",)
    weights: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)

    @classmethod
    def parse(cls, text: str) -> Tenants:
        """Parse 'alice:2,bob:1:9': names, weights (default 1), and relative numbers of requests (default 1).

        Raises:
            ConfigError: the text has another format.
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
        """Return the weight of a tenant; 1 if it is not listed."""
        return self.weights[self.names.index(name)] if name in self.names else 1.0

    def draw(self, rng: random.Random) -> str:
        return self.names[0] if len(self.names) == 1 else rng.choices(self.names, self.shares)[0]


def trace_shapes(
    trace: Sequence[TraceRequest], tenants: Tenants, *, scale_lengths: float = 1.0, seed: int = 0
) -> Iterator[Shape]:
    """Yield the requests of a trace endlessly; its repetitions follow one another in time and share no prefixes.

    Args:
        scale_lengths: factor on the lengths of prompts and outputs; prompts that the trace holds are truncated.

    Raises:
        ConfigError: see `scaled`.
    """
    trace, size = scaled(trace, scale_lengths), tokens_per_hash(scale_lengths)
    prompts, rng = _as_runs([request.token_ids or () for request in trace]), random.Random(seed)
    times = [request.arrival_s for request in trace]
    timed = None not in times
    last = max((at for at in times if at is not None), default=0.0)
    period = last * len(trace) / max(1, len(trace) - 1)
    numbers = itertools.count(_OWN)
    # A trace's hash ids may be any numbers: they are counted through, so that few ids are taken.
    order = {h: i for i, h in enumerate(dict.fromkeys(h for request in trace for h in request.hash_ids or ()))}
    ids_each = len(order) + len({i for prompt in prompts for i, _ in prompt})
    for repetition in itertools.count():
        taken = repetition * ids_each
        for request, prompt in zip(trace, prompts, strict=True):
            length = request.prompt_tokens
            runs: tuple[tuple[int, int], ...]
            if prompt:
                runs = tuple((1 + (taken + len(order) + i) % (_OWN - 1), count) for i, count in prompt)
            elif request.hash_ids is None:
                runs = ((next(numbers), length),)
            else:
                runs = _cut([(1 + (taken + order[h]) % (_OWN - 1), size) for h in request.hash_ids], length)
            tenant = tenants.draw(rng) if request.client is None else request.client
            arrival = repetition * period + (request.arrival_s or 0.0) if timed else None
            yield Shape(runs, length, request.output_tokens, tenant, arrival)
        if not timed or not last:
            period = 0.0


def _as_runs(prompts: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, int], ...]]:
    """Return prompts as runs of fewer than `len(prompts)` ids that begin alike for as long as the prompts do."""
    found: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {(): ()}
    before: tuple[int, ...] = ()
    for prompt in sorted(set(prompts) - {()}):
        # In this order, no earlier prompt shares more than the one before.
        alike = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
        found[prompt] = (*_cut(found[before], alike), (len(found) - 1, len(prompt) - alike))
        before = prompt
    return [found[prompt] for prompt in prompts]


def _cut(runs: Sequence[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """Return the first `length` tokens of `runs`."""
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
    """Yield requests of random lengths; with `prefix_lens`, each begins with one of `num_prefixes` shared prefixes.

    Args:
        zipf: the i-th prefix is chosen with probability proportional to i ** -zipf.
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
    """Cut a request to `max_model_len`: the prompt is shortened first, to no less than one token."""
    if shape.prompt_tokens + shape.output_tokens <= max_model_len:
        return shape
    output = min(shape.output_tokens, max_model_len - 1)
    length = min(shape.prompt_tokens, max_model_len - output)
    return shape._replace(runs=_cut(shape.runs, length), prompt_tokens=length, output_tokens=output)


class Traffic(Protocol):
    """A source of requests in the order of their arrival."""

    def due(self) -> float | None:
        """Return when the next request arrives; None if no more arrive unless one ends."""

    def take(self) -> SimulatedRequest:
        """Remove and return the next request."""

    def ended(self, request: SimulatedRequest, at: float) -> None:
        """Tell the source that a request ended at time `at`."""


class OpenTraffic:
    """Requests that arrive at given times, whether or not earlier ones have ended.

    Args:
        timed: pairs of the arrival time in seconds, in ascending order, and the request.
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
    """Users who each send a request, wait until it ends, think, and send the next.

    Args:
        count: number of requests in total.
        think_s: mean of the exponentially distributed think time, in seconds.
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
