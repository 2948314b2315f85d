"""The events of a server's live page, as `octavo top` reads them."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from octavo.errors import ConfigError, OctavoError

# Seconds without a byte; a server that does nothing sends an event every two.
_TIMEOUT_S = 30
_KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class LiveServer:
    """A server whose live page is read.

    Args:
        url: the server's URL, as in http://127.0.0.1:8000.
        key: an admin key, if the server has keys.

    Raises:
        ConfigError: no server has such a URL or such a key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise ConfigError("the admin key must be printable ASCII characters without spaces")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            parts = urlsplit(url)
            self._kind: type[http.client.HTTPConnection] = _KINDS[parts.scheme]
            # Given without one, http.client would look for the port in the address, and find one in [::1].
            self._port = self._kind.default_port if parts.port is None else parts.port
            self._host = parts.hostname or ""
            if not self._host.encode("idna"):
                raise ValueError("no host")
            self._connection()
        except (ValueError, KeyError, http.client.InvalidURL) as error:
            raise ConfigError(f"{url!r} is not the URL of a server: write http://127.0.0.1:8000") from error
        self._path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~") + "/live/events"

    def events(self, *, again: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the server's events, until the connection ends.

        Args:
            again: whether it has been connected before. A server that restarts, or a proxy in front of it, answers 429
                or 5xx for a while; without this, that is a refusal.

        Raises:
            OctavoError: the server refuses the request; the message has its reason.
            OSError: the connection could not be made, or it broke.
        """
        connection = self._connection()
        try:
            connection.request("GET", self._path, headers=self._headers)
            # Closed here, because a connection forgets an answer that lasts until its end.
            with connection.getresponse() as answer:
                if answer.status != 200 or answer.headers.get_content_type() != "text/event-stream":
                    raise self._refusal(answer.status, _message(answer.read()), again)
                yield from _events(answer)
        except http.client.HTTPException as error:
            raise ConnectionError(f"no valid answer: {error!r}") from error
        finally:
            connection.close()

    def _refusal(self, status: int, reason: str | None, again: bool) -> Exception:
        if again and (status == 429 or status >= 500):
            return ConnectionError(f"it answers {status}" + (f": {reason}" if reason else ""))
        hint = " (--admin-key, or $OCTAVO_ADMIN_KEY)" if status == 401 else ""
        reason = reason or "it is not an Octavo server, or an old version"
        return OctavoError(f"{self.url} answers {status}: {reason}{hint}")

    def _connection(self) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=_TIMEOUT_S)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := answer.readline():
        if not line.startswith(b"data: "):
            continue
        text = line.removeprefix(b"data: ").strip()
        if text == b"[DONE]":
            return
        try:
            news = json.loads(text)
        except ValueError as error:
            raise ConnectionError("it broke within an event") from error
        if "error" in news:
            raise ConnectionError(f"the server ended it: {_message(text) or news['error']}")
        if news.get("displaced"):
            raise OctavoError("another page was opened: the server serves 8 at once")
        yield news


def _message(body: bytes) -> str | None:
    """Return the message of an error in the form of the OpenAI API; None if it has another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
