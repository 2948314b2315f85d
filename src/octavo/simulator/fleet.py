"""Several simulated servers behind a router, on one virtual clock.

    traffic ──> router ──> one of N simulations, each with its own cache and scheduler
                               ^
                               └── the one whose next step begins first computes it, if nothing arrives before

A router decides by what a server is like after the step that it is computing, so up to a step early, and takes no time.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.request import cache_scope
from octavo.simulator.simulation import Results, SimulatedServer, Simulation, rare_collections
from octavo.simulator.traffic import SimulatedRequest, Tenants, Traffic, clip


@dataclass(eq=False, slots=True)
class Replica:
    """One of several servers, as the router sees it; the traffic of its simulation.

    Attributes:
        sent: requests that are on their way to it.
        uncomputed: prompt tokens that it has to compute for each request without a first token, by the request's `id`.
        num_uncomputed: their sum.
        in_flight: requests that have not ended.
        num_requests: all that were ever sent there.
    """

    place: int
    server: SimulatedServer
    ended_at: Callable[[SimulatedRequest, float], None]
    sent: deque[SimulatedRequest] = field(default_factory=deque)
    uncomputed: dict[int, int] = field(default_factory=dict)
    num_uncomputed: int = 0
    in_flight: int = 0
    num_requests: int = 0

    def send(self, request: SimulatedRequest, cached: int) -> None:
        """Send a request, of whose prompt the router believes that many tokens to be cached there."""
        self.uncomputed[id(request)] = tokens = request.shape.prompt_tokens - cached
        self.num_uncomputed += tokens
        self.in_flight += 1
        self.num_requests += 1
        self.sent.append(request)

    def due(self) -> float | None:
        """See `Traffic.due`."""
        return self.sent[0].arrival_s if self.sent else None

    def take(self) -> SimulatedRequest:
        """See `Traffic.take`."""
        return self.sent.popleft()

    def began(self, request: SimulatedRequest) -> None:
        """Called when a request has its first token."""
        self.num_uncomputed -= self.uncomputed.pop(id(request), 0)

    def ended(self, request: SimulatedRequest, at: float) -> None:
        """See `Traffic.ended`."""
        self.began(request)
        self.in_flight -= 1
        self.ended_at(request, at)


_Destination = tuple[Replica, int]
"""A replica, and the tokens of the prompt that it has cached; 0 if the router does not look."""


class LeastLoaded:
    """Takes the replica with the fewest requests."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> _Destination:
        return min(replicas, key=lambda replica: replica.in_flight), 0


class _RoundRobin:
    """Takes one replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> _Destination:
        self._next += 1
        return replicas[(self._next - 1) % len(replicas)], 0


class LongestPrefix:
    """Weighs the cached part of a prompt against load as Dynamo's selection does (`octavo route`): the replica with the
    least sum of prompt blocks that it would have to compute, and of blocks that would be in use.

    Without full attention, servers publish no events, so the least loaded is taken.
    """

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> _Destination:
        kv, tokens = replicas[0].server.kv, request.shape.prompt_tokens
        if kv.spec.groups[0].sliding_window is not None:
            return LeastLoaded().choose(request, replicas)
        index, scope = kv.prefix_cache, cache_scope(request.shape.tenant, None, "")
        # All replicas have the same root, so one chain of keys serves for all.
        chain = index.chain(scope, index.full_blocks(request.prompt_token_ids(), scope))
        size = kv.spec.block_size

        def cost(choice: _Destination) -> tuple[float, int]:
            replica, cached = choice
            kv, to_compute = replica.server.kv, (tokens - cached + replica.num_uncomputed) / size
            # What it has to compute will be in use too.
            return 2 * to_compute + kv.usage * kv.pool.num_blocks, replica.in_flight

        def cached(replica: Replica) -> int:
            return size * len(replica.server.kv.prefix_cache.leading(0, chain, (tokens - 1) // size))

        return min(((replica, cached(replica)) for replica in replicas), key=cost)


ROUTERS: dict[str, Callable[[], LongestPrefix | LeastLoaded | _RoundRobin]] = {
    "prefix": LongestPrefix,
    "least_loaded": LeastLoaded,
    "round_robin": _RoundRobin,
}


class Fleet:
    """One run of several servers with given traffic.

    Args:
        router: a name of `ROUTERS`.
        tenants, give_up: see `Simulation`.
    """

    def __init__(
        self,
        servers: Sequence[SimulatedServer],
        traffic: Traffic,
        router: str,
        tenants: Tenants | None = None,
        give_up: Callable[[Results], bool] | None = None,
    ) -> None:
        self.results = Results(router=router)
        self._router = ROUTERS[router]()
        self._traffic = traffic
        self._give_up = give_up
        self._replicas = [Replica(place, server, traffic.ended) for place, server in enumerate(servers)]
        self._simulations = [
            Simulation(replica.server, replica, tenants, results=self.results, on_first_token=replica.began)
            for replica in self._replicas
        ]

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
        busy: list[tuple[float, int]] = []  # when the next step of each server with work begins
        steps = 0
        while busy or self._traffic.due() is not None:
            due = self._traffic.due()
            if due is not None and (not busy or due <= busy[0][0]):
                replica = self._send(self._traffic.take())
                if replica.in_flight == 1:
                    heapq.heappush(busy, (max(due, replica.server.clock.now), replica.place))
                continue
            _, place = heapq.heappop(busy)
            replica = self._replicas[place]
            self._simulations[place].advance()
            if replica.in_flight:
                heapq.heappush(busy, (replica.server.clock.now, place))
            if self._give_up is not None and self.results.steps != steps and self._give_up(self.results):
                self.results.unstable = True
                return
            steps = self.results.steps

    def _send(self, request: SimulatedRequest) -> Replica:
        clipped = clip(request.shape, self._replicas[0].server.scheduler.config.max_model_len)
        if clipped is not request.shape:
            request = SimulatedRequest(request.arrival_s, clipped, request.user)
            self.results.clipped += 1
        replica, cached = self._router.choose(request, self._replicas)
        if replica.in_flight and replica.server.clock.now > request.arrival_s:
            self._simulations[replica.place].delay(replica.server.times.per_arrival)
        replica.send(request, cached)
        return replica
