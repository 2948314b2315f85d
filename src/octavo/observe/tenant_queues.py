"""Counts each tenant's requests that wait for their first step, and their prompt tokens."""

from __future__ import annotations

import threading
from typing import NamedTuple

from octavo.errors import TenantOverloadedError
from octavo.request import Request, RequestId


class Waiting(NamedTuple):
    """The waiting requests of one tenant."""

    requests: int = 0
    tokens: int = 0


class TenantQueues:
    """Waiting requests by tenant. Any thread may call any method: one queues requests, another admits them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}
        self._entered: dict[RequestId, tuple[str, int, float]] = {}  # tenant, tokens, arrival

    def enter(self, request: Request) -> None:
        """Add a request that starts to wait."""
        tenant, tokens = request.tenant, len(request.prompt_token_ids)
        with self._lock:
            self._entered[request.request_id] = (tenant, tokens, request.arrival_time)
            self._add(tenant, 1, tokens)

    def leave(self, request_id: RequestId) -> None:
        """Remove a request that was admitted or has ended; does nothing if it is not waiting."""
        with self._lock:
            if (entered := self._entered.pop(request_id, None)) is not None:
                tenant, tokens, _ = entered
                self._add(tenant, -1, -tokens)

    def of(self, tenant: str) -> Waiting:
        return self._waiting.get(tenant, Waiting())

    def snapshot(self) -> dict[str, Waiting]:
        """Return the waiting requests of each tenant that has any."""
        with self._lock:
            return dict(self._waiting)

    def oldest_age(self, now: float) -> float:
        """Return the seconds that the oldest waiting request has waited at `now` (monotonic clock); 0 if none waits."""
        with self._lock:
            # The first one is the oldest, because dictionaries keep the order of insertion.
            for _, _, arrival in self._entered.values():
                return max(0.0, now - arrival)
        return 0.0

    def check_room(self, tenant: str, num_tokens: int, *, most_requests: int, most_tokens: int) -> None:
        """Check that a tenant may queue another prompt of `num_tokens`.

        Raises:
            TenantOverloadedError: the tenant's queue is full; the message names what is waiting, and the limit.
        """
        waiting = self.of(tenant)
        if waiting.requests >= most_requests:
            raise TenantOverloadedError(
                f"{waiting.requests} requests of this API key's tenant are waiting, and no more than {most_requests} "
                "may: try again later"
            )
        if waiting.requests and waiting.tokens + num_tokens > most_tokens:
            raise TenantOverloadedError(
                f"{waiting.tokens} prompt tokens of this API key's tenant are waiting, and this request's {num_tokens} "
                f"would make it more than {most_tokens}: try again later"
            )

    def _add(self, tenant: str, requests: int, tokens: int) -> None:
        before = self.of(tenant)
        after = Waiting(before.requests + requests, before.tokens + tokens)
        if after.requests:
            self._waiting[tenant] = after
        else:
            self._waiting.pop(tenant, None)
