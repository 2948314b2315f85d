"""Start a server to measure in a separate process, wait until it is ready, and stop it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from octavo.errors import ConfigError, OctavoError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05
_MOST_LOG_BYTES = 1 << 20
_READY = re.compile(r"^Octavo serving .* on (http\S+)\n", re.MULTILINE)


class ServerStartError(OctavoError):
    """The server under test did not start; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready, the time that it took to start, and its process (None if another program started it)."""

    base_url: str
    startup_s: float
    pid: int | None = None


@contextmanager
def running_server(arguments: Sequence[str], command: Sequence[str] | None = None) -> Iterator[RunningServer]:
    """Run `octavo serve ARGUMENTS` on a free port of this machine within the context.

    The server takes the port itself, and its URL is read from the line that it prints once it is ready.

    Args:
        command: command to run instead of `octavo serve`, which prints the same line.

    Raises:
        ServerStartError: the server ended at its start, or was not ready in time.
    """
    argv = [*(command or (sys.executable, "-m", "octavo", "serve")), "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen([*argv, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            base_url = _await_url(process, log)
            yield RunningServer(base_url, time.perf_counter() - start, process.pid)
        finally:
            _stop(process)


def fetch_json(url: str, api_key: str | None = None, timeout_s: float = 10.0) -> Any:
    """GET a small JSON document.

    Raises:
        ConfigError: there is no answer, or it is not JSON; the message names the URL.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {url}: {error}") from error


def _await_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    deadline = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < deadline:
        ended = process.poll()
        if (found := _READY.search(_text(log))) is not None:
            return found[1]
        if ended is not None:
            raise ServerStartError(f"the server ended with code {ended} at its start: {_last_words(log)}")
        time.sleep(_POLL_S)
    raise ServerStartError(f"the server was not ready within {START_TIMEOUT_S:.0f} s: {_last_words(log)}")


def _last_words(log: IO[bytes], lines: int = 8) -> str:
    return "\n".join(_text(log).strip().splitlines()[-lines:]) or "it said nothing"


def _text(log: IO[bytes]) -> str:
    # Without moving the position in the file, which the server that writes it shares.
    return os.pread(log.fileno(), _MOST_LOG_BYTES, 0).decode(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process with SIGTERM, then with SIGKILL, so that nothing outlives the benchmark."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
