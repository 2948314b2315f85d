"""The machines that a model is split among, each with the same number of ranks: what carries bytes between them.

    machine 0                                    machine 1 …  (`serve_ranks` in `engine/ranks.py`)
      a store at master_addr:master_port <─────    number of the group's start, signs of life
      join  <────────── gloo ──────────────────>   join: connects to every other machine
            what each was started with, sizes
      a step  ────────── broadcast ────────────>   the message of each step (`csrc/rank_steps.h`)
            <────────── all-gather ────────────>   columns of activations, four times a layer

Whatever fails ends the group. Machine 0 starts it again, in the same process; another machine ends, and whoever
supervises it starts it again. What goes over the wire is numbers and activations, in the clear and without
authentication: the network must be trusted, as gloo's must be.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from importlib import import_module
from socket import SOCK_DGRAM, getaddrinfo, socket
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ExecutorError

logger = logging.getLogger(__name__)

SILENT_S = 20.0
"""After how long without a sign of life a machine counts as lost while no step is computed."""

FIRST_JOIN_S = 3600.0
JOIN_AGAIN_S = 120.0
"""How long machines wait for each other; again, for those that whoever supervises them starts again."""

_EVER = timedelta(days=1000)
_SIGN_S = 1.0


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
        self._answer = timedelta(seconds=answer_s)
        self._group: Any = None
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
        """Connect to every other machine anew; raises `ExecutorError` if one does not come in time."""
        self.leave()
        gloo = self._torch.ProcessGroupGloo
        self._store.set_timeout(timedelta(seconds=self._join_s))
        self._join_s = JOIN_AGAIN_S
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = self._store.timeout
        options._threads = 1
        try:
            self._start = self._next_start()
            met = self._torch.PrefixStore(f"start {self._start}", self._store)
            self._group = gloo(met, self._machine, self._count, options)
        except RuntimeError as error:
            raise ExecutorError(f"the {self._count} machines do not meet at {self._place}: {_reason(error)}") from error
        logger.info("machine %d of %d has joined the others", self._machine, self._count)

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
        """Return the least of all machines' sizes, each of which is at least 0.

        Raises:
            ConfigError: a machine has another description of what it runs.
            ExecutorError: a machine was lost.
        """
        digest = int.from_bytes(blake2b(description.encode(), digest_size=7).digest(), "little")
        own = torch.tensor([digest, *sizes], dtype=torch.int64)
        every = torch.empty(self._count, len(own), dtype=torch.int64)
        self._carry(lambda group: group.allgather(list(every), own, timedelta(seconds=FIRST_JOIN_S)))
        for machine, other in enumerate(every[:, 0].tolist()):
            if other != every[0, 0]:
                raise ConfigError(
                    f"machine {machine} was started with another model, or with other options, than machine 0: "
                    "all but node_rank, num_threads and memory sizes must be the same"
                )
        least: list[int] = every[:, 1:].amin(0).tolist()
        return least

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` in another thread, with the reason, when another machine has given no sign of life."""
        self._watching = threading.Event()
        arguments = (self._store.clone(), self._start, self._watching, on_loss)
        threading.Thread(target=self._watch, args=arguments, name="octavo-machines", daemon=True).start()

    def _watch(self, store: Any, start: int, stopped: threading.Event, on_loss: Callable[[str], None]) -> None:
        """Machine 0 looks for signs of all others, and each of these for machine 0's."""
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
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.shutdown()
            self._group = None

    def _gather(self, own: memoryview, every: memoryview) -> None:
        received, sent = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (every, own))
        options = self._torch.distributed_c10d.AllgatherOptions()
        options.timeout = self._answer
        self._carry(lambda group: group._allgather_base(received, sent, options))  # the public one copies `received`

    def _broadcast(self, message: memoryview) -> None:
        content = torch.frombuffer(message, dtype=torch.uint8)
        # Machine 0 waits for the others to take it; they wait for the next step as long as it takes.
        limit = self._answer if self._machine == 0 else _EVER
        self._carry(lambda group: group.broadcast(content, 0, limit))

    def _carry(self, begin: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise ExecutorError("the machines have not joined")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            raise ExecutorError(f"another machine is lost: {_reason(error)}") from error


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
    """Return what gloo or the store says, without its source line and the advice after it."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S*\] *", "", line).partition(". This ")[0]
