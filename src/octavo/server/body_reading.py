"""Reads request bodies where reading one does not make other requests wait.

A body of a kilobyte is read on the event loop; a larger one in a thread, where only its parsing holds the interpreter's
lock, for a millisecond; a large one in a process of its own (`body_worker`). So is every chat: its template comes with
the model, and may loop or fill the memory.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.server.body_worker import BodyWorker
from octavo.server.errors import ApiError
from octavo.server.reading import BodyReader
from octavo.server.turns import Turns

logger = logging.getLogger("octavo.server")

# Bytes of a body that are read on the event loop, and in a thread: a millisecond or two of either, at most.
SMALL_BODY = 1024
MEDIUM_BODY = 64 * 1024
# Large bodies that are read at once; and chats, which have processes of their own. One more of each is for a tenant of
# which none is being read.
NUM_WORKERS = 2
# How much the processes of large bodies give way to the engine on a busy machine (see nice(2)).
LARGE_NICENESS = 10
# What makes a prompt by the model's chat template.
_RENDERED = frozenset({"chat", "message", "count_tokens", "response", "next_response"})


class BodyReading:
    """Runs a `BodyReader` where it keeps nobody waiting.

    Args:
        seconds: how long reading one large body, or one chat, may take.
        memory: bytes that it may take.
    """

    def __init__(self, reader: BodyReader, seconds: float, memory: int) -> None:
        self._reader = reader
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "octavo-body")
        # Chats do not wait for large bodies.
        self._large = _Workers("octavo-large-body", reader, seconds, memory, LARGE_NICENESS)
        self._chats = _Workers("octavo-chat", reader, seconds, memory)

    @property
    def reader(self) -> BodyReader:
        return self._reader

    async def read(self, method: str, raw: bytes, tenant: str = "") -> Any:
        """What `BodyReader.<method>(raw)` returns; raises what it raises."""
        if len(raw) >= MEDIUM_BODY:
            return await self._large.read(method, raw, tenant)
        if method in _RENDERED or (method == "tokenize" and b'"messages"' in raw):
            return await self._chats.read(method, raw, tenant)
        if len(raw) < SMALL_BODY:
            return getattr(self._reader, method)(raw)
        return await asyncio.get_running_loop().run_in_executor(self._threads, getattr(self._reader, method), raw)

    def warm_up(self) -> None:
        """Start a process for the first chat. Waits for nothing."""
        self._chats.start_one()


class _Workers:
    """Processes that read the bodies of tenants in turn, started when they are needed."""

    def __init__(self, name: str, reader: BodyReader, seconds: float, memory: int, niceness: int = 0) -> None:
        self._reader = reader
        self._seconds = seconds
        self._memory = memory
        self._niceness = niceness
        self._turns = Turns(NUM_WORKERS)
        self._threads = ThreadPoolExecutor(NUM_WORKERS + 1, name)
        self._idle: list[BodyWorker] = []
        self._lock = threading.Lock()

    async def read(self, method: str, raw: bytes, tenant: str) -> Any:
        await self._turns.take(tenant)
        reading = asyncio.get_running_loop().run_in_executor(self._threads, self._read, method, raw)
        # It holds its place until it ends, whether anybody waits for it or not.
        reading.add_done_callback(lambda _: self._turns.give_back(tenant))
        return await asyncio.shield(reading)

    def start_one(self) -> None:
        self._threads.submit(lambda: self._release(self._take()))

    def _read(self, method: str, raw: bytes) -> Any:
        worker = self._take()
        try:
            return worker.read(method, raw, self._seconds)
        except (EOFError, OSError) as error:
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

    def _take(self) -> BodyWorker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:  # the system may have ended it meanwhile, for want of memory
                    return worker
        reader = pickle.dumps(self._reader, protocol=pickle.HIGHEST_PROTOCOL)
        return BodyWorker(reader, self._memory, self._niceness)

    def _release(self, worker: BodyWorker) -> None:
        if worker.is_bloated:
            worker.close()
        elif worker.is_alive:
            with self._lock:
                self._idle.append(worker)
