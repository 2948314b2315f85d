"""Selection of the server for a request: a contract with three implementations."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from octavo.cluster.config import RouterConfig
from octavo.cluster.workers import RoutedPrompt, Worker
from octavo.errors import require_packages
from octavo.server.apis import new_id

logger = logging.getLogger("octavo.route")

# Time limit for the index to add or remove a server, whose events it reads over a network.
_INDEX_SECONDS = 2.0


@dataclass(slots=True)
class Ticket:
    """A request's place at a server, until `Selection.done`.

    Attributes:
        selection_id: name of its reservation in an index; None if it has none.
        cached_tokens: number of the prompt's tokens known to be cached at the server.
        kv_hint: address of a neighbour that has more of the prompt cached; None if none is known.
    """

    worker: Worker
    selection_id: str | None = None
    cached_tokens: int = 0
    kv_hint: str | None = None


class Selection:
    """Chooses the least loaded server: the one with the fewest requests of this router in flight.

    Attributes:
        fallbacks: number of choices made without the prompt although the strategy considers it, by reason.
    """

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()

    async def add(self, worker: Worker) -> None:
        """Called when a server begins to accept requests."""

    async def remove(self, worker: Worker) -> None:
        """Called when it no longer accepts requests."""

    async def choose(self, workers: Sequence[Worker], prompt: RoutedPrompt) -> Ticket:
        """Choose one of these servers (one group, not empty), and count the request there."""
        return self._ticket(min(workers, key=lambda worker: worker.in_flight))

    def first_token(self, ticket: Ticket) -> None:
        """Called when the prompt has been computed."""

    def done(self, ticket: Ticket) -> None:
        """Called once when the request has ended, whatever the outcome."""
        ticket.worker.in_flight -= 1

    async def close(self) -> None:
        """Called once no request is left."""

    def _ticket(self, worker: Worker, selection_id: str | None = None, cached_tokens: int = 0) -> Ticket:
        worker.in_flight += 1
        return Ticket(worker, selection_id, cached_tokens)


class RoundRobin(Selection):
    """Chooses the servers in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = count()

    async def choose(self, workers: Sequence[Worker], prompt: RoutedPrompt) -> Ticket:
        ordered = sorted(workers, key=lambda worker: worker.url)
        return self._ticket(ordered[next(self._turn) % len(ordered)])


