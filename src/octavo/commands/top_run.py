"""The implementation of `octavo top`, apart from its options so that `--help` imports little."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from octavo.config import format_bytes
from octavo.errors import ConfigError, OctavoError

# Period in seconds over which rates and percentiles are computed.
_WINDOW_S = 5.0
_RETRY_S = 1.0
# Okabe and Ito's colours, for free, cached, pinned, active and shared blocks.
_COLOURS = ("white", "#56b4e9", "#f0e442", "#e69f00", "#d55e00")
_NAMES = ("free", "cached", "pinned", "active", "shared")


def run(args: argparse.Namespace) -> int:
    parts = urlsplit(args.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{args.url!r} is not the URL of a server: write http://127.0.0.1:8000")
    key = args.admin_key or os.environ.get("OCTAVO_ADMIN_KEY")
    console = Console()
    if args.once:
        state = State()
        # The first event describes the server, and the second has the whole state.
        try:
            for news in itertools.islice(_events(args.url, key), 2):
                state.take(news)
        except OSError as error:
            raise OctavoError(f"no connection to {args.url}: {error.strerror or error}") from error
        console.print(state.shown(console.height))
        return 0
    with Live(Text(f"connecting to {args.url} …"), console=console, screen=True, auto_refresh=False) as live:
        while True:
            state = State()
            try:
                for news in _events(args.url, key):
                    state.take(news)
                    live.update(state.shown(console.height), refresh=True)
            except OSError as error:
                reason = error.strerror or error
                live.update(Text(f"no connection to {args.url}: {reason}; trying again …"), refresh=True)
            time.sleep(_RETRY_S)


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
            raise OctavoError(f"{url} answers {answer.status}: {_message(answer.read())}")
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

    def shown(self, height: int) -> Group:
        """Return the screen's contents."""
        if not self.history:  # the first event only describes the server
            return Group(Text(f"{self.head.get('model')}: no figures yet …"))
        return Group(self._figures(), self._blocks(), self._requests(max(3, height - 16)))

    def _figures(self) -> Group:
        now, before = self.history[-1], self.history[0]
        seconds = max(1e-9, now["at"] - before["at"])

        def rate(values: str, index: int) -> str:
            return f"{(now[values][index] - before[values][index]) / seconds:,.1f}"

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
            "waiting": f"{waiting:,} ({swapped:,} swapped)",
            "KV cache in use %": f"{100 * sum(tally[3:]) / max(1, sum(tally)):.1f}",
            "evictions/s": rate("counters", 4),
            "preemptions/s": rate("counters", 5),
            "hits %": hits,
            "TTFT p50 / p99 ms": latency("ttft"),
            "ITL p50 / p99 ms": latency("itl"),
            "output tok/s": rate("totals", 1),
            "prompt tok/s": rate("totals", 0),
        }
        cells = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures.items()]
        title = Text(f"{self.head.get('model')}, the last {seconds:.0f} s", style="bold")
        return Group(title, Columns(cells, padding=(0, 3)))

    def _tally(self) -> list[int]:
        """Return the number of blocks in each of the states `_NAMES`."""
        tally = [0] * len(_NAMES)
        for code in self.codes[1:]:
            tally[min(code, len(_NAMES) - 1)] += 1
        return tally

    def _blocks(self) -> Group:
        """Return a bar of the cache's blocks by state, their numbers, and what lies below the device."""
        tally = self._tally()
        total, width = max(1, sum(tally)), 60
        size = self.spec.get("block_bytes", 0)
        bar = Text("blocks  ")
        for count, colour in zip(tally, _COLOURS, strict=True):
            bar.append("█" * round(width * count / total), style=colour)
        states = [
            Text(f"{name} {count:,} ({format_bytes(count * size)})", style=colour)
            for name, count, colour in zip(_NAMES, tally, _COLOURS, strict=True)
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

    def _requests(self, most: int) -> Table:
        table = Table(expand=True)
        for name in ("request", "tenant", "state"):
            table.add_column(name)
        for name in ("prompt", "cached", "computed", "output"):
            table.add_column(name, justify="right")
        for request in itertools.islice(self.requests.values(), most):
            running, computed, output, preempted = request["progress"]
            cached = "–" if request["cache"] is None else f"{request['cache']['cached_tokens']:,}"
            state = ("running" if running else "waiting") + (f", preempted {preempted} ×" if preempted else "")
            of = f"{output:,} of {request['max']:,}"
            table.add_row(
                Text(request["id"]),
                Text(request["tenant"]),
                state,
                f"{request['prompt']:,}",
                cached,
                f"{computed:,}",
                of,
            )
        if (more := len(self.requests) - most) > 0:
            table.add_row(f"and {more:,} more")
        return table


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
