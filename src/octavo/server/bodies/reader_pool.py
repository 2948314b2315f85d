"""Reads request bodies without making other requests wait.

A body below a kilobyte is read on the event loop; a medium one in a thread, where only its parsing holds the
interpreter's lock, for about a millisecond; a large one, or one of many parts, in a process of its own
(`reader_process`). Chats are always read in a process: their template comes with the model, and may loop or exhaust the
memory.
"""

from __future__ import annotations

import logging
import pickle
import threading
from functools import cached_property, partial
from typing import Any

from octavo.engine.turns import TenantThreads
from octavo.helper_process import HelperEndedError
from octavo.server.bodies.body_reader import BodyReader
from octavo.server.bodies.reader_process import ReaderProcess
from octavo.server.errors import ApiError

logger = logging.getLogger("octavo.server")

# Bodies below these sizes in bytes are read on the event loop and in a thread; either takes at most 1-2 ms.
SMALL_BODY = 1024
MEDIUM_BODY = 64 * 1024
# Number of strings and lists from which a body counts as large: each may be a prompt, and tokenising a prompt holds the
# interpreter's lock for up to 0.1 ms. A thread that holds it for 100 ms delays a step by as much, which asks for it
# after each of some hundred calls.
MANY_PARTS = 48
# Number of large bodies that are read at the same time, and likewise of chats, which have their own processes. One more
# of each is reserved for tenants of which none is being read.
NUM_WORKERS = 2
# Niceness of the processes that read large bodies, so that the engine has priority on a busy machine; see nice(2).
LARGE_NICENESS = 10
# Methods of `BodyReader` that render the model's chat template.
_RENDERED = frozenset(
    {"chat", "message", "count_tokens", "response", "next_response", "given", "ollama_chat", "ollama_generate"}
)


class ReaderPool:
    """Runs a `BodyReader` on the event loop, in a thread or in a process, depending on the body.

    Args:
        seconds: time limit for reading one large body or one chat.
        memory: memory limit for it, in bytes.
    """

    def __init__(self, reader: BodyReader, seconds: float, memory: int) -> None:
        self._reader = reader
        self._threads = TenantThreads(NUM_WORKERS, "octavo-body")
        # Separate pools, so that chats do not wait for large bodies.
        self._large = _Workers("octavo-large-body", reader, seconds, memory, LARGE_NICENESS)
        self._chats = _Workers("octavo-chat", reader, seconds, memory)

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
            return await self._large.read(method, parts, tenant)
        if method in _RENDERED or (method == "tokenize" and any(map(_may_have_messages, parts))):
            return await self._chats.read(method, parts, tenant)
        work = partial(getattr(self._reader, method), b"".join(parts))
        return work() if size < SMALL_BODY else await self._threads.run(tenant, work)

    def warm_up(self) -> None:
        """Prepare for large bodies, and start a process for the first chat, in the background."""
        self._large.prepare()
        self._chats.start_one()


class _Workers:
    """Processes that read the bodies of tenants in turn, started when they are needed."""

    def __init__(self, name: str, reader: BodyReader, seconds: float, memory: int, niceness: int = 0) -> None:
        self._reader = reader
        self._seconds = seconds
        self._memory = memory
        self._niceness = niceness
        self._threads = TenantThreads(NUM_WORKERS, name)
        self._idle: list[ReaderProcess] = []
        self._lock = threading.Lock()

    async def read(self, method: str, parts: tuple[bytes, ...], tenant: str) -> Any:
        return await self._threads.run(tenant, partial(self._read, method, parts))

    @cached_property
    def _pickled(self) -> bytes:
        """The reader, pickled once: its tokenizer holds the interpreter's lock for 30 to 50 ms meanwhile."""
        return pickle.dumps(self._reader, protocol=pickle.HIGHEST_PROTOCOL)

    def prepare(self) -> None:
        """Pickle the reader, so that nobody waits for that when the first process is started."""
        self._pickled  # noqa: B018  cached

    def start_one(self) -> None:
        self._threads.start(lambda: self._release(self._take()))

    def _read(self, method: str, parts: tuple[bytes, ...]) -> Any:
        worker = self._take()
        try:
            return worker.read(method, parts, self._seconds)
        except (HelperEndedError, OSError) as error:
            worker.close()
            logger.error("the process that read a body has ended: %s", error)
            raise ApiError(
                500,
                "The server could not read this body; its log may say why.",
                type="server_error",
                code="internal_error",
            ) from error
        finally:
            self._release(worker)

    def _take(self) -> ReaderProcess:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:  # the OOM killer may have ended it meanwhile
                    return worker
        return ReaderProcess(self._pickled, self._memory, self._niceness)

    def _release(self, worker: ReaderProcess) -> None:
        if worker.is_bloated:
            worker.close()
        elif worker.is_alive:
            with self._lock:
                self._idle.append(worker)


def _num_parts(raw: bytes) -> int:
    """Return how many strings and lists a body may have."""
    return raw.count(b'"') // 2 + raw.count(b"[")


def _may_have_messages(raw: bytes) -> bool:
    """Return whether a body may have the field `messages`, possibly with escaped letters."""
    return b'"messages"' in raw or b"\\u" in raw
