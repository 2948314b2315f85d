"""What is said of fields that were ignored: a header of the answer names them, and the log, each once."""

from __future__ import annotations

import logging
from typing import TypeVar

from starlette.responses import Response

from octavo.errors import shown
from octavo.server.foreign_fields import header_value
from octavo.server.protocol import RequestBody

logger = logging.getLogger("octavo.server")

IGNORED_HEADER = "X-Octavo-Ignored-Fields"
# Names that are logged, each once: whoever sends ever new ones fills no log.
MAX_LOGGED = 256

AnyResponse = TypeVar("AnyResponse", bound=Response)


class IgnoredFields:
    """Tells clients and the log of ignored fields."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def told(self, body: RequestBody, response: AnyResponse) -> AnyResponse:
        """The same response, with a header where fields of its request's body were ignored."""
        if body.ignored:
            response.headers[IGNORED_HEADER] = header_value(body.ignored)
            for name in body.ignored:
                self._log(name)
        return response

    def _log(self, name: str) -> None:
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        logger.warning("requests carry the field %s, which is ignored (--strict-requests refuses it)", shown(name))
        if len(self._logged) == MAX_LOGGED:
            logger.warning("%d fields have been ignored: further ones are not logged", MAX_LOGGED)
