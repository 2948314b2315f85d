"""Hands blocks in host memory to other servers, which ask as they would ask a Redis that can only be read.

    neighbour ── STRLEN octavo:NAMESPACE:KEY ───> Lender: is it in host memory?
              <─ header, payload, signature ─────        GETRANGE octavo:NAMESPACE:KEY 0 -1

The namespace is a keyed hash (`remote.name_prefix`), so a client that can name a block has the secret, and serves the
same weights, codec and layout. Keys of blocks cover the tenant's scope, and nothing lists them: a server can only ask
for what its own requests' tokens and tenants hash to.

The engine's thread never waits for any of this. A block is sent from its slot without a hold, and the slot may be given
to another block meanwhile: if before it is signed, the block is reported missing; if after, what arrives does not match
the signature and is a miss there.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO

from octavo.errors import ConfigError
from octavo.kvcache.block import HostBlockId
from octavo.kvcache.hashing import DIGEST_BYTES
from octavo.kvcache.host_memory import HostMemory, Lent
from octavo.tiers.header import HEADER_BYTES
from octavo.tiers.remote import SIGNATURE_BYTES, name_prefix, signed, signing_key

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 32
"""Connections at a time. Each has one block on its way at most."""

MOST_OF_A_PEER = 8
"""Connections from one address at a time."""

IDLE_SECONDS = 60.0
SEND_SECONDS = 5.0
"""Time in which a neighbour must have taken a block, before it is left."""

_MOST_ARGUMENTS = 8
_MOST_ARGUMENT_BYTES = 256
# Sends small pieces together with what follows.
_MORE = getattr(socket, "MSG_MORE", 0)


class Lender:
    """Answers neighbours, in a thread for each connection.

    Args:
        address: `HOST:PORT` to listen at; port 0 takes a free one.
        row: returns the memory of a slot.
        fingerprint: 16 bytes that identify the weights, dtype, codec and block size.

    Attributes:
        address: `HOST:PORT` that is listened at.
        num_lent: blocks that were handed out.

    Raises:
        ConfigError: the address cannot be listened at.
    """

    def __init__(
        self,
        address: str,
        memory: HostMemory,
        row: Callable[[HostBlockId], memoryview],
        fingerprint: bytes,
        secret: str,
    ) -> None:
        self.num_lent = 0
        self._is_closed = False
        self._memory = memory
        self._row = row
        self._fingerprint = fingerprint
        self._key = signing_key(secret)
        self._prefix = name_prefix(fingerprint, self._key)
        self._connections: dict[socket.socket, str] = {}  # with the peer's host
        self._lock = threading.Lock()
        # One thread signs at a time, so that neighbours take no more than one core from the engine.
        self._signing = threading.Lock()
        host, _, port = address.rpartition(":")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            raise ConfigError(f"kv_neighbours: cannot listen at {address}: {error}") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="octavo-lender", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("kv_neighbours: a connection could not be accepted: %s", error)
                time.sleep(1.0)
                continue
            with self._lock:
                held = Counter(self._connections.values())
                if held.total() >= MOST_CONNECTIONS or held[peer[0]] >= MOST_OF_A_PEER:
                    connection.close()
                    continue
                self._connections[connection] = peer[0]
            threading.Thread(target=self._serve, args=(connection,), name="octavo-lend", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(IDLE_SECONDS)
            with connection, connection.makefile("rb") as reader:
                for command in _commands(reader):
                    connection.settimeout(SEND_SECONDS)
                    self._answer(connection, command)
                    connection.settimeout(IDLE_SECONDS)
        except (OSError, ValueError) as error:
            logger.debug("kv_neighbours: a connection ends: %s", error)
        finally:
            with self._lock:
                del self._connections[connection]

    def _answer(self, connection: socket.socket, command: list[bytes]) -> None:
        match command:
            case [b"PING"]:
                connection.sendall(b"+PONG\r\n")
            case [b"STRLEN", name]:
                found = self._find(name)
                length = 0 if found is None else HEADER_BYTES + self._row(found.slot).nbytes + SIGNATURE_BYTES
                connection.sendall(b":%d\r\n" % length)
            case [b"GETRANGE", name, _, _]:
                self._send(connection, name)
            case _:
                connection.sendall(b"-ERR only PING, STRLEN and GETRANGE of a whole value are answered\r\n")

    def _send(self, connection: socket.socket, name: bytes) -> None:
        pieces: tuple[bytes | memoryview, ...] = ()
        if (found := self._find(name)) is not None:
            with self._signing:
                sealed = signed(self._fingerprint, self._key, found.label, self._row(found.slot))
                if self._memory.still_lends(found):
                    pieces, self.num_lent = sealed, self.num_lent + 1
        connection.sendall(b"$%d\r\n" % sum(map(len, pieces)), _MORE)
        for piece in pieces:
            connection.sendall(piece, _MORE)
        connection.sendall(b"\r\n")

    def _find(self, name: bytes) -> Lent | None:
        if not name.startswith(self._prefix) or len(name) != len(self._prefix) + 2 * DIGEST_BYTES:
            return None
        return self._memory.lend(bytes.fromhex(name[len(self._prefix) :].decode()))


def _commands(reader: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the commands of a connection until its end; raises ValueError for what is none, or too long."""
    while line := reader.readline(_MOST_ARGUMENT_BYTES):
        arguments = []
        for _ in range(_count(line, b"*", _MOST_ARGUMENTS)):
            size = _count(reader.readline(_MOST_ARGUMENT_BYTES), b"$", _MOST_ARGUMENT_BYTES)
            arguments.append(reader.read(size + 2)[:-2])
        yield arguments


def _count(line: bytes, mark: bytes, most: int) -> int:
    if line[:1] != mark or not 0 <= (count := int(line[1:])) <= most:
        raise ValueError(f"{line!r} is not a count of {mark.decode()} up to {most}")
    return count
