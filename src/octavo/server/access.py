"""Access to the server: the keys it accepts, what each endpoint requires, and protection from web pages.

Keys come from the options and from a keys file, which can be reread. A server without keys is protected from requests
that a web page makes its reader's browser send to 127.0.0.1, or, by DNS rebinding (a domain of the page that resolves
to 127.0.0.1), even reads the answers of. Three headers distinguish such requests from a program's:

    Host           names the page's own domain after rebinding: only this server's names and IP addresses are served
    Origin         sent by browsers with every POST from a page: only this server's own and allowed pages are served
    Content-Type   a page may send application/json to another origin only after a preflight, which is not granted here

Ollama's documentation has clients that send no such Content-Type (`curl -d`). On its paths, a form's is taken too where
the request has none of the headers by which browsers say that a page sent it (`Origin`, `Referer`, `Sec-Fetch-*`).
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from octavo.errors import ConfigError
from octavo.scheduler.kv_limits import KVAmounts
from octavo.server.apis import OLLAMA, api_of
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.keys import ANYBODY, Client, Digest, KeyRing, clients_of_keys, read_keys_file, sharing_all
from octavo.server.route import Access

logger = logging.getLogger("octavo.server")


class AcceptedKeys:
    """The keys of clients, admins and routers, and what each opens.

    Attributes:
        clients: keys that open the API.
        admins: the same keys and the admin key; only their clients with `admin` set are operators.
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
        return len(self.clients) > 0

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
            logger.error("keeping the previous keys: %s", error)
            return False
        self.clients.replace(clients)
        self.admins.replace(self._with_admin(clients))
        tenants = {client.tenant for client in clients.values()}
        logger.info("reread %s: %d keys of %d tenants", self._config.keys_file, len(clients), len(tenants))
        return True

    def identify(self, scope: Scope) -> None:
        """Store the client of a request in `scope["state"]`; raise `ApiError` (401) if its key is missing or unknown.

        The admin's and the router's keys pass too. They belong to no client, and open only what `check` allows.
        """
        key = presented_key(scope)
        if key is not None and (client := self.clients.find(key)) is not None:
            scope.setdefault("state", {})["client"] = client
        elif key is None or self.routers.find(key) is None:
            authenticated(self.admins, scope)

    def check(self, access: Access, scope: Scope) -> None:
        """Raise `ApiError` if the request's key does not open such an endpoint (401), or no key could (403)."""
        if access is Access.CLIENT and self.clients and "client" not in scope.get("state", {}):
            raise incorrect_key()
        if access is Access.ROUTER:
            if not self.routers:
                message = "This server has no router key: start it with --router-key or OCTAVO_ROUTER_KEY."
                raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_router_key")
            authenticated(self.routers, scope)
        if access is Access.ADMIN or (access is Access.OPERATOR and self.admins):
            if not any(client.admin for client in self.admins.clients):
                message = (
                    "This server has no admin key: start it with --admin-key, OCTAVO_ADMIN_KEY, or a tenant with "
                    "admin = true in --keys-file, to use this."
                )
                raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_admin_key")
            if not authenticated(self.admins, scope).admin:
                raise incorrect_key()

    def admits_admin(self, request: Request) -> bool:
        """Return whether the request carries an admin key."""
        key = presented_key(request.scope)
        client = None if key is None else self.admins.find(key)
        return client is not None and client.admin

    def admits_operator(self, request: Request) -> bool:
        """Return whether the request may use what is `Access.OPERATOR`."""
        return not self.admins or self.admits_admin(request)

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


def presented_key(scope: Scope) -> str | None:
    """Return the key of a request: `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic)."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (key := key.strip()):
        return key
    return headers.get("x-api-key", "").strip() or None


def client_of(scope: Scope) -> Client:
    """Return the client that `AcceptedKeys.identify` found, or the anonymous client if no key is required."""
    client = scope.get("state", {}).get("client", ANYBODY)
    assert isinstance(client, Client)
    return client


def authenticated(keys: KeyRing, scope: Scope) -> Client:
    """Return the client whose key a request carries; raise `ApiError` (401) if the key is missing or unknown."""
    key = presented_key(scope)
    if key is None:
        raise _unauthorized("You didn't provide an API key: send it as the header 'Authorization: Bearer KEY'.")
    client = keys.find(key)
    if client is None:
        raise incorrect_key()
    return client


def incorrect_key() -> ApiError:
    return _unauthorized("Incorrect API key provided.")


def _unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


ANY = "*"
_OF_PAGES = ("origin", "referer")


class WebPages:
    """Refuses requests that a web page of another origin triggered in a browser.

    Args:
        hosts: allowed host names besides IP addresses, `localhost` and the machine's own name; `*` allows any.
        origins: origins whose pages may use the server, such as `https://chat.example`; `*` allows any.
    """

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def refuse(self, scope: Scope) -> None:
        """Raise `ApiError` for a request of such a page."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host and ANY not in self._hosts and not self._is_own(host_name(host)):
            message = "Host header not allowed; add it with --allowed-hosts."
            raise ApiError(HTTPStatus.MISDIRECTED_REQUEST, message, code="host_not_allowed")
        origin = headers.get("origin", "").lower()
        if origin and not self._allows(origin, host):
            message = "Origin not allowed; add it with --allowed-origins."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")
        if scope["method"] == "POST" and not self._is_program(scope, headers):
            message = "A server without API keys requires the header 'Content-Type: application/json'."
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")

    @staticmethod
    def _is_program(scope: Scope, headers: Mapping[str, str]) -> bool:
        given = headers.get("content-type", "")
        if _is_json(given):
            return True
        if any(name in _OF_PAGES or name.startswith("sec-fetch-") for name in headers):
            return False
        if not given and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return True  # no body to state the type of, as for most of the operator's routes
        return api_of(scope) is OLLAMA and given in ("", "application/x-www-form-urlencoded")

    def _is_own(self, name: str) -> bool:
        # An IP address cannot be rebound: the browser connected to the address in the header itself.
        return name in self._hosts or _is_address(name)

    def _allows(self, origin: str, host: str) -> bool:
        own = origin.split("://", 1)[-1] == host and origin.startswith(("http://", "https://"))
        return own or ANY in self._origins or origin in self._origins


def host_name(host: str) -> str:
    """Strip the port from a Host header: 'example:8000' -> 'example'; '[::1]:8000' -> '::1'."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return host if port and not port.startswith(":") else name
    return host.partition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"
