"""A Redis server of the tests' own, on a socket in a folder of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
HOW = "apt-get install redis-server (or valkey-server)"


class RedisServer:
    """A server without persistence; it can be killed and started again."""

    def __init__(self) -> None:
        if PROGRAM is None:
            pytest.skip(f"prefixes in Redis (--kv-remote) are not tested: no redis-server here; to test them: {HOW}")
        # Not pytest's folder: a socket's path must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-redis-"))
        self.socket = self._folder / "socket"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        # A busy machine may be slower than the default allows.
        return f"unix://{self.socket}?db=0&socket_timeout=60&socket_connect_timeout=60"

    def start(self) -> None:
        assert PROGRAM is not None
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [PROGRAM, *options, "--dir", str(self._folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while not self.socket.exists():
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < until, "redis-server does not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """As by `kill -9`; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)

    def stand_still(self) -> None:
        """It keeps its connections and answers nothing, until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
