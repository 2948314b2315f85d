"""The machines that a model is split among, each with the same number of ranks: what carries bytes between them.

    machine 0                                    machine 1 …  (`serve_ranks` in `engine/ranks.py`)
      a store at master_addr:master_port <─────    number of the group's start, signs of life
      join  <─────── a TCP connection ─────────>   join: to every other machine
            what each was started with, sizes
      a step  ────────── broadcast ────────────>   the message of each step (`csrc/rank_steps.h`)
            <────────── all-gather ────────────>   columns of activations, four times a layer

Whatever fails ends the group. Machine 0 starts it again, in the same process; another machine ends, and whatever
supervises it starts it again. What goes over the wire is numbers and activations, in the clear: the network must be
trusted. Plain connections, because a step over gloo takes five times as long (a token of SmolLM2 between two processes:
42 to 57 ms over gloo, 7 to 10 like this).
"""

from __future__ import annotations

import json
import logging
import re
import select
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from importlib import import_module
from socket import (
    IPPROTO_TCP,
    MSG_WAITALL,
    SOCK_DGRAM,
    SOCK_STREAM,
    TCP_NODELAY,
    create_connection,
    create_server,
    getaddrinfo,
    socket,
)
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ExecutorError

logger = logging.getLogger(__name__)

SILENT_S = 20.0
"""After how long without a sign of life a machine counts as lost while no step is computed."""

FIRST_JOIN_S = 3600.0
JOIN_AGAIN_S = 120.0
"""How long machines wait for each other; again, for those that their supervisors restart."""

_SIGN_S = 1.0
_GREETING_S = 5.0


