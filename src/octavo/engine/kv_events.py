"""Publishes the KV cache's events over ZeroMQ, in the form of vLLM's, which routers of several projects read.

    engine's thread ── publish ──> bounded queue ──> this thread ──PUB──> [topic][number][batch]
                    <── on_wanted (a snapshot) ──────────┘  └────ROUTER── the last batches, from a number on

A number is a `u64` in big-endian order, and a batch is msgpack: `[seconds, events, rank]`. The first number of a
process is its start in microseconds, so that a reader that goes on after a restart sees a gap and asks for what it
missed, which begins with `AllBlocksCleared`. While nothing changes, the last batch is repeated every second, so that a
reader that has just come, or has missed it, sees a gap too. Where batches cannot be sent again, because they were
dropped or the reader has fallen behind the last `buffer_steps`, all blocks are announced again, under the numbers that
follow.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from octavo.config_tables import KVEventsConfig
from octavo.errors import ConfigError
from octavo.kvcache.events import BlocksStored, CacheSnapshot, Event, KVEventLog

logger = logging.getLogger(__name__)

SCOPE_PREFIX = "dynamo-cache-salt:"
"""Precedes a block's scope among its extra keys: Dynamo's index hashes what follows into each block's own key."""

DEVICE_MEDIUM = "GPU"
"""vLLM's name for the memory that the model computes in, on every device."""

_END = (-1).to_bytes(8, "big", signed=True)
_BLOCKS_AT_ONCE = 256
_POLL_SECONDS = 0.05
_REPEAT_SECONDS = 1.0
_CLOSING_SECONDS = 1.0
_LOCAL = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")


def encoded_event(event: Event, block_size: int, form: str) -> list[Any] | dict[str, Any]:
    """Return an event as msgpack encodes it: "array" is the form of vLLM's releases, "map" has the fields' names."""
    if isinstance(event, BlocksStored):
        extra_keys = None
        if event.scope:
            extra_keys = [[SCOPE_PREFIX + event.scope], *[None] * (len(event.block_hashes) - 1)]
        fields: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": event.block_hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.token_ids,
            "block_size": block_size,
            "lora_id": None,
            "medium": DEVICE_MEDIUM,
            "lora_name": None,
            "extra_keys": extra_keys,
        }
        if form == "map" and extra_keys is None:
            del fields["extra_keys"]  # by name, vLLM leaves it out
    else:
        fields = {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": DEVICE_MEDIUM}
    return fields if form == "map" else list(fields.values())


def _cleared(form: str) -> list[Any] | dict[str, Any]:
    return {"type": "AllBlocksCleared"} if form == "map" else ["AllBlocksCleared"]


class NullPublisher:
    """Publishes nothing.

    Attributes:
        on_wanted: called by another thread when `publish` should be called soon, though no step is due.
    """

    def __init__(self) -> None:
        self.on_wanted: Callable[[], None] = lambda: None

    def publish(self) -> None:
        """Hand over what the log has collected since the last call; in the engine's thread, after each step."""

    def close(self) -> None:
        """Send what is left, which takes at most a second."""


class KVEventPublisher(NullPublisher):
    """Publishes without blocking the engine: a slow reader misses batches, and a full queue is emptied.

    Args:
        log: the cache's event log.

    Attributes:
        num_dropped: batches dropped because the queue was full, since the start.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, log: KVEventLog, block_size: int) -> None:
        import msgspec
        import zmq

        super().__init__()
        self._config = config
        self._log = log
        self._block_size = block_size
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._pub = _socket(self._context, zmq.PUB, config.hwm, config.endpoint)
        # As many as one request is answered with, because a ROUTER drops what exceeds its limit.
        most = config.buffer_steps + 2
        address = config.replay_endpoint
        self._router = None if address is None else _socket(self._context, zmq.ROUTER, most, address, binds=True)
        self._queue: queue.Queue[Sequence[Event] | CacheSnapshot | None] = queue.Queue(config.max_queue_size)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._first = self._next = time.time_ns() // 1000
        self._wants_snapshot = False
        self.num_dropped = 0
        self._send([_cleared(config.format)])
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        if self._wants_snapshot and not self._queue.full():
            self._wants_snapshot = False
            self._log.take()
            batch: Sequence[Event] | CacheSnapshot | None = self._log.snapshot()
        else:
            batch = self._log.take()
        if batch:
            try:
                self._queue.put_nowait(batch)
            except queue.Full:
                self.num_dropped += 1
                self._wants_snapshot = True

    def close(self) -> None:
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=_CLOSING_SECONDS)
            except queue.Full:
                logger.warning("%d batches of KV events were not sent before shutdown", self._queue.qsize())
            self._thread.join(_CLOSING_SECONDS)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while True:
            try:
                if self._router is not None and self._router.poll(0):
                    self._answer()
                batch = self._queue.get(timeout=_POLL_SECONDS)
                if batch is None:
                    return
                self._send_batch(batch)
            except queue.Empty:
                if self._wants_snapshot:
                    self.on_wanted()
                elif time.monotonic() - self._sent_at > _REPEAT_SECONDS:
                    self._send_last()
            except Exception:
                if self._context.closed:
                    return
                logger.exception("a batch of KV events was lost: announcing all blocks again")
                self._wants_snapshot = True

    def _send_batch(self, batch: Sequence[Event] | CacheSnapshot) -> None:
        form = self._config.format
        if not isinstance(batch, CacheSnapshot):
            self._send([encoded_event(event, self._block_size, form) for event in batch])
            return
        self._send([_cleared(form)])
        for events in batch.events(_BLOCKS_AT_ONCE):
            self._send([encoded_event(event, self._block_size, form) for event in events])

    def _send(self, events: list[Any]) -> None:
        payload = self._encode([time.time(), events, 0])
        self._buffer.append((self._next, payload))
        self._send_last()
        self._next += 1

    def _send_last(self) -> None:
        number, payload = self._buffer[-1]
        self._pub.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), payload))
        self._sent_at = time.monotonic()

    def _answer(self) -> None:
        """Send a reader the batches from the requested number on, and an end marker."""
        assert self._router is not None
        frames = self._router.recv_multipart()
        identity, wanted = frames[0], frames[-1]
        if len(wanted) != 8:
            logger.warning("a request for KV events is ignored: it must end with a frame of 8 bytes")
            return
        start = int.from_bytes(wanted, "big")
        for number, payload in self._buffer:
            if number >= start:
                self._router.send_multipart((identity, b"", number.to_bytes(8, "big"), payload))
        self._router.send_multipart((identity, b"", _END, b""))
        if self._buffer[0][0] > max(start, self._first):
            self._wants_snapshot = True


def _socket(context: Any, kind: int, most: int, address: str, *, binds: bool = False) -> Any:
    """Open a socket; one for events connects, as vLLM's does, unless the address is a pattern or this machine's own."""
    import zmq

    socket = context.socket(kind)
    socket.set_hwm(most)
    socket.linger = 0
    binds = binds or "*" in address or "::" in address or address.startswith(("ipc://", "inproc://", *_LOCAL))
    try:
        (socket.bind if binds else socket.connect)(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(f"kv_events_config: cannot use {address}: {error}") from error
    return socket
