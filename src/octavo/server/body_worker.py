"""A process that reads request bodies for a server, so that long ones do not block the event loop.

Parsing JSON, validating arrays, rendering templates and tokenising hold the interpreter's lock, so a thread would not
help. Frames go both ways over pipes; each is a length in 8 bytes followed by the content:

    server  ── limits, pickled BodyReader ──>  once    ── nothing ──>  ready
            ── method, then body  ──>                  ── pickled result, or the error to raise ──>  server

The process ends when its input is closed, so it does not outlive the server. The cost of a body is limited: a process
that exceeds the time limit is killed, and the operating system enforces the memory limit.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO

from octavo.errors import OctavoError
from octavo.server.errors import BodyTooCostlyError, BodyTooSlowError, to_api_error
from octavo.server.memory import return_free_memory

# The niceness is set before the imports, which take a second of processor time.
_MAIN = "import os; os.nice({niceness}); from octavo.server.body_worker import main; main()"

# Memory that a process may keep between two bodies, beyond what it had at the start.
_KEPT_BYTES = 64 * 1024 * 1024
# Bytes of a body and its answer together from which the process returns freed memory afterwards.
_LARGE = 256 * 1024
_OWN_PAGES = "/proc/self/statm"
# The process imports a tokenizer before it is ready, which takes about a second, or many on a busy machine.
_START_SECONDS = 120.0


class BodyWorker:
    """The server's handle of one reading process. Its methods block; only one thread may use it at a time.

    Args:
        reader: a pickled `BodyReader`.
        memory: bytes that the process may allocate beyond those that it starts with.
        niceness: scheduling niceness of the process relative to the server.
    """

    def __init__(self, reader: bytes, memory: int, niceness: int = 0) -> None:
        self._memory = memory
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN.format(niceness=niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Without memory, printing a Rust backtrace never ends.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "RUST_BACKTRACE": "0"},
            start_new_session=True,  # a Ctrl-C must reach only the server, which lets requests finish
        )
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._end = weakref.finalize(self, _end, self._process)
        self._is_ready = False
        try:
            _send(self._in, memory.to_bytes(8, "little"))
            _send(self._in, reader)
        except OSError:
            self.close()
            raise

    def read(self, method: str, parts: Sequence[bytes], seconds: float) -> Any:
        """Return what `BodyReader.<method>(raw)` returns; raise what it raises.

        Args:
            parts: the body, in parts that are joined by the process.

        Raises:
            BodyTooSlowError: reading took longer than `seconds`, not counting the start of the process, which has been
                killed.
            BodyTooCostlyError: reading took more memory than allowed; the process has been ended.
            EOFError, OSError: the process ended for another reason.
        """
        if not self._is_ready:
            self._ask(_START_SECONDS)
            self._is_ready = True
            self._first_rss = self._rss()
        succeeded, value = pickle.loads(self._ask(seconds, [method.encode()], parts))
        if succeeded:
            return value
        if isinstance(value, MemoryError):
            # Replace the process rather than keep all the memory that it holds now.
            self.close()
            raise BodyTooCostlyError(self._memory)
        raise value

    def _ask(self, seconds: float, *frames: Sequence[bytes]) -> bytes:
        """Send frames, each in parts, and return the next answer; kill the process if that takes over `seconds`."""
        too_slow = threading.Event()

        def stop() -> None:
            too_slow.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for frame in frames:
                _send(self._in, *frame)
            return _receive(self._out)
        except (EOFError, OSError):
            self.close()
            if too_slow.is_set():
                raise BodyTooSlowError(seconds) from None
            # Rust aborts when an allocation fails; Python raises MemoryError.
            if self._process.returncode == -signal.SIGABRT:
                raise BodyTooCostlyError(self._memory) from None
            raise
        finally:
            timer.cancel()

    @property
    def is_bloated(self) -> bool:
        """Whether the process has kept so much memory that it should be replaced."""
        return self._is_ready and self._rss() > self._first_rss + _KEPT_BYTES

    def _rss(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as pages:
                return int(pages.read().split()[1]) * resource.getpagesize()
        except OSError:
            return 0  # the process has ended

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # there is no reader any more for what was still buffered


def _send(pipe: BinaryIO | Any, *parts: bytes) -> None:
    pipe.write(sum(map(len, parts)).to_bytes(8, "little"))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> bytes:
    return _exactly(pipe, int.from_bytes(_exactly(pipe, 8), "little"))


def _exactly(pipe: BinaryIO | Any, size: int) -> bytes:
    content: bytes = pipe.read(size)
    if len(content) < size:
        raise EOFError("the process that reads large bodies has ended")
    return content


def main() -> None:
    """Run the process: read bodies until the input ends."""
    requests = sys.stdin.buffer
    # Printed output must not end up between two frames, so stdout becomes stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        memory = int.from_bytes(_receive(requests), "little")
        reader = pickle.loads(_receive(requests))
        _limit_memory(memory)
        _send(answers, b"")
        while True:
            method = _receive(requests).decode()
            raw = _receive(requests)
            answer = _answer(reader, method, raw)
            _send(answers, answer)
            is_large = len(raw) + len(answer) >= _LARGE
            del raw, answer
            if is_large:
                return_free_memory()
    except (EOFError, BrokenPipeError):
        return


def _limit_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its present data size (Linux only)."""
    page = resource.getpagesize()
    try:
        with open(_OWN_PAGES, encoding="ascii") as pages:
            now = int(pages.read().split()[5]) * page
    except FileNotFoundError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))


def _answer(reader: Any, method: str, raw: bytes) -> bytes:
    try:
        return pickle.dumps((True, getattr(reader, method)(raw)), protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        return pickle.dumps((False, MemoryError()), protocol=pickle.HIGHEST_PROTOCOL)
    except OctavoError as error:
        return pickle.dumps((False, error), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            # A Rust binding met a null pointer because Python had no memory: this process can no longer be trusted.
            os.abort()
        if not isinstance(error, Exception):
            raise
        # Logged here, with its traceback; the client only learns what `to_api_error` lets it know.
        return pickle.dumps((False, to_api_error(error)), protocol=pickle.HIGHEST_PROTOCOL)
