"""Compiles grammars on trial in another process, which can be killed.

llguidance limits most of what it does, but not all: the intersection of forty short patterns takes it minutes, and
nothing interrupts a thread. So each grammar is compiled in such a process first, and only in this one if that ended
in time and within its memory. What the process finds wrong does not matter: the same is found here again.

    this process  ── length in 8 bytes, grammar ──>  compiles it for a vocabulary of single bytes
                  <── one byte: ready, or done ────

A vocabulary of single bytes is read at once, and the time and memory that compiling takes hardly depend on it. The
processes are shared by all engines, and end when their input is closed, so they do not outlive this one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import weakref
from typing import Any

from octavo.grammar.limits import compile_grammar, first_error

MEMORY = 512 * 1024 * 1024
"""Bytes that compiling one grammar may allocate. A schema of 900 properties takes 6 MB."""

_MAIN = "from octavo.grammar import trial; trial.main()"
_NUM_BYTES = 256
_START_SECONDS = 120.0
_lock = threading.Lock()
_idle: list[TrialProcess] = []


class TrialFailedError(Exception):
    """A grammar could not be compiled within the limits.

    Attributes:
        too_slow: whether it took too long; if not, the process ended, most likely for lack of memory.
    """

    def __init__(self, *, too_slow: bool) -> None:
        super().__init__("too slow" if too_slow else "the process has ended")
        self.too_slow = too_slow


def try_compiling(lark: str, seconds: float) -> None:
    """Compile a grammar in another process, and wait for it. Thread-safe.

    Raises:
        TrialFailedError: that took longer than `seconds`, not counting the start of the process, or too much memory.
    """
    process = _take()
    process.compile(lark, seconds)
    with _lock:
        _idle.append(process)


def _take() -> TrialProcess:
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.is_usable:
                return process
    return TrialProcess()


def start_one() -> None:
    """Start a process, unless one is idle, so that the first grammar need not wait for its imports."""
    process = _take()
    with _lock:
        _idle.append(process)


class TrialProcess:
    """A process that compiles grammars, of which one thread at a time may use it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Rust prints why it aborts
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "RUST_BACKTRACE": "0"},
            start_new_session=True,  # a Ctrl-C must reach only the server, which lets requests finish
        )
        self._is_ready = False
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def is_usable(self) -> bool:
        # A copy of this object in a forked process must not use the pipes of its parent.
        return self._owner == os.getpid() and self._process.poll() is None

    def compile(self, lark: str, seconds: float) -> None:
        """Compile a grammar; the process is killed if that takes longer than `seconds`.

        Raises:
            TrialFailedError: that took too long, or the process has ended.
            ChildProcessError: the process could not start.
        """
        if not self._is_ready:
            try:
                self._ask(b"", _START_SECONDS)
            except TrialFailedError as error:
                raise ChildProcessError("the process that tries grammars could not start") from error
            self._is_ready = True
        text = lark.encode(errors="surrogatepass")
        self._ask(len(text).to_bytes(8, "little") + text, seconds)

    def _ask(self, request: bytes, seconds: float) -> None:
        """Send a request and wait for the answer."""
        too_slow = threading.Event()

        def stop() -> None:
            too_slow.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            requests, answers = self._process.stdin, self._process.stdout
            assert requests is not None  # both are pipes
            assert answers is not None
            requests.write(request)
            requests.flush()
            answered = answers.read(1)
        except OSError:
            answered = b""
        finally:
            timer.cancel()
        if not answered:
            self.close()
            raise TrialFailedError(too_slow=too_slow.is_set())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:
            continue  # there is no reader any more for what was still buffered


class _Bytes:
    """A vocabulary of all single bytes and an end of sequence, as llguidance reads it."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(_NUM_BYTES)] + [b"<end>"]
        self.eos_token_id = _NUM_BYTES
        self.special_token_ids = [_NUM_BYTES]
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def main() -> None:
    """Run the process: compile grammars until the input ends."""
    from llguidance import LLTokenizer, TokenizerWrapper

    requests = sys.stdin.buffer
    # Nothing that is printed may end up among the answers.
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    tokenizer: Any = LLTokenizer(TokenizerWrapper(_Bytes()))
    _limit_memory()
    answers.write(b"r")
    try:
        while size := requests.read(8):
            lark = requests.read(int.from_bytes(size, "little")).decode(errors="surrogatepass")
            first_error(compile_grammar(lark, tokenizer), [_NUM_BYTES])
            answers.write(b"d")
    except BrokenPipeError:
        return


def _limit_memory() -> None:
    """Limit this process to `MEMORY` bytes beyond its present data size (Linux only)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            now = int(pages.read().split()[5]) * resource.getpagesize()
    except FileNotFoundError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
