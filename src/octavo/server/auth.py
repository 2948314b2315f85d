"""API keys: who may ask, and to whom the work is accounted."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError

# Everything that makes the server work for a client, or tells what it serves. Probes stay open.
_GUARDED = ("/v1", "/tokenize", "/detokenize")


def tenant_of(api_key: str) -> str:
    """A short name for the key's holder: stable across restarts, and the key cannot be read back from it."""
    return hashlib.blake2b(api_key.encode(), digest_size=8, person=b"octavo-tenant").hexdigest()


class ApiKeys:
    """The accepted keys. Only digests are compared, so the time taken says nothing about a key or its length."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = {_digest(key): tenant_of(key) for key in keys}

    def tenant(self, authorization: str | None) -> str:
        """The tenant whose key an `Authorization` header carries; raises `ApiError` (401) where it has none."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise _unauthorized("You didn't provide an API key: send it as the header 'Authorization: Bearer KEY'.")
        found = None
        digest = _digest(key)
        for known, tenant in self._tenants.items():
            # No early exit: which of the keys matched is nobody's business either.
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _unauthorized("Incorrect API key provided.")
        return found


class AdminKey:
    """Who may look into the server: the holder of one key, and nobody where none is set."""

    def __init__(self, key: str | None) -> None:
        self._keys = None if key is None else ApiKeys([key])

    def check(self, authorization: str | None) -> None:
        """Raises `ApiError`: 403 where the server has no admin key, 401 where the header does not carry it."""
        if self._keys is None:
            message = "This server has no admin key: start it with --admin-key or OCTAVO_ADMIN_KEY to use /debug."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="no_admin_key")
        self._keys.tenant(authorization)


class RequireApiKey:
    """Lets nothing through to the guarded paths without a key; leaves the tenant in `scope["state"]`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_guarded(scope["path"]):
            headers = dict(scope["headers"])
            authorization: bytes | None = headers.get(b"authorization")
            try:
                tenant = self._keys.tenant(None if authorization is None else authorization.decode("utf-8", "replace"))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _is_guarded(path: str) -> bool:
    return any(path == prefix or path.startswith(prefix + "/") for prefix in _GUARDED)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
