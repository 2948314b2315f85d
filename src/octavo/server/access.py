"""The keys that a server accepts, from its options and its keys file, which can be reread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from octavo.errors import ConfigError
from octavo.scheduler.kv_limits import KVAmounts
from octavo.server.config import ServerConfig
from octavo.server.tenants.keys import Client, Digest, KeyRing, clients_of_keys, read_keys_file, sharing_all

logger = logging.getLogger("octavo.server")


class AcceptedKeys:
    """The keys of clients and of admins.

    Attributes:
        clients: keys that open the API.
        admins: the same keys and the admin key; endpoints for operators need one whose client has `admin` set.
        routers: the router's key.

    Raises:
        ConfigError: the keys file or the environment holds no usable key.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        clients = client_keys(config)
        self.clients = KeyRing(clients)
        self.admins = KeyRing(self._with_admin(clients))
        self.routers = KeyRing({} if config.router_key is None else clients_of_keys([config.router_key]))

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.clients.clients)

    @property
    def kv_amounts(self) -> KVAmounts:
        """The floors and caps of the tenants that have either."""
        return _kv_amounts(self.clients.clients)

    def reread(self, check: Callable[[KVAmounts], object] = lambda amounts: None) -> bool:
        """Reread the keys file; if it is unusable, keep the present keys and log why.

        Args:
            check: raises `ConfigError` if the tenants' floors and caps do not fit into the cache.

        Returns:
            True if there is a keys file and it was usable.
        """
        if self._config.keys_file is None:
            return False
        try:
            clients = client_keys(self._config)
            check(_kv_amounts(clients.values()))
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
            return False
        self.clients.replace(clients)
        self.admins.replace(self._with_admin(clients))
        tenants = {client.tenant for client in clients.values()}
        logger.info("reread %s: %d keys of %d tenants", self._config.keys_file, len(clients), len(tenants))
        return True

    def _with_admin(self, clients: dict[Digest, Client]) -> dict[Digest, Client]:
        admin_key = self._config.accepted_admin_key
        return clients if admin_key is None else clients | clients_of_keys([admin_key], admin=True)


def _kv_amounts(clients: Iterable[Client]) -> KVAmounts:
    limited = (client for client in clients if client.kv_floor is not None or client.kv_cap is not None)
    return {client.tenant: (client.kv_floor, client.kv_cap) for client in limited}


def client_keys(config: ServerConfig) -> dict[Digest, Client]:
    """Return the keys that clients may send, with their owners; empty if no key is required."""
    if config.keys_file is not None:
        clients = read_keys_file(config.keys_file)
    else:
        clients = clients_of_keys(config.accepted_keys)
    return sharing_all(clients) if config.shared_prefix_cache else clients
