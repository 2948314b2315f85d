"""Authentication: the API key of a request, its tenant, and what it may access."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError
from octavo.server.paths import LLAMACPP_PATHS, is_under, path_of
from octavo.server.tenants.keys import ANYBODY, Client, KeyRing

# Paths that need a key: all that make the server work for a client or reveal what it serves. Probes stay open.
_GUARDED = ("/v1", "/api", "/tokenize", "/detokenize", *LLAMACPP_PATHS)


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
    """Middleware that requires a key on the guarded paths; stores the client in `scope["state"]`."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_guarded(scope):
            try:
                client = authenticated(self._keys, scope)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)


class AdminAccess:
    """Access control for the admin endpoints: only requests with an admin key pass, and none if no key is configured.

    Args:
        keys: the keys of clients and admins; only clients with `admin` set are admitted.
    """

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def check(self, request: Request) -> None:
        """Raise `ApiError` if the server has no admin key (403) or the request does not carry one (401)."""
        if not any(client.admin for client in self._keys.clients):
            message = (
                "This server has no admin key: start it with --admin-key, OCTAVO_ADMIN_KEY, or a tenant with admin = "
                "true in --keys-file, to use this."
            )
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_admin_key")
        if not authenticated(self._keys, request.scope).admin:
            raise incorrect_key()

    def admits(self, request: Request) -> bool:
        """Return whether the request carries an admin key."""
        key = presented_key(request.scope)
        client = None if key is None else self._keys.find(key)
        return client is not None and client.admin


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


def is_guarded(scope: Scope) -> bool:
    """Return whether a request makes the server work for a client or asks what it serves."""
    path = path_of(scope)
    return any(is_under(path, prefix) for prefix in _GUARDED)


def _unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
