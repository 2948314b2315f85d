"""The implementation of `octavo top`, apart from its options so that `--help` imports little."""

from __future__ import annotations

import argparse
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from octavo.commands.top_events import LiveServer
from octavo.commands.top_screen import State
from octavo.errors import OctavoError

_RETRY_S = 1.0
_ONCE_S = 1.0
# Events come ten times a second, and a drawing takes milliseconds of the machine that is watched.
_REDRAW_S = 0.5


def run(args: argparse.Namespace) -> int:
    server = LiveServer(args.url, args.admin_key or os.environ.get("OCTAVO_ADMIN_KEY") or None)
    console = Console()
    # On what is not a terminal, or cannot place its cursor, nothing can be drawn again and again.
    if args.once or not console.is_terminal or console.is_dumb_terminal:
        return _print_once(server, console)
    with Live(Text(f"connecting to {server.url} …"), console=console, screen=True, auto_refresh=False) as live:
        _watch(server, live)
    return 0


def _watch(server: LiveServer, live: Live) -> None:
    """Draw the server's state until something is raised, and connect again where the connection ends."""
    state = State()
    while True:
        try:
            for burst in bursts(server.events(again=bool(state.head))):
                for news in burst:
                    state = State() if "model" in news else state
                    state.take(news)
                live.update(state.shown(live.console), refresh=True)
                if state.history:
                    time.sleep(_REDRAW_S)
            problem = "the server closed the connection"
        except OSError as error:
            problem = _no_connection(server, error)
        message = Text(f"{problem}; trying again …", style="bold red", overflow="ellipsis", no_wrap=True)
        live.update(Group(message, state.shown(live.console, lines_above=1)), refresh=True)
        time.sleep(_RETRY_S)


def bursts(events: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events that have come since the last time, as soon as there is one; raises what `events` raises.

    A thread reads them, so that one that comes during a pause is not drawn only when the next one comes.
    """
    arrived: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for news in events:
                arrived.put(news)
        except Exception as error:
            arrived.put(error)
        else:
            arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        burst = [arrived.get()]
        while not arrived.empty():
            burst.append(arrived.get())
        news = [item for item in burst if isinstance(item, dict)]
        end = burst[-1]
        if news:
            yield news
        if isinstance(end, Exception):
            raise end
        if end is None:
            return


def _print_once(server: LiveServer, console: Console) -> int:
    """Print the state and the rates of about a second; a server that does nothing sends an event every two."""
    state = State()
    try:
        for news in server.events():
            state.take(news)
            if state.history and state.seconds >= _ONCE_S:
                break
    except OSError as error:
        raise OctavoError(_no_connection(server, error)) from error
    if not state.history:
        raise OctavoError(f"{server.url} closed the connection before it sent any figures")
    console.print(state.shown(console))
    return 0


def _no_connection(server: LiveServer, error: OSError) -> str:
    return f"no connection to {server.url}: {error.strerror or error}"
