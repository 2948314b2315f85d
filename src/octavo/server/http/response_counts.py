"""How many requests were answered, by endpoint, method and class of status: vLLM's `http_requests_total`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.routing import compile_path

from octavo.server.route import Endpoint

if TYPE_CHECKING:
    from starlette.types import Scope

# Of paths and methods that no endpoint has: clients choose these, so they are counted together.
_NONE = "none"


class ResponseCounts:
    """Counts responses. Used only from the event loop.

    Attributes:
        counts: by path, method and class of status, such as ("/v1/completions", "POST", "2xx").
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._paths: set[str] = set()
        self._methods = {"HEAD", "OPTIONS"}
        self._templates: list[tuple[re.Pattern[str], str]] = []

    def expect(self, endpoints: Iterable[Endpoint]) -> None:
        """Count these endpoints by themselves; a path may have parameters, as `/v1/models/{model}` has."""
        for endpoint in endpoints:
            self._methods.add(endpoint.method)
            self._paths.add(endpoint.path)
            if "{" in endpoint.path:
                self._templates.append((compile_path(endpoint.path)[0], endpoint.path))

    def add(self, scope: Scope, status: int) -> None:
        """Count a response; a request whose client left before it was answered has none."""
        if status:
            method = scope["method"] if scope["method"] in self._methods else _NONE
            self.counts[self._path(scope["path"]), method, f"{status // 100}xx"] += 1

    def _path(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for regex, template in self._templates if regex.match(path)), _NONE)
