"""The pages at `/`, `/cache` and `/docs`: static files, and the changes of the cache as server-sent events.

    GET /                         the chat page, which uses /v1/models and /v1/chat/completions like any client
    GET /cache                    the live page of the cache, without data
    GET /docs                     the page of the API, which shows /openapi.json
    GET /live/chat.js, chat.css, page.js, blocks.js, details.js, page.css, docs.js, docs.css
    GET /live/events              changes, at most ten times a second
    GET /live/requests/{id}       a request's block tables
    GET /live/blocks/{block}      a block's holders and contents
    GET /live/blocks?ids=1,2      which request computed each of these blocks

If the server has keys, the data needs an admin key; without keys, a server listens on loopback by default, and the data
is open. Taking a look costs the engine's thread a fraction of a millisecond; looks are taken only when something has
changed, and rarely enough that all open pages together take less than a hundredth of the engine's time. With no page
open, nothing is done.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.live import LiveView, computed_by, describe_block, describe_request
from octavo.errors import FieldError, shortened, shown
from octavo.observe.stats import EngineStats, Histogram
from octavo.scheduler.scheduler import Scheduler
from octavo.server.access import AcceptedKeys
from octavo.server.answer_json import json_bytes
from octavo.server.apis import OPENAI
from octavo.server.engine_client import EngineClient
from octavo.server.errors import ApiError
from octavo.server.http.connection import EventStream, InFlight
from octavo.server.route import Access, Endpoint, Handlers, get, json_response

INTERVAL_S = 0.1
MOST_PAGES = 8

# Share of the engine's time that all open pages together may take, for looking and for formatting what was seen.
_SHARE = 0.009
_QUIET_S = 2.0
_PAGES = {"chat.html": "/", "page.html": "/cache", "docs.html": "/docs"}
_FILES = {
    "chat.html": "A page to chat with the model",
    "page.html": "A page that shows the KV cache and the requests as they are",
    "docs.html": "A page that shows this description",
    "chat.js": "The chat page's script",
    "chat.css": "The chat page's style",
    "blocks.js": "The cache page's script for the blocks",
    "details.js": "Its script for what is chosen and what has happened",
    "page.js": "Its main script",
    "page.css": "Its style",
    "docs.js": "The script of the description's page",
    "docs.css": "Its style",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# As many as the page draws of a request's block tables.
_MOST_IDS = 256
_ID = re.compile(r"\d{1,9}", re.ASCII)
_IDS = re.compile(rf"\d{{1,9}}(,\d{{1,9}}){{0,{_MOST_IDS - 1}}}", re.ASCII)
_IDS_QUERY = {"ids": {"type": "string", "pattern": f"^{_IDS.pattern}$"}}
_FOLDER = Path(__file__).with_name("static")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


class LivePage(Handlers):
    """The handlers of the chat page and of the live page.

    Args:
        shows_text: whether holders of an admin key see the text of a block's tokens.
    """

    def __init__(
        self,
        engine: EngineClient,
        in_flight: InFlight,
        access: AcceptedKeys,
        model_name: str,
        *,
        shows_text: bool = False,
    ) -> None:
        self._engine = engine
        self._server = in_flight
        # Separate from clients' requests, because open pages do not delay a shutdown and do not count as load.
        self._pages = InFlight()
        # Those that are sent changes, the first opened first.
        self._shown: list[_OpenPage] = []
        self._access = access
        self._model_name = model_name
        self._shows_text = shows_text

    def endpoints(self) -> list[Endpoint]:
        files = []
        for name, summary in _FILES.items():
            path, kind = _PAGES.get(name, f"/live/{name}"), _TYPES[Path(name).suffix]
            files.append(Endpoint("GET", path, partial(_served, name, kind), kind, summary, Access.PUBLIC))
        return [*files, *super().endpoints()]

    @get("/live/events", "text/event-stream", access=Access.OPERATOR)
    async def events(self, request: Request) -> Response:
        """The cache page's data, as server-sent events."""
        return EventStream(self._changes(request), self._pages, _error_event)

    @get("/live/requests/{request_id}", "application/json", access=Access.OPERATOR)
    async def request(self, request: Request) -> Response:
        """The block tables of a request."""
        request_id = request.path_params["request_id"]
        found = await self._engine.ask(lambda core: describe_request(core.scheduler, request_id))
        if found is None:
            raise ApiError(404, f"The request `{shortened(request_id)}` has ended.", code="no_such_request")
        return json_response(found)

    @get("/live/blocks", "application/json", access=Access.OPERATOR, query=_IDS_QUERY)
    async def blocks(self, request: Request) -> Response:
        """The request that computed each of the given blocks."""
        asked = request.query_params.get("ids", "")
        if not _IDS.fullmatch(asked):
            problem = f"must be 1 to {_MOST_IDS} block numbers, separated by commas, got {shown(asked)}"
            raise FieldError("ids", problem)
        block_ids = [int(number) for number in asked.split(",")]
        found = await self._engine.ask(lambda core: computed_by(core.scheduler, block_ids))
        return json_response({"computed_by": found})

    @get("/live/blocks/{block_id}", "application/json", access=Access.OPERATOR)
    async def block(self, request: Request) -> Response:
        """One block: its state, and the requests that hold it."""
        named, found = request.path_params["block_id"], None
        if _ID.fullmatch(named):
            found = await self._engine.ask(lambda core: describe_block(core.scheduler, int(named)))
        if found is None:
            raise ApiError(404, f"There is no block {shortened(named)}.", code="no_such_block")
        token_ids = found.pop("token_ids")
        if token_ids is not None and self._shows_text and self._access.admits_admin(request):
            found["text"] = self._engine.tokenizer.decode(token_ids, False)
        return json_response(found)

    async def _changes(self, request: Request) -> AsyncGenerator[bytes, None]:
        shown = _OpenPage(LiveView())
        self._shown.append(shown)
        # One that is no longer read, such as a suspended `octavo top`, looks like any other until the operating
        # system's buffers are full, which takes minutes or hours.
        for oldest in self._shown[:-MOST_PAGES]:
            self._shown.remove(oldest)
        try:
            yield _event({"model": self._model_name, **_bounds(self._engine.stats)})
            # A key can be revoked meanwhile, by a change of the keys file.
            while not self._server.draining and self._engine.is_alive and self._access.admits_operator(request):
                if shown not in self._shown:
                    yield _event({"displaced": True})
                    return
                if (event := await self._look(shown)) is not None:
                    yield event
                await asyncio.sleep(shown.pause)
        finally:
            if shown in self._shown:
                self._shown.remove(shown)

    async def _look(self, shown: _OpenPage) -> bytes | None:
        """Return what has changed since the page's last look; None if there is nothing to look at."""
        stats, now = self._engine.stats, time.monotonic()
        shown.pause = INTERVAL_S
        if (marks := _marks(stats)) == shown.marks and now - shown.looked_at < _QUIET_S:
            return None
        shown.marks, shown.looked_at = marks, now
        changes, took = await self._engine.ask(lambda core: _timed_look(shown.view, core.scheduler))
        began = time.perf_counter()
        event = _event(changes | _totals(stats))
        shown.pause = pause(took + time.perf_counter() - began, len(self._shown))
        return event


