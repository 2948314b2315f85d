"""A process that reads request bodies for a server, so that long ones do not block the event loop.

Parsing JSON, validating arrays, rendering templates and tokenising hold the interpreter's lock, so a thread would not
help. The frames of `octavo.helper_process` hold:

    server  ── limits, pickled BodyReader ──>  once    ── nothing ──>  ready
            ── method, then body  ──>                  ── pickled result, or the error to raise ──>  server

The cost of a body is limited: a process that exceeds the time limit is killed, and the operating system enforces the
memory limit.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

from octavo.errors import OctavoError
from octavo.helper_process import (
    HelperEndedError,
    HelperProcess,
    HelperTooSlowError,
    limit_memory,
    receive,
    requests_and_answers,
    send,
)
from octavo.server.errors import BODY_TOO_COSTLY, BODY_TOO_SLOW, to_api_error
from octavo.server.interpreter_settings import return_free_memory

# Memory that a process may keep between two bodies, beyond what it had at the start.
_KEPT_BYTES = 64 * 1024 * 1024
# Bytes of a body and its answer together from which the process returns freed memory afterwards.
_LARGE = 256 * 1024


class ReaderProcess:
    """The server's handle of one reading process. Its methods block; only one thread may use it at a time.

    Args:
        reader: a pickled `BodyReader`.
        memory: bytes that the process may allocate beyond those that it starts with.
        niceness: scheduling niceness of the process relative to the server.
    """

    def __init__(self, reader: bytes, memory: int, niceness: int = 0) -> None:
        self._memory = memory
        self._process = HelperProcess(__name__, first=[memory.to_bytes(8, "little"), reader], niceness=niceness)
        self._first_rss: int | None = None  # unknown until it is ready

    def read(self, method: str, parts: Sequence[bytes], seconds: float) -> Any:
        """Return what `BodyReader.<method>(raw)` returns; raise what it raises.

        Args:
            parts: the body, in parts that are joined by the process.

        Raises:
            ApiError: reading took longer than `seconds`, not counting the start of the process, or more memory than
                allowed; the process has been ended.
            HelperEndedError, OSError: the process ended for another reason, or could not start.
        """
        self._process.wait_until_ready()
        if self._first_rss is None:
            self._first_rss = self._process.rss
        try:
            answer = self._process.ask(seconds, [method.encode()], parts)
        except HelperTooSlowError:
            raise BODY_TOO_SLOW(seconds) from None
        except HelperEndedError as error:
            # Rust aborts when an allocation fails; Python raises MemoryError.
            if error.aborted:
                raise BODY_TOO_COSTLY(self._memory) from None
            raise
        succeeded, value = pickle.loads(answer)
        if succeeded:
            return value
        if isinstance(value, MemoryError):
            # Replace the process rather than keep all the memory that it holds now.
            self.close()
            raise BODY_TOO_COSTLY(self._memory)
        raise value

    @property
    def is_bloated(self) -> bool:
        """Whether the process has kept so much memory that it should be replaced."""
        return self._first_rss is not None and self._process.rss > self._first_rss + _KEPT_BYTES

    @property
    def is_alive(self) -> bool:
        return self._process.is_usable

    def close(self) -> None:
        """End the process."""
        self._process.close()


def main() -> None:
    """Run the process: read bodies until the input ends."""
    requests, answers = requests_and_answers()
    try:
        memory = int.from_bytes(receive(requests), "little")
        reader = pickle.loads(receive(requests))
        limit_memory(memory)
        send(answers, b"")
        while True:
            method = receive(requests).decode()
            raw = receive(requests)
            answer = _answer(reader, method, raw)
            send(answers, answer)
            is_large = len(raw) + len(answer) >= _LARGE
            del raw, answer
            if is_large:
                return_free_memory()
    except (EOFError, BrokenPipeError):
        return


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
