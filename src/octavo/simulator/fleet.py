"""Several simulated servers behind a router, on one virtual clock.

    traffic ──> router ──> one of N simulations, each with its own cache and scheduler ──links──> the others' blocks
                               ^
                               └── the one whose next steps end first computes them, if nothing arrives before

A router learns of first tokens and of ends when clients do. It sees each server's cache after the steps that it is
computing, so slightly early; a decision takes no time.
With servers for prefill, a long prompt is computed by one of them first, and then fetched, as `octavo route` does it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from octavo.kvcache.block import BlockTable
from octavo.kvcache.hashing import TokenChain
from octavo.request import cache_scope
from octavo.simulator.results import Results
from octavo.simulator.simulation import SimulatedServer, Simulation, rare_collections
from octavo.simulator.traffic import DECODE, PREFILL, SimulatedRequest, Tenants, Traffic, clip

PREFILL_TOKENS = 512  # as `--prefill-tokens` of `octavo route`
_MOST_EXAMINED = 16  # servers of those that once got prompts with an equal beginning


@dataclass(eq=False, slots=True)
class Replica:
    """One of several servers, as the router sees it; the traffic of its simulation.

    Attributes:
        report: called when a request has its first token or has ended, and when its client sees that.
        sent: requests in transit to it, and their arrival times.
        uncomputed: prompt tokens that it has to compute for each request whose first token the router has not seen, by
            the request's `id`.
        reserved: the tokens in the prompt's blocks of each request whose end the router has not seen, by the request's
            `id`, without blocks that were already in use; tokens that are drawn count for nothing.
        load: the sum of both.
        num_unfinished: requests that it has not finished.
        num_requests: number of requests sent to it so far.
    """

    place: int
    server: SimulatedServer
    report: Callable[[Replica, SimulatedRequest, float, bool], None]
    sent: deque[tuple[float, SimulatedRequest]] = field(default_factory=deque)
    uncomputed: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    load: int = 0
    num_unfinished: int = 0
    num_requests: int = 0

    def send(self, request: SimulatedRequest, cached: int, shared: int, at: float) -> None:
        """Send a request, with the number of its prompt's tokens that the router believes to be cached there, and the
        number of those that other requests there use too.
        """
        tokens, size = request.shape.prompt_tokens, self.server.kv.spec.block_size
        self.uncomputed[id(request)] = tokens - cached
        self.reserved[id(request)] = reserved = tokens // size * size - shared
        self.load += tokens - cached + reserved
        self.num_unfinished += 1
        self.num_requests += 1
        self.sent.append((at, request))

    def seen(self, request: SimulatedRequest, *, has_ended: bool) -> None:
        """Count a request's first token or its end, when the router sees it."""
        self.load -= self.uncomputed.pop(id(request), 0)
        if has_ended:
            self.load -= self.reserved.pop(id(request))

    def due(self) -> float | None:
        """See `Traffic.due`."""
        return self.sent[0][0] if self.sent else None

    def take(self) -> SimulatedRequest:
        """See `Traffic.take`."""
        return self.sent.popleft()[1]

    def began(self, request: SimulatedRequest, at: float) -> None:
        """Called when a request has its first token, which its client receives at `at`."""
        self.report(self, request, at, False)

    def ended(self, request: SimulatedRequest, at: float) -> None:
        """See `Traffic.ended`."""
        self.num_unfinished -= 1
        self.report(self, request, at, True)


class Destination(NamedTuple):
    """A replica, the tokens of the prompt that it has cached, those of them that others use, and the replica that has
    most of them; 0 and None if the router does not look.
    """

    replica: Replica
    cached: int = 0
    shared: int = 0
    holder: Replica | None = None


class SimulatedRouter(Protocol):
    """Chooses replicas."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> Destination: ...


class LeastLoaded:
    """Chooses the replica with the fewest requests."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> Destination:
        return Destination(min(replicas, key=lambda replica: len(replica.reserved)))


