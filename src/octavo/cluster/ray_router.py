"""Ray Serve's request router over the selection of `octavo route`. Ray calls this API alpha, so its version is pinned.

A request carries its prompt as the argument `prompt` (`RoutedPrompt`); a replica describes itself, with the address of
its events, as its routing statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from octavo.cluster.config import RouterConfig
from octavo.cluster.connections import Connections
from octavo.cluster.selection import Ticket, make_selection
from octavo.cluster.workers import RoutedPrompt, Worker


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types
    """Sends each request to the replica that `make_selection` chooses, and to any other if that one is full."""

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray with `request_router_kwargs`: options of `RouterConfig`."""
        self._selection = make_selection(RouterConfig(accept_workers=True, **options))
        self._workers: dict[ReplicaID, Worker] = {}
        self._tickets: dict[str, Ticket] = {}

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        await self._follow(candidate_replicas)
        workers = self._workers
        known = {workers[each.replica_id]: each for each in candidate_replicas if each.replica_id in workers}
        if pending_request is None or not known:
            return [list(candidate_replicas)]
        request_id = pending_request.metadata.internal_request_id
        self.on_request_completed(None, request_id)  # of a choice before, if the replica was full
        prompt = pending_request.kwargs.get("prompt") or RoutedPrompt((), "")
        self._tickets[request_id] = ticket = await self._selection.choose(list(known), prompt)
        chosen = known[ticket.worker]
        return [[chosen], [each for each in candidate_replicas if each is not chosen]]

    def on_request_completed(self, replica_id: ReplicaID | None, internal_request_id: str) -> None:
        if (ticket := self._tickets.pop(internal_request_id, None)) is not None:
            self._event_loop.call_soon_threadsafe(self._selection.done, ticket)

    async def _follow(self, replicas: Sequence[RunningReplica]) -> None:
        """Add replicas that have described themselves, and remove those that no longer exist."""
        present = {each.replica_id: each.routing_stats for each in replicas if each.routing_stats}
        for replica_id in self._workers.keys() - present.keys():
            await self._selection.remove(self._workers.pop(replica_id))
        for replica_id in present.keys() - self._workers.keys():
            facts = present[replica_id]
            self._workers[replica_id] = worker = Worker(facts["url"], Connections(facts["url"]), facts, is_healthy=True)
            await self._selection.add(worker)
