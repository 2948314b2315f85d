"""The implementation of `octavo top`, apart from its options so that `--help` imports little."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from octavo.config import format_bytes
from octavo.errors import ConfigError, OctavoError

# Period in seconds over which rates and percentiles are computed.
_WINDOW_S = 5.0
_RETRY_S = 1.0
_ONCE_S = 1.0
# Of free, cached, pinned, active and shared blocks: a character, for terminals without colours, and one of Okabe and
# Ito's colours. Free ones have the terminal's own, because it may be light or dark.
_STATES = {
    "free": ("·", "none"),
    "cached": ("░", "#56b4e9"),
    "pinned": ("▒", "#f0e442"),
    "active": ("▓", "#e69f00"),
    "shared": ("█", "#d55e00"),
}
_OF_REQUESTS = ("waiting", "running", "swapped out")
# From this width on, the table also says why no more of a prompt came from the cache.
_WIDE = 110


def run(args: argparse.Namespace) -> int:
    parts = urlsplit(args.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{args.url!r} is not the URL of a server: write http://127.0.0.1:8000")
    key = args.admin_key or os.environ.get("OCTAVO_ADMIN_KEY")
    console = Console()
    # On what is not a terminal, or cannot place its cursor, nothing can be drawn again and again.
    if args.once or not console.is_terminal or console.is_dumb_terminal:
        return _print_once(args.url, key, console)
    with Live(Text(f"connecting to {args.url} …"), console=console, screen=True, auto_refresh=False) as live:
        state = State()
        while True:
            try:
                for i, news in enumerate(_events(args.url, key)):
                    state = State() if i == 0 else state
                    state.take(news)
                    live.update(state.shown(console), refresh=True)
                problem = "the server closed the connection"
            except OSError as error:
                problem = f"no connection to {args.url}: {error.strerror or error}"
            message = Text(f"{problem}; trying again …", style="bold red", overflow="ellipsis", no_wrap=True)
            live.update(Group(message, state.shown(console, lines_above=1)), refresh=True)
            time.sleep(_RETRY_S)


def _print_once(url: str, key: str | None, console: Console) -> int:
    """Print the state and the rates of about a second; a server that does nothing sends an event every two."""
    state = State()
    try:
        for news in _events(url, key):
            state.take(news)
            if state.history and state.seconds >= _ONCE_S:
                break
    except OSError as error:
        raise OctavoError(f"no connection to {url}: {error.strerror or error}") from error
    console.print(state.shown(console))
    return 0


def _events(url: str, key: str | None) -> Iterator[dict[str, Any]]:
    """Yield the server's events, until the connection ends.

    Raises:
        OctavoError: the server refuses the request; the message has its reason.
        OSError: the connection could not be made, or it broke.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=30)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", parts.path.rstrip("/") + "/live/events", headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            hint = " (--admin-key, or $OCTAVO_ADMIN_KEY)" if answer.status == 401 else ""
            raise OctavoError(f"{url} answers {answer.status}: {_message(answer.read())}{hint}")
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    except http.client.HTTPException as error:
        raise ConnectionError(f"no valid answer: {error!r}") from error
    finally:
        connection.close()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "it is not an Octavo server, or an old version"


