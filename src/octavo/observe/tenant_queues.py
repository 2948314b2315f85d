"""Counts each tenant's requests that wait for their first step, and their prompt tokens."""

from __future__ import annotations

import threading
from typing import NamedTuple

from octavo.errors import TenantOverloadedError
from octavo.request import Request, RequestId


class Waiting(NamedTuple):
    """A number of waiting requests, and of their prompt tokens."""

    requests: int = 0
    tokens: int = 0


class TenantQueues:
    """Waiting requests by tenant. Any thread may call any method: one queues requests, another admits them.

    Attributes:
        total: the waiting requests of all tenants.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[RequestId, Request] = {}  # in order of arrival
        self._of: dict[str, Waiting] = {}
        self.total = Waiting()

    def enter(self, request: Request) -> None:
        """Add a request that starts to wait."""
        with self._lock:
            self._requests[request.request_id] = request
            self._add(request.tenant, 1, len(request.prompt_token_ids))

    def leave(self, request_id: RequestId) -> None:
        """Remove a request that was admitted or has ended; does nothing if it is not waiting."""
        with self._lock:
            if (request := self._requests.pop(request_id, None)) is not None:
                self._add(request.tenant, -1, -len(request.prompt_token_ids))

    def of(self, tenant: str) -> Waiting:
        return self._of.get(tenant, Waiting())

    def snapshot(self) -> dict[str, Waiting]:
        """Return the waiting requests of each tenant that has any."""
        with self._lock:
            return dict(self._of)

    def oldest_age(self, now: float) -> float:
        """Return the seconds that the oldest waiting request has waited at `now` (monotonic clock); 0 if none waits."""
        with self._lock:
            oldest = next(iter(self._requests.values()), None)
        return 0.0 if oldest is None else max(0.0, now - oldest.arrival_time)

    def check_room(self, tenant: str, num_tokens: int, *, most_requests: int, most_tokens: int) -> None:
        """Check that a tenant may queue another prompt of `num_tokens`.

        Raises:
            TenantOverloadedError: the tenant's queue is full; the message names what is waiting, and the limit.
        """
        waiting = self.of(tenant)
        if waiting.requests >= most_requests:
            raise TenantOverloadedError(
                f"this API key's tenant has {waiting.requests} requests waiting, and the maximum is {most_requests}: "
                "try again later"
            )
        if waiting.requests and waiting.tokens + num_tokens > most_tokens:
            raise TenantOverloadedError(
                f"this API key's tenant has {waiting.tokens} prompt tokens waiting, and this request's {num_tokens} "
                f"would exceed the maximum of {most_tokens}: try again later"
            )

    def _add(self, tenant: str, requests: int, tokens: int) -> None:
        total, own = (Waiting(n + requests, t + tokens) for n, t in (self.total, self.of(tenant)))
        self.total = total
        if own.requests:
            self._of[tenant] = own
        else:
            self._of.pop(tenant, None)
