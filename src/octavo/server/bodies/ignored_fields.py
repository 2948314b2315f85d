"""Reports ignored request fields in a response header and, each name once, in the log."""

from __future__ import annotations

import logging
from typing import TypeVar

from starlette.responses import Response

from octavo.errors import shown
from octavo.server.bodies.foreign_fields import header_value
from octavo.server.bodies.protocol import OLDEST_MESSAGES, RequestBody

logger = logging.getLogger("octavo.server")

IGNORED_HEADER = "X-Octavo-Ignored-Fields"
# Maximum number of names that are logged, so that clients cannot fill the log by sending ever new ones.
MAX_LOGGED = 256

AnyResponse = TypeVar("AnyResponse", bound=Response)


class IgnoredFields:
    """Reports ignored fields to clients and in the log."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def told(self, body: RequestBody, response: AnyResponse) -> AnyResponse:
        """Return the response, with a header that names the fields of the request's body that were ignored, if any."""
        if body.ignored:
            response.headers[IGNORED_HEADER] = header_value(body.ignored)
            for name in body.ignored:
                self._log(name)
        return response

    def _log(self, name: str) -> None:
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        if name == OLDEST_MESSAGES:
            logger.warning("chats of Ollama's API are longer than the context: their oldest messages are left out")
        else:
            logger.warning("requests carry the field %s, which is ignored (--strict-requests refuses it)", shown(name))
        if len(self._logged) == MAX_LOGGED:
            logger.warning("%d fields have been ignored: further ones are not logged", MAX_LOGGED)
