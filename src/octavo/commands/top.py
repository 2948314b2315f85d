"""`octavo top`: show the live page of a running server in a terminal."""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

DESCRIPTION = "Show the KV cache, requests and latencies of a running server, like its live page. Press q to quit."

_RETRY_S = 1.0
_ONCE_S = 1.0
# Events come ten times a second, and a drawing takes milliseconds of the machine that is watched.
_REDRAW_S = 0.5
# Seconds without a byte; a server that does nothing sends an event every two.
_TIMEOUT_S = 30
_KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="URL of the server")
    parser.add_argument(
        "--admin-key", metavar="KEY", help="admin key, if the server has API keys (default: $OCTAVO_ADMIN_KEY)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the current state and exit, as it does if the output is not a terminal",
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    server = LiveServer(args.url, args.admin_key or os.environ.get("OCTAVO_ADMIN_KEY") or None)
    console = Console()
    # On what is not a terminal, or cannot place its cursor, nothing can be drawn again and again.
    if args.once or not console.is_terminal or console.is_dumb_terminal:
        return _print_once(server, console)
    connecting = Text(f"connecting to {server.url} …")
    with Live(connecting, console=console, screen=True, auto_refresh=False) as live, _until_q():
        _watch(server, live)
    return 0


@contextmanager
def _until_q() -> Iterator[None]:
    """End the body of the statement where q is typed, if the input is a terminal."""
    if not sys.stdin.isatty() or importlib.util.find_spec("termios") is None:
        yield
        return
    import termios
    import tty

    typed = threading.Event()

    def wait() -> None:
        while key := os.read(terminal, 1):
            if key in b"qQ":
                typed.set()
                signal.raise_signal(signal.SIGINT)  # the main thread waits for the server
                return

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if not typed.is_set():
            raise
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _watch(server: LiveServer, live: Live) -> None:
    """Draw the server's state until something is raised, and connect again where the connection ends."""
    from rich.console import Group
    from rich.text import Text

    from octavo.commands.top_screen import State

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
    from octavo.commands.top_screen import State

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


class LiveServer:
    """A server whose live page is read.

    Args:
        url: the server's URL; http:// may be left out.
        key: an admin key, if the server has keys.

    Raises:
        ConfigError: no server has such a URL or such a key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url = url if "://" in url else f"http://{url}"
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
            raise ConnectionError("the connection broke in the middle of an event") from error
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
