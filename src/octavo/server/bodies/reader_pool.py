"""Reads request bodies without making other requests wait.

A body below a kilobyte is read on the event loop; a medium one in a thread, where only its parsing holds the
interpreter's lock, for about a millisecond; a large one, or one of many parts, in another process, because parsing
JSON, validating arrays and tokenising hold that lock. A chat is read in a process too: its template comes with the
model, and may loop or exhaust the memory. Only a small one whose template is plain (`text/chat_template.py`) is read on
the event loop, which takes 0.14 ms there; through a process, 0.34 to 0.46 ms of the server's time, and 0.5 ms in all.

One pool of processes reads both. Large bodies and chats take turns separately, so that chats do not wait for large
bodies. The frames of `octavo.helper_process` hold:

    server  ── files, limit, BodyReader ──>        once    ── nothing ──>  ready
            ── niced?, method, then body    ──>            ── pickled result, or the error to raise ──>  server

`start_ahead` starts a process before there is a `BodyReader`. It imports modules and reads the tokenizer, which takes
seconds for a large vocabulary, while the engine is built.

The cost of a body is limited: a process that exceeds the time limit is killed, and the operating system enforces the
memory limit.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from octavo.checkpoint.model_source import ModelSource
from octavo.engine.turns import TenantThreads
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
from octavo.server.bodies.body_reader import BodyReader
from octavo.server.errors import BODY_TOO_COSTLY, BODY_TOO_SLOW, INTERNAL_ERROR, to_api_error
from octavo.server.interpreter_settings import return_free_memory
from octavo.text.tokenizer import TokenizerFiles, read_ahead

logger = logging.getLogger("octavo.server")

# Bodies below these sizes in bytes are read on the event loop and in a thread; either takes at most 1-2 ms.
SMALL_BODY = 1024
MEDIUM_BODY = 64 * 1024
# Number of strings and lists from which a body counts as large: each may be a prompt, and tokenising a prompt holds the
# interpreter's lock for up to 0.1 ms. A thread that holds it for 100 ms delays a step by as much, which asks for it
# after each of some hundred calls.
MANY_PARTS = 48
# Number of large bodies that are read at the same time, and likewise of chats. One more of each is reserved for tenants
# of which none is being read.
NUM_WORKERS = 2
# Niceness with which large bodies are read, so that the engine has priority on a busy machine; see nice(2).
LARGE_NICENESS = 10
# Methods of `BodyReader` that render the model's chat template.
_RENDERED = frozenset(
    {"chat", "message", "count_tokens", "response", "next_response", "given", "ollama_chat", "ollama_generate"}
)
# Memory that a process may keep between two bodies, beyond what it had at the start.
_KEPT_BYTES = 64 * 1024 * 1024
# Bytes of a body and its answer together from which the process returns freed memory afterwards.
_LARGE = 256 * 1024
_started_ahead: list[HelperProcess] = []


class ReaderPool:
    """Runs a `BodyReader` on the event loop, in a thread or in a process, depending on the body.

    Args:
        seconds: time limit for reading one large body or one chat.
        memory: memory limit for it, in bytes.
    """

    def __init__(self, reader: BodyReader, seconds: float, memory: int) -> None:
        self._reader = reader
        self._seconds = seconds
        self._memory = memory
        self._medium = TenantThreads(NUM_WORKERS, "octavo-body")
        self._large = TenantThreads(NUM_WORKERS, "octavo-large-body")
        self._chats = TenantThreads(NUM_WORKERS, "octavo-chat")
        self._idle: list[ReaderProcess] = []
        self._lock = threading.Lock()

    @property
    def reader(self) -> BodyReader:
        return self._reader

    async def read(self, method: str, *parts: bytes, tenant: str = "") -> Any:
        """Return what `BodyReader.<method>` returns for the joined parts; raise what it raises.

        Long parts are only joined for the process that reads them: until then, all bodies that continue the same
        response share its items.
        """
        size = sum(map(len, parts))
        # Large bodies are not searched for their parts: counting them in 16 MB takes 8 ms.
        if size >= MEDIUM_BODY or (method not in _RENDERED and sum(map(_num_parts, parts)) >= MANY_PARTS):
            return await self._large.run(tenant, partial(self._read, method, parts, is_niced=True))
        is_rendered = method in _RENDERED or (method == "tokenize" and any(map(_may_have_messages, parts)))
        if is_rendered and not (size < SMALL_BODY and self._reader.has_plain_template):
            return await self._chats.run(tenant, partial(self._read, method, parts))
        work = partial(getattr(self._reader, method), b"".join(parts))
        return work() if size < SMALL_BODY else await self._medium.run(tenant, work)

    def warm_up(self) -> None:
        """Start a process in the background, so that the first chat need not wait for it."""
        self._chats.start(lambda: self._release(self._take()))

    def _read(self, method: str, parts: tuple[bytes, ...], *, is_niced: bool = False) -> Any:
        process = self._take()
        try:
            return process.read(method, parts, self._seconds, is_niced=is_niced)
        except (HelperEndedError, OSError) as error:
            process.close()
            logger.error("the process that read a body has ended: %s", error)
            raise INTERNAL_ERROR() from error
        finally:
            self._release(process)

    def _take(self) -> ReaderProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:  # the OOM killer may have ended it meanwhile
                    return process
            started = _started_ahead.pop() if _started_ahead else None
        return ReaderProcess(pickle.dumps(self._reader, pickle.HIGHEST_PROTOCOL), self._memory, started)

    def _release(self, process: ReaderProcess) -> None:
        if process.is_bloated:
            process.close()
        elif process.is_alive:
            with self._lock:
                self._idle.append(process)


def _num_parts(raw: bytes) -> int:
    """Return how many strings and lists a body may have."""
    return raw.count(b'"') // 2 + raw.count(b"[")


def _may_have_messages(raw: bytes) -> bool:
    """Return whether a body may have the field `messages`, possibly with escaped letters."""
    return b'"messages"' in raw or b"\\u" in raw


def start_ahead(source: ModelSource) -> None:
    """Start a process for the next pool, whose reader will have this model's tokenizer."""
    _started_ahead.append(HelperProcess(__name__, first=[pickle.dumps(TokenizerFiles.of(source))]))


