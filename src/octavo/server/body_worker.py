"""A process that reads bodies for a server: what takes a second there takes nothing from the event loop here.

Parsing JSON, validating arrays, rendering templates and tokenising hold the interpreter's lock, so a thread would not
do. Frames go both ways over pipes, each a length of 8 bytes and as many bytes:

    server  ── limits, pickled BodyReader ──>  once    ── nothing ──>  ready
            ── method, then body  ──>                  ── pickled result, or the error to raise ──>  server

The process ends when its input does, so none outlives its server. What a body may cost it is limited: its time, by
killing it, and its memory, by the operating system.
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
from typing import Any, BinaryIO

from octavo.errors import OctavoError
from octavo.server.errors import BodyTooCostlyError, BodyTooSlowError, to_api_error

# It gives way before it imports anything: that takes a second of a processor.
_MAIN = "import os; os.nice({niceness}); from octavo.server.body_worker import main; main()"

# Memory beyond what a process began with that it may keep between two bodies.
_KEPT_BYTES = 128 * 1024 * 1024
_OWN_PAGES = "/proc/self/statm"
# The process imports a tokenizer before it is ready: about a second, many on a busy machine.
_START_SECONDS = 120.0


class BodyWorker:
    """One such process, seen from the server. Its methods block; one thread uses it at a time.

    Args:
        reader: a pickled `BodyReader`.
        memory: bytes that it may have for its work, besides those that it starts with.
        niceness: how much it gives way to the server's other processes.
    """

    def __init__(self, reader: bytes, memory: int, niceness: int = 0) -> None:
        self._memory = memory
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN.format(niceness=niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A backtrace of Rust's that gets no memory for itself never ends.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "RUST_BACKTRACE": "0"},
            start_new_session=True,  # a Ctrl-C is for the server, which lets requests finish
        )
        assert self._process.stdin is not None  # they are pipes
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

    def read(self, method: str, raw: bytes, seconds: float) -> Any:
        """What `BodyReader.<method>(raw)` returns; raises what it raises.

        Raises:
            BodyTooSlowError: it took longer than that, the start of the process aside; the process is gone then.
            BodyTooCostlyError: it took more memory than it may; the process is gone then.
            EOFError, OSError: the process is gone for some other reason.
        """
        if not self._is_ready:
            self._ask(_START_SECONDS)
            self._is_ready = True
            self._first_rss = self._rss()
        succeeded, value = pickle.loads(self._ask(seconds, method.encode(), raw))
        if succeeded:
            return value
        if isinstance(value, MemoryError):
            # What it holds now is not worth keeping.
            self.close()
            raise BodyTooCostlyError(self._memory)
        raise value

    def _ask(self, seconds: float, *frames: bytes) -> bytes:
        """Send frames and wait for the next answer; the process is killed when it takes longer than that."""
        too_slow = threading.Event()

        def stop() -> None:
            too_slow.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for frame in frames:
                _send(self._in, frame)
            return _receive(self._out)
        except (EOFError, OSError):
            self.close()
            if too_slow.is_set():
                raise BodyTooSlowError(seconds) from None
            # Rust's way out where it gets no memory; Python raises MemoryError.
            if self._process.returncode == -signal.SIGABRT:
                raise BodyTooCostlyError(self._memory) from None
            raise
        finally:
            timer.cancel()

    @property
    def is_bloated(self) -> bool:
        """Whether it has kept so much memory of what it read that a new process is better."""
        return self._is_ready and self._rss() > self._first_rss + _KEPT_BYTES

    def _rss(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as pages:
                return int(pages.read().split()[1]) * resource.getpagesize()
        except OSError:
            return 0  # it has ended

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
                continue  # what was still to be written has no reader any more


def _send(pipe: BinaryIO | Any, content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little"))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> bytes:
    return _exactly(pipe, int.from_bytes(_exactly(pipe, 8), "little"))


def _exactly(pipe: BinaryIO | Any, size: int) -> bytes:
    content: bytes = pipe.read(size)
    if len(content) < size:
        raise EOFError("the process that reads large bodies has ended")
    return content


def main() -> None:
    """The process: reads bodies until its input ends."""
    requests = sys.stdin.buffer
    # Whatever prints must not end up between two frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        memory = int.from_bytes(_receive(requests), "little")
        reader = pickle.loads(_receive(requests))
        _limit_memory(memory)
        _send(answers, b"")
        while True:
            method = _receive(requests).decode()
            _send(answers, _answer(reader, method, _receive(requests)))
    except (EOFError, BrokenPipeError):
        return


def _limit_memory(more: int) -> None:
    """Let this process have that many bytes more than it has now, on a system that counts them (Linux)."""
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
            # Rust's binding met a null pointer where Python had no memory: nothing here can be relied on.
            os.abort()
        if not isinstance(error, Exception):
            raise
        # Logged here, with its traceback; the server tells its client what it may know.
        return pickle.dumps((False, to_api_error(error)), protocol=pickle.HIGHEST_PROTOCOL)
