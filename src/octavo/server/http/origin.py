"""Protects a server without API keys from requests made by web pages.

Any page can make its reader's browser send requests to 127.0.0.1, and by DNS rebinding (a domain of the page that
resolves to 127.0.0.1) even read the answers. Three headers distinguish such requests from a program's:

    Host           names the page's own domain after rebinding: only this server's names and IP addresses are served
    Origin         sent by browsers with every POST from a page: only this server's own and allowed pages are served
    Content-Type   a page may send application/json to another origin only after a preflight, which is not granted here

Ollama's documentation has clients that send no such Content-Type (`curl -d`). On its paths, a form's is taken too where
the request has none of the headers by which browsers say that a page sent it (`Origin`, `Referer`, `Sec-Fetch-*`).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.apis import OLLAMA, api_of
from octavo.server.errors import ApiError

ANY = "*"
_OF_PAGES = (b"origin", b"referer")


class RefuseWebPages:
    """Middleware that refuses requests that a web page of another origin made a browser send.

    Args:
        hosts: allowed host names besides IP addresses, `localhost` and the machine's own name; `*` allows any.
        origins: origins whose pages may use the server, such as `https://chat.example`; `*` allows any.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._app = app
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "").lower()
        if host and ANY not in self._hosts and not self._is_own(host_name(host)):
            message = "Host header not allowed; add it with --allowed-hosts."
            raise ApiError(HTTPStatus.MISDIRECTED_REQUEST, message, code="host_not_allowed")
        origin = headers.get(b"origin", "").lower()
        if origin and not self._allows(origin, host):
            message = "Pages of this origin may not use this server; --allowed-origins adds origins."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")
        if scope["method"] == "POST" and not self._is_program(scope, headers):
            message = "Send the body as 'Content-Type: application/json': without API keys this server takes no other."
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")

    @staticmethod
    def _is_program(scope: Scope, headers: Mapping[bytes, str]) -> bool:
        given = headers.get(b"content-type", "")
        if _is_json(given):
            return True
        by_page = any(name in _OF_PAGES or name.startswith(b"sec-fetch-") for name in headers)
        return api_of(scope) is OLLAMA and not by_page and given in ("", "application/x-www-form-urlencoded")

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
