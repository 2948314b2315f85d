"""A private Redis server for a benchmark, on a socket in a temporary folder and without persistence."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisProcess:
    """A server that can be killed, restarted and suspended.

    Args:
        memory: what it may take, such as "512mb"; it evicts for more. Unlimited by default.
    """

    def __init__(self, folder: Path, memory: str | None = None) -> None:
        if PROGRAM is None:
            raise SystemExit("there is neither redis-server nor valkey-server here: apt-get install redis-server")
        self._socket = folder / "socket"
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        if memory is not None:
            options += ["--maxmemory", memory, "--maxmemory-policy", "allkeys-lru"]
        self._command = [PROGRAM, *options, "--dir", str(folder)]
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}?db=0"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{PROGRAM} does not start")
            time.sleep(0.001)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self._socket))
            except OSError:
                return False
        return True

    def kill(self) -> None:
        """Kill the server as `kill -9` does; its data is lost."""
        self._process.kill()
        self._process.wait()
        self._socket.unlink(missing_ok=True)

    def stand_still(self) -> None:
        """Suspend the server until `go_on`: it keeps its connections but does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_process(memory: str | None = None) -> Iterator[RedisProcess]:
    """Run a server for the duration of a `with`; `memory` as for `RedisProcess`."""
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="octavo-redis-") as folder:
        server = RedisProcess(Path(folder), memory)
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def redis_url(memory: str | None = None) -> Iterator[str | None]:
    """Run a server for the duration of a `with`; yields its URL, or None if no program is installed."""
    if PROGRAM is None:
        yield None
        return
    with redis_process(memory) as server:
        yield server.url