class _RoundRobin:
    """Chooses the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> Destination:
        self._next += 1
        return Destination(replicas[(self._next - 1) % len(replicas)])


class LongestPrefix:
    """Weighs the cached part of a prompt against load as Dynamo's selection does (`octavo route`): the replica with the
    least sum of prompt blocks that it would have to compute, and of blocks that would be in use. Cached blocks that no
    request uses would be too. Of replicas with equal sums, a random one is chosen.

    Without full attention, servers publish no events, so the least loaded is taken. Only replicas that got a prompt
    with an equal beginning can have some of it, so the caches of no others are examined.
    """

    def __init__(self, seed: int = 0) -> None:
        self._ties = random.Random(seed)
        self._sent: dict[bytes, dict[int, Replica]] = {}  # by the key of the first 1, 2, 4, … blocks of prompts

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> Destination:
        kv, tokens = replicas[0].server.kv, request.shape.prompt_tokens
        if kv.spec.groups[0].sliding_window is not None:
            return LeastLoaded().choose(request, replicas)
        index, scope = kv.prefix_cache, cache_scope(request.shape.tenant, None, "")
        # All replicas have the same root, so one chain of keys serves for all.
        chain = index.chain(scope, index.full_blocks(request.prompt_token_ids(), scope))
        size, most = kv.spec.block_size, (tokens - 1) // kv.spec.block_size
        found = {
            replica: replica.server.kv.prefix_cache.leading(0, chain, most) for replica in self._candidates(chain, most)
        }
        shared = {replica: size * _num_in_use(replica, blocks) for replica, blocks in found.items()}

        def cached(replica: Replica) -> int:
            return size * len(found.get(replica, ()))

        def cost(replica: Replica) -> int:
            return replica.load - cached(replica) - shared.get(replica, 0)

        lightest = min(replica.load for replica in replicas)
        idlest = [replica for replica in replicas if replica.load == lightest]
        candidates = dict.fromkeys((*idlest, *(each for each in found if each in replicas)))
        least = min(map(cost, candidates))
        chosen = self._ties.choice([replica for replica in candidates if cost(replica) == least])
        for depth in _depths(most):
            self._sent.setdefault(chain.key(depth), {})[chosen.place] = chosen
        holder = max(found, key=cached, default=chosen)
        has_more = cached(holder) > cached(chosen)
        return Destination(chosen, cached(chosen), shared.get(chosen, 0), holder if has_more else None)

    def _candidates(self, chain: TokenChain, most: int) -> Iterable[Replica]:
        """Return the replicas that may have some of a prompt, those that may have most first."""
        found: dict[int, Replica] = {}
        for depth in reversed(_depths(most)):
            more = [each for place, each in self._sent.get(chain.key(depth), {}).items() if place not in found]
            if len(more) > _MOST_EXAMINED:
                more = heapq.nsmallest(_MOST_EXAMINED, more, key=lambda replica: replica.load)
            found.update((replica.place, replica) for replica in more)
        return found.values()


def _num_in_use(replica: Replica, blocks: BlockTable) -> int:
    """Return how many of a prefix's blocks requests use: these come first, as a block's user has those before it."""
    references = replica.server.kv.pool.blocks.references
    return bisect_left(blocks, True, key=lambda block: references[block] == 0)


def _depths(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


ROUTERS: dict[str, Callable[[int], SimulatedRouter]] = {
    "prefix": LongestPrefix,
    "least_loaded": lambda seed: LeastLoaded(),
    "round_robin": lambda seed: _RoundRobin(),
}
"""Makers of routers, given a seed."""


class Fleet:
    """One run of several servers with given traffic.

    Args:
        tenants, give_up: see `Simulation`.
        num_prefill: how many of the servers, the first ones, compute long prompts for the others.
    """

    def __init__(
        self,
        servers: Sequence[SimulatedServer],
        traffic: Traffic,
        router: str,
        tenants: Tenants | None = None,
        give_up: Callable[[Results], bool] | None = None,
        num_prefill: int = 0,
    ) -> None:
        self.results = Results(router=router)
        self._router = ROUTERS[router](servers[0].seed)
        self._traffic = traffic
        self._give_up = give_up
        self._replicas = [Replica(place, server, self._report) for place, server in enumerate(servers)]
        self._for_prompts, self._for_answers = self._replicas[:num_prefill], self._replicas[num_prefill:]
        self._simulations = [
            Simulation(replica.server, replica, tenants, results=self.results, on_first_token=replica.began)
            for replica in self._replicas
        ]
        # When the last of the next steps of each server with work begins; entries of former turns do not count.
        self._busy: list[tuple[float, int, int]] = []
        self._turns = [0] * len(servers)
        # First tokens and ends that the router has not seen: when, in which order, where, and whether it is an end.
        self._reports: list[tuple[float, int, Replica, SimulatedRequest, bool]] = []
        # Requests whose prompts are being computed, and those whose prompts were: when, in which order, and where to.
        self._apart: dict[int, tuple[SimulatedRequest, Replica, Replica]] = {}
        self._handed: list[tuple[float, int, SimulatedRequest, Replica]] = []
        self._numbers = itertools.count()

    def run(self) -> Results:
        """Run until all requests have ended; raises like `Simulation.run`."""
        began, results = time.perf_counter(), self.results
        with rare_collections():
            self._run()
        for simulation in self._simulations:
            simulation.add_totals()
        results.per_replica = [replica.num_requests for replica in self._replicas]
        results.wall_s = time.perf_counter() - began
        return results

    def _run(self) -> None:
        steps = 0
        while True:
            arrives, handed = self._traffic.due(), self._handed[0][0] if self._handed else None
            due = min((at for at in (arrives, handed) if at is not None), default=None)
            if due is not None and (not self._busy or due <= self._busy[0][0]):
                if due == handed:
                    _, _, request, replica = heapq.heappop(self._handed)
                    self._deliver(request, Destination(replica), due)
                else:
                    self._route(self._traffic.take())
                continue
            if not self._busy:
                return
            _, place, turn = heapq.heappop(self._busy)
            if turn != self._turns[place]:
                continue
            self._simulations[place].advance()
            self._settle(self._replicas[place])
            if self._give_up is not None and self.results.steps != steps and self._give_up(self.results):
                self.results.unstable = True
                return
            steps = self.results.steps

    def _route(self, request: SimulatedRequest) -> None:
        while self._reports and self._reports[0][0] <= request.arrival_s:
            _, _, replica, seen, has_ended = heapq.heappop(self._reports)
            replica.seen(seen, has_ended=has_ended)
        shape = clip(request.shape, self._replicas[0].server.scheduler.config.max_model_len)
        if shape is not request.shape:
            request = replace(request, shape=shape)
            self.results.clipped += 1
        choice = self._router.choose(request, self._for_answers)
        if self._for_prompts and shape.prompt_tokens - choice.cached >= PREFILL_TOKENS:
            own = self._router.choose(request, self._for_prompts)
            if shape.prompt_tokens - own.cached >= PREFILL_TOKENS:
                prompt = replace(request, shape=shape._replace(output_tokens=1), stage=PREFILL)
                prompt = self._deliver(prompt, own, request.arrival_s)
                self._apart[id(prompt)] = request, choice.replica, own.replica
                return
            choice = choice._replace(holder=own.replica)
        self._deliver(request, choice, request.arrival_s)

    def _deliver(self, request: SimulatedRequest, choice: Destination, at: float) -> SimulatedRequest:
        """Send a request, and return it with its hint."""
        replica, simulation = choice.replica, self._simulations[choice.replica.place]
        while replica.num_unfinished and replica.server.clock.now < at:
            simulation.advance(at)
        if replica.num_unfinished and replica.server.clock.now > at:
            simulation.delay(replica.server.times.per_arrival)
        if choice.holder is not None and replica.server.neighbours is not None:
            request = replace(request, kv_hint=str(choice.holder.place))
        replica.send(request, choice.cached, choice.shared, at)
        self._settle(replica)
        return request

    def _settle(self, replica: Replica) -> None:
        """Record when a server's next event is due."""
        place = replica.place
        self._turns[place] += 1
        if replica.num_unfinished:
            heapq.heappush(self._busy, (self._simulations[place].next_begins(), place, self._turns[place]))

    def _report(self, replica: Replica, request: SimulatedRequest, at: float, has_ended: bool) -> None:
        heapq.heappush(self._reports, (at, next(self._numbers), replica, request, has_ended))
        if not has_ended:
            return
        if request.stage != PREFILL:
            self._traffic.ended(request, at)
            return
        whole, replica, holder = self._apart.pop(id(request))
        handed = replace(whole, stage=DECODE, kv_hint=str(holder.place))
        heapq.heappush(self._handed, (at, next(self._numbers), handed, replica))
