"""Start a server to measure in a separate process, wait until it is ready, and stop it."""

from __future__ import annotations

import json
import signal
import socket
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


class ServerStartError(OctavoError):
    """The server under test did not start; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers `/health`, and the time that it took to start."""

    base_url: str
    startup_s: float


@contextmanager
def running_server(arguments: Sequence[str], command: Sequence[str] | None = None) -> Iterator[RunningServer]:
    """Run `octavo serve ARGUMENTS` on a free port of this machine within the context.

    Args:
        command: command to run instead of `octavo serve`.

    Raises:
        ServerStartError: the server ended at its start, or did not answer in time.
    """
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    argv = [*(command or (sys.executable, "-m", "octavo", "serve")), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen([*argv, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _await_health(process, base_url, log)
            yield RunningServer(base_url, time.perf_counter() - start)
        finally:
            _stop(process)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def _await_health(process: subprocess.Popen[bytes], base_url: str, log: IO[bytes]) -> None:
    deadline = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise ServerStartError(f"the server ended with code {process.returncode} at its start: {_last_words(log)}")
        try:
            with urllib.request.urlopen(base_url + "/health", timeout=5.0):
                return
        except OSError:
            time.sleep(_POLL_S)
    raise ServerStartError(f"the server did not answer /health within {START_TIMEOUT_S:.0f} s: {_last_words(log)}")


def _last_words(log: IO[bytes], lines: int = 8) -> str:
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or "it said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process with SIGTERM, then with SIGKILL, so that nothing outlives the benchmark."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