@dataclass(slots=True, eq=False)
class _OpenPage:
    """A page that is sent changes.

    Attributes:
        marks: what `_marks` returned at its last look.
        looked_at: when that was.
        pause: the seconds until the next look.
    """

    view: LiveView
    marks: tuple[int, ...] | None = None
    looked_at: float = 0.0
    pause: float = INTERVAL_S


def pause(took: float, num_pages: int) -> float:
    """Return the seconds until a page's next look if this one took `took` seconds and `num_pages` pages are open."""
    return max(INTERVAL_S, took * max(1, num_pages) / _SHARE)


def _timed_look(view: LiveView, scheduler: Scheduler) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    return view.look(scheduler), time.perf_counter() - began


def _marks(stats: EngineStats) -> tuple[int, ...]:
    """Return numbers; at least one differs from before if anything may have changed."""
    gauges = stats.gauges()
    return (stats.num_steps, gauges.num_running, gauges.num_waiting, stats.prompt_tokens, gauges.num_preemptions)


def _bounds(stats: EngineStats) -> dict[str, Any]:
    return {"ttft_bounds": stats.time_to_first_token.bounds, "itl_bounds": stats.inter_token_latency.bounds}


def _totals(stats: EngineStats) -> dict[str, Any]:
    """Return counters since the start, from which the page computes rates and percentiles over any period."""

    def counts(histogram: Histogram) -> list[int]:
        return list(histogram.counts)

    return {
        "at": round(time.monotonic(), 3),
        "totals": [
            stats.prompt_tokens,
            stats.generation_tokens,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
            sum(stats.finished.values()),
        ],
        "ttft": counts(stats.time_to_first_token),
        "itl": counts(stats.inter_token_latency),
        "tiers": [
            [tier.name, tier.is_open, tier.counters.write.blocks, tier.counters.read.blocks] for tier in stats.stores
        ],
    }


def _error_event(error: ApiError) -> bytes:
    return OPENAI.error_event(error.status, error.fields())


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(content) + b"\n\n"


async def _served(name: str, media_type: str, request: Request) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=media_type, headers=_HEADERS)