class Machines:
    """One machine's connections to the others. Methods block, and are for one thread.

    Args:
        answer_s: how long a machine may take within a step.

    Attributes:
        link: `gather` and `broadcast` of what the first rank of this machine gives; they raise `ExecutorError`.
    """

    def __init__(self, config: EngineConfig, answer_s: float) -> None:
        # Imported only here: it takes a tenth of a second. Its types do not name what it is documented to have.
        self._torch: Any = import_module("torch.distributed")
        if not self._torch.is_available():
            raise ConfigError("nnodes needs a torch that was built with torch.distributed")
        self._machine, self._count = config.node_rank, config.nnodes
        self._place = f"{config.master_addr}:{config.master_port}"
        self._host = config.master_addr if self._machine == 0 else _own_address(config)
        self._answer_s = answer_s
        self._others: dict[int, socket] = {}  # connections to the other machines
        self._start = 0
        self._watching = threading.Event()
        self._join_s = FIRST_JOIN_S
        try:
            self._store = self._torch.TCPStore(
                config.master_addr,
                config.master_port,
                is_master=self._machine == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=FIRST_JOIN_S),
            )
        except RuntimeError as error:
            what = "listen" if self._machine == 0 else "reach machine 0"
            raise ExecutorError(f"cannot {what} at {self._place}: {_reason(error)}") from error
        self.link = (self._gather, self._broadcast)

    def join(self) -> None:
        """Connect to every other machine again; raises `ExecutorError` if one does not come in time."""
        self.leave()
        self._store.set_timeout(timedelta(seconds=self._join_s))
        ends, self._join_s = time.monotonic() + self._join_s, JOIN_AGAIN_S
        try:
            self._start = self._next_start()
            self._connect(self._torch.PrefixStore(f"start {self._start}", self._store), ends)
        except (RuntimeError, OSError) as error:
            self.leave()
            raise ExecutorError(f"the {self._count} machines do not meet at {self._place}: {_reason(error)}") from error
        logger.info("machine %d of %d has joined the others", self._machine, self._count)

    def _connect(self, met: Any, ends: float) -> None:
        """Connect to the machines before this one, and accept those after it; raises OSError or RuntimeError.

        They prove that they know a token from the store.
        """
        family, *_, address = getaddrinfo(self._host, 0, type=SOCK_STREAM)[0]
        token = uuid.uuid4().bytes
        with create_server(address[:2], family=family, backlog=self._count) as listener:
            met.set(f"machine {self._machine}", json.dumps([*listener.getsockname()[:2], token.hex()]))
            for machine in range(self._machine):
                host, port, given = json.loads(met.get(f"machine {machine}"))
                other = create_connection((host, port), timeout=max(0.0, ends - time.monotonic()))
                self._others[machine] = other
                other.sendall(bytes.fromhex(given) + self._machine.to_bytes(4, "big"))
            while len(self._others) < self._count - 1:
                listener.settimeout(max(0.0, ends - time.monotonic()))
                other, _ = listener.accept()
                other.settimeout(_GREETING_S)
                greeting = b""
                with suppress(TimeoutError):
                    greeting = other.recv(len(token) + 4, MSG_WAITALL)
                machine = int.from_bytes(greeting[len(token) :], "big")
                if greeting[: len(token)] != token or not self._machine < machine < self._count:
                    other.close()  # of another client that has found the port
                    continue
                self._others[machine] = other
        for other in self._others.values():
            other.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            other.setblocking(False)

    def _next_start(self) -> int:
        """Machine 0 numbers the starts; each other machine takes part in one once."""
        if self._machine == 0:
            return int(self._store.add("starts", 1))
        own, key = uuid.uuid4().hex, f"machine {self._machine} in "
        pause = threading.Event()
        while True:
            start = int(self._store.add("starts", 0))
            if start and self._store.compare_set(f"{key}{start}", "", own) == own.encode():
                return start
            pause.wait(0.2)

    def agree(self, description: str, sizes: Sequence[int]) -> list[int]:
        """Return the minimum of all machines' sizes, each at least 0.

        Raises:
            ConfigError: a machine runs something else, by its description.
            ExecutorError: a machine was lost.
        """
        digest = int.from_bytes(blake2b(description.encode(), digest_size=7).digest(), "little")
        numbers = struct.Struct(f"<{1 + len(sizes)}q")
        every = bytearray(numbers.size * self._count)
        self._gather(memoryview(numbers.pack(digest, *sizes)), memoryview(every), FIRST_JOIN_S)
        received = list(numbers.iter_unpack(every))
        for machine, (other, *_) in enumerate(received):
            if other != received[0][0]:
                raise ConfigError(
                    f"machine {machine} was started with another model, or with other options, than machine 0: "
                    "all but node_rank, num_threads and memory sizes must be the same"
                )
        return [min(each) for each in zip(*(rest for _, *rest in received), strict=True)]

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` in another thread, with the reason, when another machine is silent for too long."""
        self._watching = threading.Event()
        arguments = (self._store.clone(), self._start, self._watching, on_loss)
        threading.Thread(target=self._watch, args=arguments, name="octavo-machines", daemon=True).start()

    def _watch(self, store: Any, start: int, stopped: threading.Event, on_loss: Callable[[str], None]) -> None:
        """Machine 0 watches all others, and each of these watches machine 0."""
        store.set_timeout(timedelta(seconds=SILENT_S))
        others = range(1, self._count) if self._machine == 0 else [0]
        signs, silent = dict.fromkeys(others, -1), dict.fromkeys(others, 0.0)
        while not stopped.wait(_SIGN_S):
            try:
                store.add(f"sign of {self._machine} in {start}", 1)
                now = {machine: store.add(f"sign of {machine} in {start}", 0) for machine in others}
                begun = store.add("starts", 0)
            except RuntimeError as error:
                return None if stopped.is_set() else on_loss(f"machine 0 is lost: {_reason(error)}")
            for machine in others:
                silent[machine] = silent[machine] + _SIGN_S if now[machine] == signs[machine] else 0.0
                if silent[machine] >= SILENT_S:
                    return on_loss(f"machine {machine} has given no sign of life for {SILENT_S:.0f} s")
            if begun != start:
                return None if stopped.is_set() else on_loss("machine 0 has started the group again")
            signs = now
        return None

    def leave(self) -> None:
        """Close the connections, so that the other machines see that the group has ended."""
        self._watching.set()
        for other in self._others.values():
            other.close()
        self._others = {}

    def _gather(self, own: memoryview, every: memoryview, seconds: float | None = None) -> None:
        size = len(own)
        parts = [every[machine * size : (machine + 1) * size] for machine in range(self._count)]
        parts[self._machine][:] = own
        received = {machine: parts[machine] for machine in self._others}
        self._exchange(dict.fromkeys(self._others, own), received, self._answer_s if seconds is None else seconds)

    def _broadcast(self, message: memoryview) -> None:
        if self._machine == 0:
            self._exchange(dict.fromkeys(self._others, message), {}, self._answer_s)
        else:
            self._exchange({}, {0: message}, None)

    def _exchange(self, sent: dict[int, memoryview], received: dict[int, memoryview], seconds: float | None) -> None:
        """Send bytes to machines while receiving others; raises `ExecutorError` if a machine is lost, or if nothing
        arrives or leaves for so many seconds.
        """
        if not self._others:
            raise ExecutorError("the machines have not joined")
        sent = {machine: content for machine, content in sent.items() if content}
        received = {machine: room for machine, room in received.items() if room}
        try:
            while True:
                self._move(sent, self._send)
                self._move(received, self._receive)
                if not sent and not received:
                    return
                self._wait(sent, received, seconds)
        except OSError as error:
            raise ExecutorError(f"another machine is lost: {error.strerror or error}") from error

    @staticmethod
    def _move(parts: dict[int, memoryview], move: Callable[[int, memoryview], int]) -> None:
        """Send and receive as many bytes as connections allow now; removes the machines that are done."""
        for machine, part in list(parts.items()):
            with suppress(BlockingIOError):
                parts[machine] = part[move(machine, part) :]
                if not parts[machine]:
                    del parts[machine]

    def _send(self, machine: int, content: memoryview) -> int:
        return self._others[machine].send(content)

    def _receive(self, machine: int, room: memoryview) -> int:
        if not (count := self._others[machine].recv_into(room)):
            raise ConnectionResetError(f"Connection closed by machine {machine}")
        return count

    def _wait(self, sent: dict[int, memoryview], received: dict[int, memoryview], seconds: float | None) -> None:
        """Wait until a connection can go on; raises TimeoutError."""
        waiting = select.poll()
        for machine in sent.keys() | received.keys():
            events = (select.POLLOUT if machine in sent else 0) | (select.POLLIN if machine in received else 0)
            waiting.register(self._others[machine], events)
        if not waiting.poll(None if seconds is None else seconds * 1000):
            late = min(sent.keys() | received.keys())
            raise TimeoutError(f"machine {late} has not answered for {seconds:g} s")


def _own_address(config: EngineConfig) -> str:
    """Return the address of this machine from which it reaches machine 0."""
    try:
        family, *_, address = getaddrinfo(config.master_addr, config.master_port, type=SOCK_DGRAM)[0]
        with socket(family, SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"master_addr: cannot reach {config.master_addr}: {error}") from error


def _reason(error: Exception) -> str:
    """Return the error of the store or the system, without its source line and advice."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S*\] *", "", line).partition(". This ")[0]
