"""The state that `octavo top` builds from a server's events, and the screen that shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.segment import SegmentLines
from rich.text import Text

from octavo.units import format_bytes

# Period in seconds over which rates and percentiles are computed.
_WINDOW_S = 5.0
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
_WHY = "why no more cached"
_NUMBERS = ("preempted", "prompt", "cached", "computed", "output")
# The columns of the table of requests that are left out one by one where there is no room for all of them.
_LEFT_OUT = (_WHY, "preempted", "computed", "cached", "prompt", "tenant", "output", "state")
# The columns that are narrowed before one is left out, and how far.
_NARROWED = {"request": 12, "tenant": 8}
_GAP = "  "
# From the characters of an event, "0" and so on, to codes.
_CODES = bytes(max(0, character - ord("0")) for character in range(256))


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
            self.codes = bytearray(news["all"][0], "ascii").translate(_CODES)
        changes = news.get("blocks", ())
        for block, code in zip(changes[::3], changes[1::3], strict=True):
            self.codes[block] = code
        for request in news.get("added", ()):
            self.requests[request["id"]] = request
        for request_id, *progress in news.get("updated", ()):
            self.requests[request_id]["progress"] = progress[:4]
            if len(progress) > 4:
                self.requests[request_id]["cache"] = progress[4]
        for request_id in news.get("removed", ()):
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
        tally = self._tally()
        top = console.render_lines(Group(self._figures(tally), self._blocks(tally, console.width)), pad=False)
        left = console.height - lines_above - len(top) - 1
        drawn = SegmentLines(top, new_lines=True)
        # A heading, a request, and how many more there are.
        return Group(drawn, self._requests(left - 2, console.width)) if left >= 3 else drawn

    def _figures(self, tally: list[int]) -> Group:
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
        # Without the null block, the first. The last of the states has several codes, by the number of holders.
        tally = [self.codes.count(code, 1) for code in range(len(_STATES) - 1)]
        return [*tally, max(0, len(self.codes) - 1) - sum(tally)]

    def _blocks(self, tally: list[int], width: int) -> Group:
        """Return a bar of the cache's blocks by state, their numbers, and the tiers below the device."""
        size = self.spec.get("block_bytes", 0)
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
        runs_first = sorted(self.requests.values(), key=lambda request: request["progress"][0] != 1)
        rows = [_cells(request) for request in runs_first[:most]]
        lines = table(rows, width)
        if (more := self._num_requests() - len(rows)) > 0:
            lines.append(f"and {more:,} more")
        drawn = Text("\n".join(lines), no_wrap=True, overflow="crop")
        drawn.stylize("dim", 0, len(lines[0]))
        if more > 0:
            drawn.stylize("dim", len(drawn) - len(lines[-1]))
        return drawn

    def _num_requests(self) -> int:
        """Return the number of requests; a server sends only the first of those waiting.

        It says how many sequences wait: one of a request that was not yet admitted, and some of one that was preempted,
        here taken to be all. So this is exact where all are sent, and else where no request of several sequences was
        preempted.
        """
        in_line: int = self.history[-1]["counters"][1]
        for request in self.requests.values():
            state, _, _, preempted = request["progress"]
            in_line -= request.get("n", 1) - (state == 1) if preempted else state != 1
        return len(self.requests) + max(0, in_line)


def _cells(request: dict[str, Any]) -> dict[str, str]:
    state, computed, output, preempted = request["progress"]
    cache = request["cache"]
    return {
        "request": request["id"],
        "tenant": request["tenant"],
        "state": _OF_REQUESTS[state],
        "preempted": f"{preempted:,} ×" if preempted else "",
        "prompt": f"{request['prompt']:,}",
        "cached": "–" if cache is None else f"{cache['cached_tokens']:,}",
        "computed": f"{computed:,}",
        "output": f"{output:,} of {request['max']:,}",
        _WHY: "" if cache is None else cache["reason"] or "all there is",
    }


def table(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """Return the lines of a table of requests, the heading first.

    Numbers are never cut: ids and tenants are shortened in the middle, because the requests of one body differ only at
    their ends, and where that does not suffice, columns are left out.
    """
    widths = {
        name: max(cell_len(name), *(cell_len(row[name]) for row in rows))
        for name in rows[0]
        if name not in ("tenant", "preempted") or any(row[name] for row in rows)
    }
    if width < _WIDE:
        del widths[_WHY]
    for name in _LEFT_OUT:
        excess = sum(widths.values()) + len(_GAP) * (len(widths) - 1) - width
        for column in (column for column in _NARROWED if column in widths):
            taken = max(0, min(excess, widths[column] - _NARROWED[column]))
            widths[column] -= taken
            excess -= taken
        if excess <= 0:
            break
        widths.pop(name, None)
    widths["request"] = min(widths["request"], width)
    heading = {name: name for name in widths}
    return [_GAP.join(_cell(name, row[name], widths[name]) for name in widths) for row in (heading, *rows)]


def _cell(name: str, text: str, width: int) -> str:
    # A client may choose its request's id, and a terminal obeys what is not printable.
    text = shortened("".join(char if char.isprintable() else "?" for char in text), width)
    padding = " " * (width - cell_len(text))
    return padding + text if name in _NUMBERS else text + padding


def shortened(text: str, width: int) -> str:
    """Shorten a text in the middle, to at most `width` columns of a terminal."""
    if cell_len(text) <= width:
        return text
    tail = text[len(text) - (width - 1) // 2 :]
    while cell_len(tail) > (width - 1) // 2:
        tail = tail[1:]
    return set_cell_size(text, width - 1 - cell_len(tail)) + "…" + tail


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
