"""Use of a KV cache's memory, read from the manager's own tables after every step.

The terms are those of the PagedAttention paper (Kwon et al., SOSP 2023, section 3.1 and figures 2 and 3). A *slot* is
the space for one token's keys and values. Every slot of the budget is in exactly one of these states:

    tokens      holds a computed token of a sequence; a slot shared by several sequences counts once
    reserved    in a block that a sequence holds, empty, and to be filled by a later token of that sequence
    internal    in a block that a sequence holds, and never to be filled: internal fragmentation
    cached      in a block that no sequence holds, but that a prefix could use again
    external    free although a sequence waits for memory: fewer blocks than it needs, or kept by admission for those
                that run; also the rest of the budget below a block
    idle        free, and no sequence waits for it

    three blocks of 16, 37 tokens now, 43 in the end:   tttttttttttttttt tttttttttttttttt tttttrrrrrriiiii

*Waste* is (reserved + internal) / slots held; the paper's figure 2 plots the share of the whole budget instead.

The length of a request's output is known, because a benchmark ignores end-of-sequence; the last token's keys and values
are never stored. Reading the tables takes time proportional to the number of sequences, not to their lengths, because
all blocks before the first unfinished one are full.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from octavo.kvcache.block import BlockId
from octavo.request import Request, Sequence, SequenceStatus
from octavo.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Slots:
    """Numbers of slots by state; see the module."""

    tokens: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    cached: float = 0.0
    external: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.held + self.cached + self.external + self.idle

    @property
    def held(self) -> float:
        return self.tokens + self.reserved + self.internal

    def add(self, other: Slots, times: float) -> None:
        for state in fields(self):
            setattr(self, state.name, getattr(self, state.name) + times * getattr(other, state.name))

    def shares(self) -> dict[str, float]:
        """Return each state's share of all slots, 0 to 1; all are 0 if there are no slots."""
        total = self.total or 1.0
        return {state: slots / total for state, slots in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Moment:
    """The cache after one step.

    Attributes:
        blocks_held: number of blocks held by sequences, shared ones counted once.
        memory_is_short: whether a sequence waits only for memory, and not for its turn in a step full of other prompts,
            or for `max_num_seqs`.
    """

    slots: Slots
    num_running: int
    blocks_held: int
    memory_is_short: bool


class MemoryObserver:
    """Observes the cache of one scheduler through its public interface and that of its manager.

    Args:
        budget_bytes: memory for blocks of sequences, without the null block: a contiguous allocator would have none,
            and with `max_model_len` tokens it would be large.
    """

    def __init__(self, scheduler: Scheduler, budget_bytes: int) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._requests: list[Request] = []
        spec, pool = self._kv.spec, self._kv.pool
        left = budget_bytes - (pool.num_blocks - 1) * spec.block_bytes
        slots_per_byte = spec.block_size / spec.block_bytes
        self._never_a_block = left % spec.block_bytes * slots_per_byte
        self._not_asked_for = left // spec.block_bytes * spec.block_size
        self._all, self._short = _Average(), _Average()

    def watch(self, request: Request) -> None:
        """Track a request from now until it finishes."""
        self._requests.append(request)

    def observe(self, seconds: float) -> None:
        """Record the state of the cache after a step that took `seconds`."""
        self._requests = [request for request in self._requests if not request.finished]
        moment = self.moment()
        self._all.add(moment, seconds)
        if moment.memory_is_short:
            self._short.add(moment, seconds)

    def usage(self) -> dict[str, Any]:
        """Return averages over the time so far.

        shares          of the budget by state, while memory was short, or over the whole run if it never was
        waste           share of the held slots that held no token, over the whole run; its two parts by name
        running_mean    mean number of running sequences, over the same time as `shares`
        running_max     maximum number of running sequences after any step
        short_share     share of the time in which memory was short
        """
        every, busy = self._all, self._short if self._short.seconds else self._all
        slots, held = every.slots, every.slots.held or 1.0
        return {
            "shares": busy.slots.shares(),
            "waste": (slots.reserved + slots.internal) / held,
            "waste_reserved": slots.reserved / held,
            "waste_internal": slots.internal / held,
            "running_mean": busy.running / (busy.seconds or 1.0),
            "running_max": every.running_max,
            "short_share": self._short.seconds / (every.seconds or 1.0),
        }

    def moment(self) -> Moment:
        """Return the current state of the cache."""
        pool, size = self._kv.pool, self._kv.spec.block_size
        sequences = [seq for request in self._requests for seq in request.sequences]
        running = [seq for seq in sequences if seq.status is SequenceStatus.RUNNING]
        unfinished = self._unfinished_blocks(running)
        reserved = sum(min(final, size) - filled for filled, final in unfinished.values())
        internal = sum(size - min(final, size) for _, final in unfinished.values())
        held = pool.num_active * size
        slots = Slots(held - reserved - internal, reserved, internal, cached=pool.num_cached * size)
        waiting = [seq for seq in sequences if seq.status is SequenceStatus.WAITING]
        room = self._scheduler.num_running < self._scheduler.config.max_num_seqs
        memory_is_short = room and any(map(self._is_refused, waiting))
        if memory_is_short:
            slots.external = pool.num_free * size
        else:
            slots.idle = pool.num_free * size
        slots.external += self._never_a_block
        slots.idle += self._not_asked_for
        return Moment(slots, len(running), pool.num_active, memory_is_short)

    def _unfinished_blocks(self, running: list[Sequence]) -> dict[BlockId, tuple[int, int]]:
        """Return (slots filled, slots filled in the end) of each unfinished block.

        If several sequences hold a block, the one that will fill it most counts.
        """
        size = self._kv.spec.block_size
        blocks: dict[BlockId, tuple[int, int]] = {}
        for seq in running:
            final = seq.num_prompt_tokens + (seq.request.params.max_tokens or 1) - 1
            first = seq.num_computed // size
            for table in self._kv.tables(seq):
                for index in range(first, len(table)):
                    filled = max(0, seq.num_computed - index * size)
                    before = blocks.get(table[index], (0, 0))
                    blocks[table[index]] = (max(before[0], filled), max(before[1], final - index * size))
        return blocks

    def _is_refused(self, seq: Sequence) -> bool:
        """Return whether admission has refused a waiting sequence for lack of blocks."""
        return seq.state.refusal is not None or not self._kv.pool.num_available


class _Average:
    """Sums over time, weighted by the seconds of each step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slots = Slots()
        self.running = 0.0
        self.running_max = 0

    def add(self, moment: Moment, seconds: float) -> None:
        self.seconds += seconds
        self.slots.add(moment.slots, seconds)
        self.running += seconds * moment.num_running
        self.running_max = max(self.running_max, moment.num_running)
