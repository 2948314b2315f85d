"""Authentication: the API key of a request, its tenant, and what it may access.

A path is closed unless its endpoint is `Access.PUBLIC`: `RequireApiKey` answers every other request without a known key
with a 401, paths that do not exist included, and `Gate` then checks what the endpoint itself asks for.
"""

from __future__ import annotations

from collections.abc import Set
from http import HTTPStatus

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.apis import path_of
from octavo.server.errors import ApiError
from octavo.server.route import Access
from octavo.server.tenants.keys import ANYBODY, Client, KeyRing


def presented_key(scope: Scope) -> str | None:
    """Return the key of a request: `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic)."""
    authorization = api_key = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            authorization = value.decode("utf-8", "replace")
        elif name == b"x-api-key":
            api_key = value.decode("utf-8", "replace").strip()
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and (key := key.strip()):
        return str(key)
    return api_key or None


def client_of(scope: Scope) -> Client:
    """Return the client that `RequireApiKey` identified, or the anonymous client if no key is required."""
    client = scope.get("state", {}).get("client", ANYBODY)
    assert isinstance(client, Client)
    return client


class RequireApiKey:
    """Middleware that requires a known key on every path that is not public; stores its client in `scope["state"]`.

    The admin key passes too. It is no client's, and opens only what `Gate` lets it.

    Args:
        clients: keys of clients.
        admins: the same keys and the admin key.
        routers: the router's key, which passes like the admin key.
        public: methods and paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, clients: KeyRing, admins: KeyRing, routers: KeyRing, public: Set[tuple[str, str]]
    ) -> None:
        self._app = app
        self._routers = routers
        self._clients = clients
        self._admins = admins
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], path_of(scope)) not in self._public:
            try:
                self._identify(scope)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> None:
        key = presented_key(scope)
        if key is not None and (client := self._clients.find(key)) is not None:
            scope.setdefault("state", {})["client"] = client
        elif key is None or self._routers.find(key) is None:
            authenticated(self._admins, scope)


class Gate:
    """Decides whether a request may use an endpoint, by the endpoint's `Access`.

    Args:
        clients: keys of clients.
        admins: the same keys and the admin key; only their clients with `admin` set are operators.
        routers: the router's key.
    """

    def __init__(self, clients: KeyRing, admins: KeyRing, routers: KeyRing) -> None:
        self._clients = clients
        self._admins = admins
        self._routers = routers

    def check(self, access: Access, scope: Scope) -> None:
        """Raise `ApiError` if the request's key does not open such an endpoint (401), or no key could (403)."""
        if access is Access.CLIENT and self._clients and "client" not in scope.get("state", {}):
            raise incorrect_key()
        if access is Access.ROUTER:
            self._check_router(scope)
        if access is Access.ADMIN or (access is Access.OPERATOR and self._admins):
            self._check_admin(scope)

    def admits_admin(self, request: Request) -> bool:
        """Return whether the request carries an admin key."""
        key = presented_key(request.scope)
        client = None if key is None else self._admins.find(key)
        return client is not None and client.admin

    def admits_operator(self, request: Request) -> bool:
        """Return whether the request may use what is `Access.OPERATOR`."""
        return not self._admins or self.admits_admin(request)

    def _check_router(self, scope: Scope) -> None:
        if not self._routers:
            message = "This server has no router key: start it with --router-key or OCTAVO_ROUTER_KEY."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_router_key")
        authenticated(self._routers, scope)

    def _check_admin(self, scope: Scope) -> None:
        if not any(client.admin for client in self._admins.clients):
            message = (
                "This server has no admin key: start it with --admin-key, OCTAVO_ADMIN_KEY, or a tenant with admin = "
                "true in --keys-file, to use this."
            )
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_admin_key")
        if not authenticated(self._admins, scope).admin:
            raise incorrect_key()


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
