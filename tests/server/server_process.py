"""A server in a process of its own, and streams from it that are read meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.conftest import wait_until

ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class ServerProcess:
    """A process that serves.

    Attributes:
        said: what it said on stdout before it served.
        ready: the line by which it says that it serves.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.said = ""
        while (line := process.stdout.readline()) and not line.startswith("Octavo serving"):
            self.said += line
        self.ready = line
        self.url = line.split()[-1] if line else ""

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(self.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, **body: Any) -> ReadStream:
        return ReadStream(f"{self.url}/v1/completions", {**body, "stream": True})

    def listens(self) -> bool:
        """Whether it accepts a connection, with or without an answer."""
        try:
            httpx.get(f"{self.url}/health")
        except httpx.ConnectError:
            return False
        except httpx.TransportError:
            pass  # it came as the server stopped accepting
        return True

    def hurry(self) -> None:
        """Let the steps of a `FakeEngine` take no time from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write("hurry\n")
        self.process.stdin.flush()

    def errors_up_to(self, text: str) -> str:
        """What it says on stderr, up to the line that has `text`."""
        assert self.process.stderr is not None
        said = ""
        while text not in said:
            said += (line := self.process.stderr.readline())
            assert line, said
        return said

    def stop(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def leave(self, number: signal.Signals, code: int = 0) -> str:
        """Send a signal; the process must end with `code`. Returns what it said on stderr, without its log."""
        self.stop(number)
        return self.end(code)

    def end(self, code: int = 0) -> str:
        """It must end with `code`. Returns what it says on stderr before, without its log."""
        _, errors = self.process.communicate(timeout=600)
        assert self.process.returncode == code, errors
        return "".join(line for line in errors.splitlines(keepends=True) if " INFO octavo" not in line)


class ReadStream:
    """A stream read in a thread of its own; `events` grows as it comes."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.events: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(url, body))
        self._thread.start()
        wait_until(lambda: len(self.events) > 2)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url, json=body) as response:
                self.events.extend(line.removeprefix("data: ") for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.events.append(repr(error))

    def wait(self) -> list[str]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.events


@contextmanager
def started(command: list[str], stdin: Any = subprocess.PIPE) -> Iterator[ServerProcess]:
    """Run a command that serves, until the context is left."""
    pipes: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=_ENVIRONMENT, **pipes) as process:
        try:
            yield ServerProcess(process)
        finally:
            process.kill()
