"""Compiles grammars on trial in another process, which can be killed.

llguidance limits most of what it does, but not all: the intersection of forty short patterns takes it minutes, and
nothing interrupts a thread. So each grammar is compiled in such a process first, and only in this one if that ended
in time and within its memory. What the process finds wrong does not matter: the same is found here again.

It compiles for a vocabulary of single bytes, which is read at once; the time and memory that compiling takes hardly
depend on the vocabulary. The processes are shared by all engines.
"""

from __future__ import annotations

import threading
from typing import Any

from octavo.grammar.bounded_matcher import compile_grammar, first_error
from octavo.helper_process import (
    HelperEndedError,
    HelperProcess,
    HelperTooSlowError,
    limit_memory,
    receive,
    requests_and_answers,
    send,
)

MEMORY = 512 * 1024 * 1024
"""Bytes that compiling one grammar may allocate. A schema of 900 properties takes 6 MB."""

NICENESS = 10
"""Niceness of what compiles grammars, so that the engine has priority on a busy machine; see nice(2)."""

_WAITS = 10.0  # of a busy core, a process of that niceness gets a tenth
_NUM_BYTES = 256
_lock = threading.Lock()
_idle: list[HelperProcess] = []


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
        TrialFailedError: that took more processor time than `seconds`, not counting the start of the process, ten times
            as long in all, or too much memory.
        ChildProcessError: the process could not start.
    """
    process = _take()
    try:
        process.ask(seconds, [lark.encode(errors="surrogatepass")], waits=_WAITS)
    except HelperTooSlowError:
        raise TrialFailedError(too_slow=True) from None
    except HelperEndedError:
        raise TrialFailedError(too_slow=False) from None
    with _lock:
        _idle.append(process)


def _take() -> HelperProcess:
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.is_usable:
                return process
    memory = MEMORY.to_bytes(8, "little")
    return HelperProcess(__name__, first=[memory], niceness=NICENESS, quiet=True)  # Rust prints why it aborts


def start_one() -> None:
    """Start a process, unless one is idle, so that the first grammar need not wait for its imports."""
    process = _take()
    with _lock:
        _idle.append(process)


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

    requests, answers = requests_and_answers()
    tokenizer: Any = LLTokenizer(TokenizerWrapper(_Bytes()))
    try:
        limit_memory(int.from_bytes(receive(requests), "little"))
        send(answers, b"")
        while True:
            lark = receive(requests).decode(errors="surrogatepass")
            first_error(compile_grammar(lark, tokenizer), [_NUM_BYTES])
            send(answers, b"")
    except (EOFError, BrokenPipeError):
        return
