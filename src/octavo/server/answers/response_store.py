"""Stored responses that later requests may continue, by tenant, in bounded memory.

Each tenant sees only its own responses. If a tenant exceeds its share, its oldest responses are dropped; if all
together exceed the limit, the oldest of the tenant that holds the most. Nothing survives a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# Estimated bytes of a stored response's keys and objects, in addition to its contents.
_OVERHEAD = 512


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One stored response.

    Attributes:
        response: the response object, as JSON.
        items: all input and output items up to the end of the response, as the inside of a JSON list.
        input_size: number of bytes of `items` that are input items.
    """

    response: bytes
    items: bytes
    input_size: int = 0

    @property
    def input_items(self) -> bytes:
        return self.items[: self.input_size]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD


class ResponseStore:
    """Stores responses by tenant. Used only from the event loop.

    Args:
        most: maximum total size of all responses in bytes.
        most_of_tenant: maximum total size of one tenant's responses in bytes.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = min(most, most_of_tenant)
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it is larger than a tenant's share."""
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
        """Return one of the tenant's own responses, or None if it has none with that id (any more)."""
        responses = self._tenants.get(tenant)
        return None if responses is None else responses.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; returns False if there is none with that id."""
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
