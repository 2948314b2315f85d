"""Whose requests wait for their first step: how many, and with how many prompt tokens."""

from __future__ import annotations

import threading
from typing import NamedTuple

from octavo.errors import TenantOverloadedError
from octavo.request import Request, RequestId


class Waiting(NamedTuple):
    """What waits of one tenant."""

    requests: int = 0
    tokens: int = 0


class TenantQueues:
    """Waiting requests by tenant. Any thread may call any method: one queues requests, another admits them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}
        self._entered: dict[RequestId, tuple[str, int, float]] = {}  # tenant, tokens, arrival

    def enter(self, request: Request) -> None:
        """A request waits from now on."""
        tenant, tokens = request.tenant, len(request.prompt_token_ids)
        with self._lock:
            self._entered[request.request_id] = (tenant, tokens, request.arrival_time)
            self._add(tenant, 1, tokens)

    def leave(self, request_id: RequestId) -> None:
        """A request was admitted, or has ended; nothing if it does not wait."""
        with self._lock:
            if (entered := self._entered.pop(request_id, None)) is not None:
                tenant, tokens, _ = entered
                self._add(tenant, -1, -tokens)

    def of(self, tenant: str) -> Waiting:
        return self._waiting.get(tenant, Waiting())

    def snapshot(self) -> dict[str, Waiting]:
        """What waits of each tenant that waits."""
        with self._lock:
            return dict(self._waiting)

    def oldest_age(self, now: float) -> float:
        """Seconds that the first of those that wait has waited at `now`, on the monotonic clock; 0 if none waits."""
        with self._lock:
            # In the order of arrival, as dictionaries keep it.
            for _, _, arrival in self._entered.values():
                return max(0.0, now - arrival)
        return 0.0

    def check_room(self, tenant: str, num_tokens: int, *, most_requests: int, most_tokens: int) -> None:
        """Refuse a prompt of `num_tokens` for which the tenant has no room.

        Raises:
            TenantOverloadedError: with what waits of it, and the limit.
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