@dataclass
class State:
    """The state of the server, built from its events."""

    head: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    codes: bytearray = field(default_factory=bytearray)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: deque[dict[str, Any]] = field(default_factory=deque)

    def take(self, news: dict[str, Any]) -> None:
        """Apply one event."""
        if "model" in news:
            self.head = news
            return
        self.spec = news.get("spec", self.spec)
        if "all" in news:
            self.codes = bytearray(ord(code) - 48 for code in news["all"][0])
        changes = news.get("blocks", ())
        for block, code in zip(changes[::3], changes[1::3], strict=True):
            self.codes[block] = code
        for request in news.get("came", ()):
            self.requests[request["id"]] = request
        for request_id, *progress in news.get("moved", ()):
            self.requests[request_id]["progress"] = progress[:4]
            if len(progress) > 4:
                self.requests[request_id]["cache"] = progress[4]
        for request_id in news.get("gone", ()):
            self.requests.pop(request_id, None)
        self.history.append({name: news[name] for name in ("at", "totals", "ttft", "itl", "counters", "tiers")})
        while len(self.history) > 2 and news["at"] - self.history[1]["at"] > _WINDOW_S:
            self.history.popleft()

    @property
    def seconds(self) -> float:
        """The time over which rates and percentiles are computed."""
        return float(self.history[-1]["at"] - self.history[0]["at"])

    def shown(self, console: Console, lines_above: int = 0) -> RenderableType:
        """Return the screen's contents, no longer than the screen is high."""
        if not self.history:  # the first event only describes the server
            return Text(f"{self.head['model']}: no figures yet …" if self.head else "")
        top = Group(self._figures(), self._blocks(console.width))
        left = console.height - lines_above - len(console.render_lines(top, pad=False)) - 1
        # A heading, a request, and how many more there are.
        return Group(top, self._requests(left - 2, console.width)) if left >= 3 else top

    def _figures(self) -> Group:
        now, before, seconds = self.history[-1], self.history[0], self.seconds

        def rate(values: str, index: int) -> str:
            return f"{(now[values][index] - before[values][index]) / seconds:,.1f}" if seconds else "–"

        def latency(name: str) -> str:
            counts = [a - b for a, b in zip(now[name], before[name], strict=True)]
            found = [percentile(counts, self.head[f"{name}_bounds"], q) for q in (0.5, 0.99)]
            return " / ".join("–" if value is None else f"{1000 * value:,.0f}" for value in found)

        asked = now["totals"][2] - before["totals"][2]
        hits = f"{100 * (now['totals'][3] - before['totals'][3]) / asked:.1f}" if asked else "–"
        running, waiting, swapped, *_ = now["counters"]
        tally = self._tally()
        # In the order of an operator's questions, as on the live page.
        figures = {
            "running": f"{running:,}",
            "waiting": f"{waiting:,} ({swapped:,} swapped out)",
            "KV cache in use %": f"{100 * sum(tally[3:]) / max(1, sum(tally)):.1f}",
            "evictions/s": rate("counters", 4),
            "preemptions/s": rate("counters", 5),
            "copies on write/s": rate("counters", 6),
            "hits %": hits,
            "TTFT p50 / p99 ms": latency("ttft"),
            "ITL p50 / p99 ms": latency("itl"),
            "output tok/s": rate("totals", 1),
            "prompt tok/s": rate("totals", 0),
        }
        cells = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures.items()]
        over = f", the last {seconds:.0f} s" if seconds >= 0.5 else ""
        return Group(Text(f"{self.head['model']}{over}", style="bold"), Columns(cells, padding=(0, 3)))

    def _tally(self) -> list[int]:
        """Return the number of blocks in each of `_STATES`."""
        tally = [0] * len(_STATES)
        for code in self.codes[1:]:
            tally[min(code, len(_STATES) - 1)] += 1
        return tally

    def _blocks(self, width: int) -> Group:
        """Return a bar of the cache's blocks by state, their numbers, and what lies below the device."""
        tally, size = self._tally(), self.spec.get("block_bytes", 0)
        bar = Text("blocks  ", no_wrap=True)
        for (glyph, colour), length in zip(_STATES.values(), shares(tally, max(8, width - 9)), strict=True):
            bar.append(glyph * length, style=colour)
        states = [
            Text.assemble((glyph, colour), f" {name} {count:,} ({format_bytes(count * size)})")
            for (name, (glyph, colour)), count in zip(_STATES.items(), tally, strict=True)
        ]
        now, below = self.history[-1], []
        if host := self.spec.get("host_blocks", 0):
            below.append(
                f"host    {now['counters'][3]:,} of {host:,} blocks ({format_bytes(now['counters'][3] * size)})"
            )
        for name, is_open, stored, loaded in now["tiers"]:
            below.append(
                f"{name:7} {stored:,} blocks written, {loaded:,} read{'' if is_open else ' (closed after errors)'}"
            )
        return Group(bar, Columns(states, padding=(0, 3)), *map(Text, below))

    def _requests(self, most: int, width: int) -> RenderableType:
        """Return a table of at most `most` requests, those that run first, and the number of the others."""
        if not self.requests:
            return Text("No request runs or waits.", style="dim")
        has_tenants = any(request["tenant"] for request in self.requests.values())
        table = Table(expand=width < _WIDE, box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("request", *(["tenant"] if has_tenants else []), "state"):
            table.add_column(name, no_wrap=True, max_width=40)
        for name in ("prompt", "cached", "computed", "output"):
            table.add_column(name, justify="right", no_wrap=True)
        if width >= _WIDE:
            table.add_column("why no more cached", no_wrap=True)
        runs_first = sorted(self.requests.values(), key=lambda request: request["progress"][0] != 1)
        for request in runs_first[:most]:
            table.add_row(*_row(request, has_tenants, wide=width >= _WIDE))
        more = len(self.requests) - most
        return Group(table, Text(f"and {more:,} more", style="dim")) if more > 0 else table


def _row(request: dict[str, Any], has_tenants: bool, wide: bool) -> list[Text]:
    state, computed, output, preempted = request["progress"]
    cache = request["cache"]
    fields = [request["id"], *([request["tenant"]] if has_tenants else [])]
    fields.append(_OF_REQUESTS[state] + (f", preempted {preempted} ×" if preempted else ""))
    fields += [f"{request['prompt']:,}", "–" if cache is None else f"{cache['cached_tokens']:,}"]
    fields += [f"{computed:,}", f"{output:,} of {request['max']:,}"]
    if wide:
        fields.append("" if cache is None else cache["reason"] or "all there is")
    return [Text(field, overflow="ellipsis", no_wrap=True) for field in fields]


def shares(counts: Sequence[int], length: int) -> list[int]:
    """Divide `length` in proportion to `counts`; what is counted at all gets at least one, if there is room."""
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    parts = [max(1, length * count // total) if count else 0 for count in counts]
    while (excess := sum(parts) - length) != 0:
        # Where rounding gave or took the most; the last one only where there is no room.
        errors = {i: part - length * count / total for i, (part, count) in enumerate(zip(parts, counts, strict=True))}
        if excess > 0:
            index = max((i for i in errors if parts[i] > min(1, max(parts) - 1)), key=errors.__getitem__)
        else:
            index = min(errors, key=errors.__getitem__)
        parts[index] -= 1 if excess > 0 else -1
    return parts


def percentile(counts: Sequence[int], bounds: Sequence[float], q: float) -> float | None:
    """Return the q-th quantile of a histogram's counts, interpolated within its bucket; None without counts."""
    left = sum(counts) * q
    if not left:
        return None
    for i, count in enumerate(counts):
        if count and left <= count:
            low = bounds[i - 1] if i else 0.0
            high = bounds[i] if i < len(bounds) else low
            return low + (high - low) * left / count
        left -= count
    return bounds[-1]