class PrefixSelection(Selection):
    """Asks Dynamo's index, which reads the servers' KV events and tracks the load of each.

    If the index cannot answer, the least loaded server is chosen.

    Raises:
        ConfigError: ai-dynamo-runtime is missing.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        os.environ.setdefault("DYN_LOG", "error")  # it logs every choice otherwise
        require_packages("strategy prefix", "route", "dynamo.llm")
        from dynamo.llm import SelectionService

        self._service: Any = SelectionService(
            indexer_threads=2,
            replica_sync_port=config.replica_sync_port,
            replica_sync_peers=list(config.replica_sync_peers) or None,
        )
        self._seconds = config.selection_timeout
        self._known: dict[int, Worker] = {}
        self._telling: set[asyncio.Future[None]] = set()  # what the index is being told of reservations

    async def add(self, worker: Worker) -> None:
        if worker.event_address("endpoint") is None:
            logger.warning(
                "%s publishes no KV events (--kv-events-config), so it is routed to by load only", worker.url
            )
            return
        try:
            await self.remove(worker)
        except Exception as error:  # of a library in another language; it is replaced all the same
            logger.warning("cannot remove %s from the index: %s", worker.url, error)
        async with asyncio.timeout(_INDEX_SECONDS):
            await self._service.upsert_worker(_record(worker))
        self._known[worker.worker_id] = worker

    async def remove(self, worker: Worker) -> None:
        # This also removes the server's blocks from the index.
        if self._known.pop(worker.worker_id, None) is not None:
            async with asyncio.timeout(_INDEX_SECONDS):
                await self._service.delete_worker(worker.worker_id)

    async def choose(self, workers: Sequence[Worker], prompt: RoutedPrompt) -> Ticket:
        if not prompt.token_ids or not any(worker.worker_id in self._known for worker in workers):
            self.fallbacks["no_events" if prompt.token_ids else "no_tokens"] += 1
            return await super().choose(workers, prompt)
        selection_id = new_id("route")
        asked: dict[str, Any] = {
            "model_name": workers[0].group,
            "selection_id": selection_id,
            "token_ids": list(prompt.token_ids),
            "cache_salt": prompt.scope or None,
            "allowed_worker_ids": [worker.worker_id for worker in workers if worker.worker_id in self._known],
        }
        try:
            async with asyncio.timeout(self._seconds):
                chosen = await self._service.select_and_reserve(asked)
                hint = await self._hint(asked, chosen["worker_id"])
        except asyncio.CancelledError:
            self._tell(self._service.free_reservation, selection_id)
            raise
        except Exception as error:  # of a library in another language; the request goes on without it
            self._tell(self._service.free_reservation, selection_id)
            self.fallbacks["timeout" if isinstance(error, TimeoutError) else "index_error"] += 1
            logger.warning("the index could not choose a server: %s", error)
            return await super().choose(workers, prompt)
        worker = self._known.get(chosen["worker_id"])
        if worker not in workers:  # it was lost while the index chose
            self.fallbacks["excluded"] += 1
            self._tell(self._service.free_reservation, selection_id)
            return await super().choose(workers, prompt)
        assert worker is not None
        ticket = self._ticket(worker, selection_id, chosen["overlap"]["longest_matched"])
        ticket.kv_hint = hint
        return ticket

    async def _hint(self, asked: dict[str, Any], worker_id: int) -> str | None:
        """Return the address of the server that has most of a prompt cached; None if the chosen one has as much."""
        addresses = {
            number: worker.neighbour_address
            for number, worker in self._known.items()
            if worker.neighbour_address is not None and (worker.is_healthy or number == worker_id)
        }
        if len(addresses) == 1 or worker_id not in addresses:
            return None
        wanted = {name: asked[name] for name in ("model_name", "token_ids", "cache_salt")}
        blocks = await self._overlaps(wanted)
        most = max(addresses, key=lambda number: blocks.get(number, 0))
        return addresses[most] if blocks.get(most, 0) > blocks.get(worker_id, 0) else None

    def first_token(self, ticket: Ticket) -> None:
        self._tell(self._service.prefill_complete, ticket.selection_id)

    def done(self, ticket: Ticket) -> None:
        super().done(ticket)
        self._tell(self._service.free_reservation, ticket.selection_id)

    async def _overlaps(self, asked: dict[str, Any]) -> dict[int, int]:
        """Return the number of a prompt's blocks on each server's device, according to the index."""
        scores = await self._service.overlap_scores(asked)
        return {score["worker_id"]: score["device_blocks"] for score in scores["workers"]}

    def num_reserved(self) -> int:
        """Return the number of requests that the index counts at servers."""
        return sum(load["active_requests"] for group in self._service.loads() for load in group["loads"])

    async def close(self) -> None:
        await self.settled()
        self._service.shutdown()

    async def settled(self) -> None:
        """Wait until the index knows of everything that has ended."""
        await asyncio.gather(*self._telling, return_exceptions=True)

    def _tell(self, call: Callable[[str], asyncio.Future[None]], selection_id: str | None) -> None:
        """Tell the index of a change of a reservation, without waiting for it."""
        if selection_id is not None:
            self._telling.add(told := call(selection_id))
            told.add_done_callback(self._told)

    def _told(self, told: asyncio.Future[None]) -> None:
        self._telling.discard(told)
        if not told.cancelled() and (error := told.exception()) is not None:
            # It was never made, or its server has gone.
            logger.debug("the index has not changed a reservation: %s", error)


def _record(worker: Worker) -> dict[str, Any]:
    """Return the record of a server for the index."""
    facts = worker.facts
    return {
        "worker_id": worker.worker_id,
        "model_name": worker.group,
        "endpoint": worker.url,
        "block_size": facts["block_size"],
        "total_kv_blocks": facts["num_blocks"],
        "max_num_batched_tokens": facts["max_num_batched_tokens"],
        "kv_events_endpoints": {0: worker.event_address("endpoint")},
        "replay_endpoint": worker.event_address("replay_endpoint"),
    }


def make_selection(config: RouterConfig) -> Selection:
    if config.strategy == "prefix":
        return PrefixSelection(config)
    return RoundRobin() if config.strategy == "round_robin" else Selection()
