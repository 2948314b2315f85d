"""Processes of this program for work that may take too long or too much memory, and can be killed.

A thread cannot be interrupted, and what exhausts the memory of a process ends all that runs in it. Frames go both ways
over pipes; each is a length in 8 bytes followed by the content:

    HelperProcess              process
                 <── frame ──  ready
    ask          ── frames ──>
                 <── frame ──  the answer

The process ends when its input is closed, so it does not outlive this one.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO

# The niceness is set before the imports, which may take a second of processor time.
_MAIN = "import os; os.nice({niceness}); from {module} import main; main()"
# How long a process may take to be ready: a second of imports, or many on a busy machine.
_START_SECONDS = 120.0
_LEAST_WAIT = 0.01  # as fine as processor time is counted
_OWN_PAGES = "/proc/self/statm"


class HelperTooSlowError(Exception):
    """The process took longer than it was given, and has been killed."""


class HelperEndedError(Exception):
    """The process has ended by itself.

    Attributes:
        aborted: whether it was aborted, as Rust does where memory runs out.
    """

    def __init__(self, *, aborted: bool = False) -> None:
        super().__init__("the process has ended")
        self.aborted = aborted


class HelperProcess:
    """The handle of one process that runs `main()` of a module. Its methods block; one thread at a time may use it.

    Args:
        module: the module's name.
        first: frames that it reads before it is ready.
        niceness: its scheduling niceness relative to this process.
        quiet: drop what it prints to stderr.
        files: descriptors that it inherits.
        start_seconds: how long it may take to be ready.

    Attributes:
        ready: the frame that it sent when it was ready.
    """

    def __init__(
        self,
        module: str,
        *,
        first: Sequence[bytes] = (),
        niceness: int = 0,
        quiet: bool = False,
        files: Sequence[int] = (),
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN.format(niceness=niceness, module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            # Without memory, printing a Rust backtrace never ends.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "RUST_BACKTRACE": "0"},
            pass_fds=files,
            start_new_session=True,  # a Ctrl-C must reach only this process, which lets requests finish
        )
        self.close = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.ready: bytes | None = None
        self._start_seconds = start_seconds
        self.send_first(*first)

    def send_first(self, *frames: bytes) -> None:
        """Send frames that it reads before it is ready, after those given at its start."""
        try:
            for frame in frames:
                send(self._in, frame)
        except OSError:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether the process runs and belongs to this one: a forked process must not use the pipes of its parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def rss(self) -> int:
        """Resident memory of the process in bytes; 0 if it has ended."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as pages:
                return int(pages.read().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code; any thread may."""
        return self._process.wait()

    def wait_until_ready(self) -> None:
        """Wait for the process to start.

        Raises:
            ChildProcessError: it could not start, or took too long to.
        """
        if self.ready is None:
            try:
                self.ready = self._exchange(self._start_seconds)
            except (HelperTooSlowError, HelperEndedError) as error:
                raise ChildProcessError("a helper process could not start") from error

    def ask(self, seconds: float, *frames: Sequence[bytes], waits: float = 1.0) -> bytes:
        """Send frames, each in parts that are joined, and return the answer.

        Args:
            seconds: processor time that the process may take.
            waits: it may take so many times as long in all, because others have the processor.

        Raises:
            HelperTooSlowError: that took longer, not counting the start; the process has been killed.
            HelperEndedError: the process ended, by itself or because the operating system killed it.
            ChildProcessError: it could not start.
        """
        self.wait_until_ready()
        return self._exchange(seconds, *frames, waits=waits)

    def _exchange(self, seconds: float, *frames: Sequence[bytes], waits: float = 1.0) -> bytes:
        answered, too_slow = threading.Event(), threading.Event()
        began, used = time.monotonic(), self._processor_seconds()

        def watch() -> None:
            left = seconds
            while not answered.wait(left):
                left = min(
                    seconds - (self._processor_seconds() - used),
                    seconds * waits - (time.monotonic() - began),
                )
                if left <= 0:
                    too_slow.set()
                    self._process.kill()
                    return
                left = max(left, _LEAST_WAIT)

        threading.Thread(target=watch, daemon=True).start()
        try:
            for frame in frames:
                send(self._in, *frame)
            return receive(self._out)
        except (EOFError, OSError):
            self.close()
            if too_slow.is_set():
                raise HelperTooSlowError from None
            raise HelperEndedError(aborted=self._process.returncode == -signal.SIGABRT) from None
        finally:
            answered.set()

    def _processor_seconds(self) -> float:
        """Return the processor time that the process has taken; elsewhere than on Linux, the time that has passed."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                user, system = file.read().rpartition(b")")[2].split()[11:13]
        except OSError:
            return time.monotonic()
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # there is no reader any more for what was still buffered


def send(pipe: BinaryIO | Any, *parts: bytes) -> None:
    """Send one frame, in parts that are joined at the other end."""
    pipe.write(sum(map(len, parts)).to_bytes(8, "little"))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def receive(pipe: BinaryIO | Any) -> bytes:
    """Return the next frame; raises EOFError if the other end is closed."""
    return _exactly(pipe, int.from_bytes(_exactly(pipe, 8), "little"))


def _exactly(pipe: BinaryIO | Any, size: int) -> bytes:
    content: bytes = pipe.read(size)
    if len(content) < size:
        raise EOFError("the other end is closed")
    return content


def requests_and_answers() -> tuple[BinaryIO, BinaryIO]:
    """Called by the process: the pipes of its requests and of its answers.

    From then on stdout is stderr, so that nothing that is printed ends up among the answers.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, answers


def limit_memory(more: int) -> None:
    """Called by the process: limit it to `more` bytes beyond its present data size (Linux only)."""
    try:
        with open(_OWN_PAGES, encoding="ascii") as pages:
            now = int(pages.read().split()[5]) * resource.getpagesize()
    except FileNotFoundError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