class ReaderProcess:
    """The server's handle of one reading process. Its methods block; only one thread may use it at a time.

    Args:
        reader: a pickled `BodyReader`.
        memory: bytes that the process may allocate beyond those that it starts with.
        started: a process that has been started ahead.
    """

    def __init__(self, reader: bytes, memory: int, started: HelperProcess | None = None) -> None:
        self._memory = memory
        self._process = started if started and started.is_usable else HelperProcess(__name__, first=[b""])
        self._process.send_first(memory.to_bytes(8, "little"), reader)
        self._first_rss: int | None = None  # unknown until it is ready

    def read(self, method: str, parts: Sequence[bytes], seconds: float, *, is_niced: bool = False) -> Any:
        """Return what `BodyReader.<method>(raw)` returns; raise what it raises.

        Args:
            parts: the body, in parts that are joined by the process.
            is_niced: whether it is read with `LARGE_NICENESS`.

        Raises:
            ApiError: reading took longer than `seconds`, not counting the start of the process, or more memory than
                allowed; the process has been ended.
            HelperEndedError, OSError: the process ended for another reason, or could not start.
        """
        self._process.wait_until_ready()
        if self._first_rss is None:
            self._first_rss = self._process.rss
        try:
            answer = self._process.ask(seconds, [bytes([is_niced])], [method.encode()], parts)
        except HelperTooSlowError:
            raise BODY_TOO_SLOW(seconds) from None
        except HelperEndedError as error:
            if error.aborted:
                raise BODY_TOO_COSTLY(self._memory) from None
            raise
        succeeded, value = pickle.loads(answer)
        if succeeded:
            return value
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
    """Run the process: read bodies until the input ends. It aborts where memory runs out, as Rust does by itself."""
    requests, answers = requests_and_answers()
    try:
        if files := receive(requests):
            read_ahead(pickle.loads(files))
        memory = int.from_bytes(receive(requests), "little")
        reader = pickle.loads(receive(requests))
        niced = ThreadPoolExecutor(1, initializer=_lower_priority)
        # Started now, because its stack of 8 MiB would count towards the limit.
        niced.submit(lambda: None).result()
        limit_memory(memory)
        send(answers, b"")
        while True:
            is_niced, method, raw = any(receive(requests)), receive(requests).decode(), receive(requests)
            answer = niced.submit(_answer, reader, method, raw).result() if is_niced else _answer(reader, method, raw)
            send(answers, answer)
            is_large = len(raw) + len(answer) >= _LARGE
            del raw, answer
            if is_large:
                return_free_memory()
    except (EOFError, BrokenPipeError):
        return
    except MemoryError:
        os.abort()


def _lower_priority() -> None:
    """Add to the niceness of the calling thread only, as Linux allows; no process may take its own back."""
    if sys.platform == "linux":  # elsewhere a niceness is the whole process's, and for good
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + LARGE_NICENESS, 19))


def _answer(reader: Any, method: str, raw: bytes) -> bytes:
    try:
        return pickle.dumps((True, getattr(reader, method)(raw)), protocol=pickle.HIGHEST_PROTOCOL)
    except OctavoError as error:
        return pickle.dumps((False, error), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        # The second: a Rust binding met a null pointer because Python had no memory. Nothing is answered, because what
        # filled the memory is still held here.
        if isinstance(error, MemoryError) or type(error).__name__ == "PanicException":
            os.abort()
        if not isinstance(error, Exception):
            raise
        # Logged here, with its traceback; the client only learns what `to_api_error` lets it know.
        return pickle.dumps((False, to_api_error(error)), protocol=pickle.HIGHEST_PROTOCOL)
