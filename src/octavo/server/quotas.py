"""Limits and counts of each tenant's use: requests and tokens per minute, and concurrent requests.

A rate is a token bucket: it holds a minute's worth and fills evenly. Tokens are charged when they are known, a prompt's
before it is queued and an output's when its request ends, and may run the bucket into debt: further requests are
refused until the debt is paid. So no request is too large to be served, and in the long run no tenant exceeds its rate.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.access import client_of
from octavo.server.errors import RATE_LIMITED, ApiError
from octavo.server.keys import Client

if TYPE_CHECKING:
    from octavo.server.answers.generation import Usage

# Maximum number of tenants whose use is shown by name; a keys file that is often reread may name more over time.
MAX_SHOWN_TENANTS = 256
OTHERS = "other"
# Why a request was refused: its tenant is over its rate or concurrency, its tenant's queue is full, or the server's is.
OVER_RATE, QUEUE_FULL, SERVER_FULL = "rate", "queue", "server"
_REFUSALS = {HTTPStatus.TOO_MANY_REQUESTS: QUEUE_FULL, HTTPStatus.SERVICE_UNAVAILABLE: SERVER_FULL}


class Bucket:
    """A token bucket: at most one minute's worth, filled evenly; it may be in debt."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds `amount`, or is full if it cannot hold that much; 0 if it does."""
        self._fill(now)
        return max(0.0, (min(amount, self.per_minute) - self._level) * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now


@dataclass(slots=True)
class TenantUse:
    """A tenant's use since the server's start, and its running requests."""

    running: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def bucket(self, what: str, per_minute: float | None, now: float) -> Bucket | None:
        """Return the bucket of requests or tokens, a new one if the rate has changed; None without a rate."""
        if per_minute is None:
            self.buckets.pop(what, None)
            return None
        bucket = self.buckets.get(what)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self.buckets[what] = Bucket(per_minute, now)
        return bucket

    def merge(self, other: TenantUse) -> None:
        """Add the counts of another tenant to these."""
        for name in ("running", "requests", "prompt_tokens", "cached_tokens", "completion_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refused.update(other.refused)


class Charge:
    """One request of a tenant, from its header to the end of its answer.

    Attributes:
        spent: the request's tokens so far; None until its prompt is known.
    """

    def __init__(self, use: TenantUse, client: Client, clock: Callable[[], float]) -> None:
        self._use = use
        self._client = client
        self._clock = clock
        self.spent: Usage | None = None

    def begin(self, spent: Usage) -> None:
        """Charge the prompt's tokens, once the prompt is known; the output's tokens are charged at the end."""
        self.spent = spent
        self._use.prompt_tokens += spent.prompt_tokens
        self._take(spent.prompt_tokens)

    def end(self) -> None:
        """Charge the output's tokens and end the request, however it ended."""
        self._use.running -= 1
        if self.spent is not None:
            self._use.completion_tokens += self.spent.completion_tokens
            self._use.cached_tokens += self.spent.cached_tokens
            self._take(self.spent.completion_tokens)

    def refuse(self, reason: str) -> None:
        """Count the refusal of a request that was admitted but then found the queue full."""
        self._use.refused[reason] += 1

    def _take(self, tokens: int) -> None:
        now = self._clock()
        if (bucket := self._use.bucket("tokens", self._client.tokens_per_minute, now)) is not None:
            bucket.take(tokens, now)


class Quotas:
    """The use of every tenant. Limits are read from the requesting client, so that a reread keys file applies at once.

    Args:
        clock: a monotonic clock, in seconds.
        max_requests: how many requests a tenant without a `max_concurrency` may have at once, so that it cannot take
            all connections; None for any number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_requests: int | None = None) -> None:
        self._clock = clock
        self._max_requests = max_requests
        self._uses: dict[str, TenantUse] = {}
        self._shown: set[str] = set()

    def enter(self, client: Client) -> Charge:
        """Admit a request; `Charge.end` must be called when it ends.

        Raises:
            ApiError: the tenant is over a limit; the message has the number, and `Retry-After` the time to wait.
        """
        use = self._use(client)
        now = self._clock()
        try:
            self._check(client, use, now)
        except ApiError:
            use.refused[OVER_RATE] += 1
            raise
        use.running += 1
        use.requests += 1
        if (requests := use.bucket("requests", client.requests_per_minute, now)) is not None:
            requests.take(1, now)
        return Charge(use, client, self._clock)

    def shown_name(self, tenant: str) -> str:
        """Return the name under which a tenant is shown: its own, or `OTHERS`."""
        return tenant if tenant in self._shown else OTHERS

    def show(self, tenant: str) -> str:
        """Return `shown_name` of a tenant that the operator named, after reserving a name for it if one is left."""
        if len(self._shown) < MAX_SHOWN_TENANTS:
            self._shown.add(tenant)
        return self.shown_name(tenant)

    def shown(self) -> dict[str, TenantUse]:
        """Return the use of each tenant by name, of at most `MAX_SHOWN_TENANTS`; the rest is summed as `OTHERS`."""
        shown: dict[str, TenantUse] = {}
        for tenant, use in list(self._uses.items()):
            shown.setdefault(self.shown_name(tenant), TenantUse()).merge(use)
        return shown

    def _check(self, client: Client, use: TenantUse, now: float) -> None:
        most = self._max_requests if client.max_concurrency is None else client.max_concurrency
        if most is not None and use.running >= most:
            message = f"This API key's tenant has {use.running} requests running, the most it may have at once."
            raise RATE_LIMITED(message)
        for what, per_minute in (("requests", client.requests_per_minute), ("tokens", client.tokens_per_minute)):
            bucket = use.bucket(what, per_minute, now)
            # For one token only: a tenant that is out of debt may send a request of any size.
            if bucket is not None and (wait := bucket.seconds_until(1.0, now)) > 0:
                message = f"This API key's tenant is over its rate of {per_minute:g} {what} per minute."
                raise RATE_LIMITED(message, wait=wait)

    def _use(self, client: Client) -> TenantUse:
        use = self._uses.get(client.tenant)
        if use is None:
            use = self._uses[client.tenant] = TenantUse()
            if len(self._shown) < MAX_SHOWN_TENANTS:
                self._shown.add(client.tenant)
        return use


class Metered:
    """Middleware of a path with work for clients: applies tenants' limits; stores the `Charge` in `scope["state"]`."""

    def __init__(self, app: ASGIApp, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        charge = self._quotas.enter(client_of(scope))
        scope.setdefault("state", {})["charge"] = charge

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start" and (reason := _REFUSALS.get(message["status"])):
                charge.refuse(reason)
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            charge.end()


def charge_of(scope: Scope) -> Charge:
    """Return the charge of a request that `Metered` let in."""
    charge = scope["state"]["charge"]
    assert isinstance(charge, Charge)
    return charge
