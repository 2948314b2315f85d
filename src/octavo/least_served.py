"""Least served first: the one rule for sharing places, service, time and memory among tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class LeastServed:
    """Amounts by tenant, such as weighted service received or places held; the tenant with the least is next.

    A tenant that comes, or comes back, may start level with the others (start-time fair queueing: Goyal et al.,
    SIGCOMM 1996), so that it gets no credit for the time in which it asked for nothing.
    """

    def __init__(self) -> None:
        self._received: dict[str, float] = {}

    def __getitem__(self, tenant: str) -> float:
        return self._received.get(tenant, 0.0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._received)

    def __len__(self) -> int:
        return len(self._received)

    def charge(self, tenant: str, amount: float) -> None:
        """Add what a tenant has received; a negative amount is a refund, or was given back."""
        self._received[tenant] = self[tenant] + amount

    def arrive(self, tenant: str, others: Iterable[str], level: float = 0.0) -> float:
        """Raise a tenant to the least served of `others`, or to `level` if there are none; returns that."""
        level = min((self[other] for other in others if other != tenant), default=level)
        self._received[tenant] = max(self[tenant], level)
        return level

    def next(self, waiting: Iterable[str]) -> str | None:
        """Return the least served of these tenants, of equals the first; None if there are none."""
        return min(waiting, key=self.__getitem__, default=None)

    def forget(self, tenant: str) -> None:
        """Forget a tenant, which counts as one that has received nothing."""
        self._received.pop(tenant, None)
