"""Builds a `StepPlan` from scheduled sequences, and tracks what the runner knows about them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import NamedTuple

from octavo.errors import OctavoError
from octavo.kvcache.block import BlockCopy, BlockTransfer
from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceId
from octavo.scheduler.plan import (
    DRAWN,
    NewSequence,
    PromptPool,
    PromptScores,
    SamplingSnapshot,
    SequenceDropped,
    SequenceForked,
    StepPlan,
    TableDelta,
)


class PlannedRows(NamedTuple):
    """The live sequences of a plan.

    Attributes:
        sequences: the sequence of each row.
        draws: for each row after the streams, the sequences that draw a token after its last.
        drafts: by row, the tokens that it verifies, after each of which its sequence draws too.
    """

    plan: StepPlan
    sequences: list[Sequence]
    draws: list[tuple[Sequence, ...]]
    drafts: dict[int, tuple[int, ...]]

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each draw."""
        num_streams = self.plan.num_streams
        drawing = self.sequences[:num_streams]
        for row, draws in enumerate(self.draws, start=num_streams):
            drawing += draws[:1] * len(self.drafts.get(row, ()))
            drawing += draws
        return drawing


_NO_ROWS = PlannedRows(StepPlan(), [], [], {})


class PlanBuilder:
    """Collects the rows of one step after another; true if the current step has a row.

        add, add, … ── finish ──> plan in flight ─┬─ complete(plan)   the runner knows what it said
                                                  └─ abandon()        the runner's state is unknown
        pending         around both: a second plan, while the first is in flight
        drop, fork      between two steps or while one is collected, in the order in which they happen

    Attributes:
        sequences, num_streams, draws, drafts: rows of the step being collected, as in `PlannedRows`.
        num_tokens: number of tokens collected so far.
        copies: block copies to make before the step computes.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._block_size = kv.spec.block_size
        self._changes: list[SequenceForked | SequenceDropped] = []
        self._reset = True
        self._sent_grammars = False  # whether the runner may hold grammar states
        self._step = 0
        self._in_flight: deque[PlannedRows] = deque()  # two at most
        self._ahead = False
        self._clear()

    def _clear(self) -> None:
        self.sequences: list[Sequence] = []
        self.draws: list[tuple[Sequence, ...]] = []
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.num_streams = 0
        self.num_tokens = 0
        self.copies: list[BlockCopy] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._token_ids: list[int] = []
        self._sibling_seeds: dict[int, tuple[int, ...]] = {}
        self._scores: list[PromptScores] = []
        self._pools: list[PromptPool] = []
        self._new: list[NewSequence] = []
        self._tables: list[TableDelta] = []

    def __bool__(self) -> bool:
        return bool(self.sequences)

    @property
    def num_in_flight(self) -> int:
        """The number of plans whose results are awaited."""
        return len(self._in_flight)

    @contextmanager
    def pending(self, max_model_len: int) -> Iterator[int]:
        """Let the sequences in flight stand as they will once their step is done, to plan the step after it.

        Until the end of the block they have computed that step's tokens, and the token that each draws is `DRAWN`. One
        whose drawn token is its last for certain, because it reaches its maximum length, has nothing left to compute.

        Yields:
            The number of those that end.
        """
        rows, plan = self._in_flight[-1], self._in_flight[-1].plan
        num_ending, draws = 0, chain(repeat(True, plan.num_streams), map(bool, rows.draws))
        advanced: list[tuple[Sequence, int, bool]] = []
        for seq, start, length, has_drawn in zip(rows.sequences, plan.starts, plan.lengths, draws, strict=True):
            if seq.state.place is None:
                continue  # it has ended in the meantime
            goes_on = has_drawn and seq.num_tokens + 1 < seq.max_num_tokens(max_model_len)
            num_ending += has_drawn and not goes_on
            advanced.append((seq, start, goes_on))
            seq.num_computed = start + length
            if goes_on:
                seq.output_token_ids.append(DRAWN)
        self._ahead = True
        try:
            yield num_ending
        finally:
            self._ahead = False
            for seq, start, goes_on in advanced:
                seq.num_computed = start
                if goes_on:
                    seq.output_token_ids.pop()

    @property
    def in_flight(self) -> PlannedRows:
        """The rows of the plan whose result is awaited; of two plans, the first."""
        return self._in_flight[0] if self._in_flight else _NO_ROWS

    def add(
        self,
        seq: Sequence,
        num_new: int,
        draws: tuple[Sequence, ...],
        *,
        draft: tuple[int, ...] = (),
        copied: bool = False,
    ) -> None:
        """Add a row that computes the next `num_new` tokens of a sequence, whose tables have room for them.

        Args:
            draws: the sequences that draw the token after these; `seq` is the first.
            draft: tokens that may follow, to be verified, for which the tables have room too.
            copied: whether the block of the first of these tokens is a copy that the runner does not know yet.
        """
        start = seq.num_computed
        end = start + num_new
        self._send(seq, start, end + len(draft), copied=copied)
        if draft:
            self.drafts[len(self.sequences)] = draft
        if len(draws) > 1:
            self._sibling_seeds[len(self.sequences)] = tuple(sibling.seed for sibling in draws[1:])
        self.sequences.append(seq)
        self.draws.append(draws)
        self._starts.append(start)
        self._lengths.append(num_new + len(draft))
        self._token_ids.extend(seq.tokens(start, end))
        self._token_ids.extend(draft)
        self.num_tokens += num_new + len(draft)

    def add_streams(self, seqs: Iterable[Sequence], copied: Container[SequenceId]) -> list[Sequence]:
        """Add rows that compute the last token of each sequence and draw the next: `add` for many at once.

        They must be the first rows of the step; row i has draw i.

        Args:
            copied: sequences whose token goes to a copy of a block.

        Returns:
            Sequences that have no output yet, and so may draw for siblings too; they are not added.
        """
        size, new = self._block_size, []
        # Inlined in one loop for speed: it runs for every token of every stream.
        add_sequence, add_start, add_token = self.sequences.append, self._starts.append, self._token_ids.append
        for seq in seqs:
            output, start, seq_id = seq.output_token_ids, seq.num_computed, seq.seq_id
            if not output:
                new.append(seq)
                continue
            place = seq.state.place
            if place is None or start >= place.num_sent * size or seq_id in copied:
                self._send(seq, start, start + 1, copied=seq_id in copied)
            add_sequence(seq)
            add_start(start)
            add_token(output[-1])
        self.num_streams = self.num_tokens = len(self.sequences)
        self._lengths = [1] * self.num_streams
        return new

    def score_prompt(self, first: int, last: int) -> None:
        """Request scores of the prompt tokens after positions `first .. last` of the sequence added last."""
        seq = self.sequences[-1]
        targets = tuple(seq.tokens(first + 1, last + 1))
        num_top = seq.request.params.prompt_logprobs or 0
        self._scores.append(PromptScores(len(self.sequences) - 1, first, targets, num_top))

    def pool_prompt(self, first: int, last: int) -> None:
        """Request the sum of the hidden states at positions `first .. last` of the sequence added last."""
        self._pools.append(PromptPool(len(self.sequences) - 1, first, last - first))

    def finish(self, stores: Iterable[BlockTransfer] = (), loads: Iterable[BlockTransfer] = ()) -> StepPlan:
        """Finish the collected step. Without rows the plan is empty, and changes are sent with the next one."""
        if not self.sequences:
            return StepPlan()
        self._step += 1
        draws = [1] * self.num_streams + list(map(len, self.draws))
        for row, draft in self.drafts.items():
            draws[row] += len(draft)
        plan = StepPlan(
            step=self._step,
            seq_ids=tuple([seq.seq_id for seq in self.sequences]),
            starts=tuple(self._starts),
            lengths=tuple(self._lengths),
            draws=tuple(draws),
            num_streams=self.num_streams,
            token_ids=tuple(self._token_ids),
            sibling_seeds=self._sibling_seeds,
            scores=tuple(self._scores),
            pools=tuple(self._pools),
            reset=self._reset,
            changes=tuple(self._changes),
            new=tuple(self._new),
            tables=tuple(self._tables),
            stores=tuple(stores),
            copies=tuple(self.copies),
            loads=tuple(loads),
            ahead=self._ahead,
        )
        self._changes, self._reset = [], False
        self._in_flight.append(PlannedRows(plan, self.sequences, self.draws, self.drafts))
        self._clear()
        return plan

    def complete(self, plan: StepPlan) -> PlannedRows:
        """Note that `plan` was executed, and return its rows; an empty plan has none.

        Raises:
            OctavoError: it is not the first of the plans in flight.
        """
        if not plan:
            return _NO_ROWS
        if not self._in_flight or plan.step != self._in_flight[0].plan.step:
            awaited = [rows.plan.step for rows in self._in_flight]
            raise OctavoError(f"the result is of step {plan.step}; awaited are those of {awaited}, in this order")
        return self._in_flight.popleft()

    def abandon(self) -> None:
        """Abandon the plans being collected or in flight, after which the runner's state is unknown."""
        self._in_flight.clear()
        self._clear()
        self._changes.clear()
        self._reset = True

    def release(self) -> StepPlan | None:
        """Return a plan that makes the runner forget every sequence, as none is left; None if that is not needed.

        Usually the runner drops ended sequences with the next plan, but the state of a grammar is too large to keep
        that long.
        """
        if self._in_flight or not self._sent_grammars:
            return None
        self._step += 1
        self._changes, self._reset, self._sent_grammars = [], False, False
        return StepPlan(step=self._step, reset=True)

    def flush(self, stores: Iterable[BlockTransfer]) -> StepPlan:
        """Return a plan that stores blocks and computes nothing."""
        self._step += 1
        return StepPlan(step=self._step, stores=tuple(stores))

    def drop(self, seq: Sequence) -> None:
        """Make the runner drop a sequence that stops running, before its blocks or its id are reused."""
        if seq.state.placed.num_sent:
            self._changes.append(SequenceDropped(seq.seq_id))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Note that `child` was forked from `parent`, over the same blocks."""
        if sent := parent.state.placed.num_sent:
            child.state.placed.num_sent = sent
            self._changes.append(SequenceForked(child.seq_id, parent.seq_id, child.seed))

    def _send(self, seq: Sequence, start: int, end: int, *, copied: bool) -> None:
        """Send the runner what it needs to compute tokens `start .. end` of the next row's sequence."""
        size, place = self._block_size, seq.state.placed
        if not (sent := place.num_sent):
            self._send_whole(seq)
        elif copied or end > sent * size:
            first = min(sent, start // size) if copied else sent
            tables = self._kv.tables(seq)
            self._tables.append(TableDelta(len(self.sequences), first, tuple(tuple(table[first:]) for table in tables)))
            place.num_sent = len(tables[0])

    def _send_whole(self, seq: Sequence) -> None:
        request, tables = seq.request, self._kv.tables(seq)
        params = request.params
        sampling = SamplingSnapshot(
            request.request_id,
            params,
            seq.seed,
            seq.num_prompt_tokens,
            request.eos_token_ids,
            request.num_candidates,
            request.bad_word_ids,
        )
        needs_tokens = params.counts_tokens or params.structured_outputs is not None
        token_ids = array("i", seq.token_ids).tobytes() if needs_tokens else b""
        self._sent_grammars |= params.structured_outputs is not None
        self._new.append(NewSequence(seq.seq_id, sampling, tuple(table[:] for table in tables), token_ids))
        seq.state.placed.num_sent = len(tables[0])
