"""A private Redis server on a socket in a temporary folder, without persistence; it can be killed and suspended."""

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
HOW = "apt-get install redis-server (or valkey-server)"


class RedisServer:
    """A running server, which must be closed.

    Args:
        memory: maximum memory, such as "512mb", above which it evicts; unlimited by default.
        timeout_s: how long clients that connect by `url` wait for it, in seconds; by default as long as redis-py does.

    Raises:
        FileNotFoundError: neither Redis nor Valkey is installed.
    """

    def __init__(self, memory: str | None = None, timeout_s: float | None = None) -> None:
        if PROGRAM is None:
            raise FileNotFoundError(f"neither redis-server nor valkey-server is installed: {HOW}")
        # In /tmp, because a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-redis-"))
        self._socket = self._folder / "socket"
        waits = "" if timeout_s is None else f"&socket_timeout={timeout_s:g}&socket_connect_timeout={timeout_s:g}"
        self.url = f"unix://{self._socket}?db=0{waits}"
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        if memory is not None:
            options += ["--maxmemory", memory, "--maxmemory-policy", "allkeys-lru"]
        self._command = [PROGRAM, *options, "--dir", str(self._folder)]
        self.start()

    def start(self) -> None:
        """Start the server, again after `kill`, and wait until it accepts connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{PROGRAM} did not start (exit code {self._process.poll()})")
            time.sleep(0.005)

    def _accepts(self) -> bool:
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

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def redis_server(memory: str | None = None) -> Iterator[RedisServer]:
    """Run a server for the duration of a `with`; `memory` as for `RedisServer`."""
    server = RedisServer(memory)
    try:
        yield server
    finally:
        server.close()
