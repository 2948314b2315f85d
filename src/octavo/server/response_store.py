"""Responses that later ones may go on from, by tenant, in bounded memory.

Each tenant has its own: the id of another's is not known here. What is too much makes room: of the tenant that is over
its share the oldest, of all together the oldest of whoever holds most. Nothing survives a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# Beside the bytes of a stored response: its keys and objects.
_OVERHEAD = 512


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: its object, as JSON.
        items: all input and output items up to its end, as the inside of a JSON list.
    """

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD


class ResponseStore:
    """Used only from the event loop.

    Args:
        most: bytes of all responses.
        most_of_tenant: bytes of one tenant's.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = min(most, most_of_tenant)
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response; one that is larger than a tenant's share is not kept."""
        if stored.size > self._most_of_tenant:
            return
        self._tenants.setdefault(tenant, OrderedDict())[response_id] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        self.size += stored.size
        while self._sizes[tenant] > self._most_of_tenant:
            self._drop_oldest(tenant)
        while self.size > self._most:
            self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of the tenant's own; None if it has none such, or no longer."""
        responses = self._tenants.get(tenant)
        return None if responses is None else responses.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False if there is none such."""
        if self.get(tenant, response_id) is None:
            return False
        self._drop(tenant, response_id)
        return True

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, response_id: str) -> None:
        stored = self._tenants[tenant].pop(response_id)
        self._sizes[tenant] -= stored.size
        self.size -= stored.size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._sizes[tenant]
