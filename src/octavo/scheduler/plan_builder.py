"""Builds a `StepPlan` from scheduled sequences, and tracks what the runner knows about them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat

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


class PlannedStep:
    """The work of a step: while it is composed, and then by its plan, until its result is processed.

    Attributes:
        ahead: whether the step before is still being computed, and the tokens that it draws are pending. Then nothing
            is preempted, admitted, copied or moved.
        streams: sequences that compute one token.
        runs: sequences that compute what a grammar has forced after their last drawn token, and how many tokens.
        chunks: sequences that compute prompt tokens, and how many.
        drafts: tokens that sequences of `streams` and `runs` verify, after each of which they draw too.
        copies: block copies to make before anything is computed.
        sequences: the sequence of each row of the plan.
        draws: for each row after the plan's streams, the sequences that draw a token after its last.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self.ahead = ahead
        self.streams: list[Sequence] = []
        self.runs: dict[SequenceId, tuple[Sequence, int]] = {}
        self.chunks: dict[SequenceId, tuple[Sequence, int]] = {}
        self.drafts: dict[SequenceId, tuple[int, ...]] = {}
        self.copies: list[BlockCopy] = []
        self.plan = StepPlan()
        self.sequences: list[Sequence] = []
        self.draws: list[tuple[Sequence, ...]] = []

    def __bool__(self) -> bool:
        return bool(self.streams or self.runs or self.chunks)

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each draw."""
        num_streams = self.plan.num_streams
        drawing = self.sequences[:num_streams]
        for seq, draws in zip(self.sequences[num_streams:], self.draws, strict=True):
            drawing += draws[:1] * len(self.drafts.get(seq.seq_id, ()))
            drawing += draws
        return drawing


class PlanBuilder:
    """Makes the plans of steps, and tracks those in flight.

        build(step) ──> plan in flight ─┬─ complete(plan)   the runner knows what it said
                                         └─ abandon()        the runner's state is unknown
        pending         around a second `build`, while the first plan is in flight
        drop, fork      between two plans, in the order in which they happen

    Attributes:
        is_building: whether a plan was begun but not finished.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.is_building = False
        self._block_size = kv.spec.block_size
        self._changes: list[SequenceForked | SequenceDropped] = []
        self._reset = True
        self._sent_grammars = False  # whether the runner may hold grammar states
        self._step = 0
        self._in_flight: deque[PlannedStep] = deque()  # two at most
        self._new: list[NewSequence] = []
        self._tables: list[TableDelta] = []

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
        step, plan = self._in_flight[-1], self._in_flight[-1].plan
        num_ending, draws = 0, chain(repeat(True, plan.num_streams), map(bool, step.draws))
        advanced: list[tuple[Sequence, int, bool]] = []
        for seq, start, length, has_drawn in zip(step.sequences, plan.starts, plan.lengths, draws, strict=True):
            if seq.state.place is None:
                continue  # it has ended in the meantime
            goes_on = has_drawn and seq.num_tokens + 1 < seq.max_num_tokens(max_model_len)
            num_ending += has_drawn and not goes_on
            advanced.append((seq, start, goes_on))
            seq.num_computed = start + length
            if goes_on:
                seq.output_token_ids.append(DRAWN)
        try:
            yield num_ending
        finally:
            for seq, start, goes_on in advanced:
                seq.num_computed = start
                if goes_on:
                    seq.output_token_ids.pop()

    @property
    def in_flight(self) -> PlannedStep:
        """The step whose result is awaited; of two, the first."""
        return self._in_flight[0] if self._in_flight else PlannedStep()

    def build(
        self, step: PlannedStep, stores: Iterable[BlockTransfer] = (), loads: Iterable[BlockTransfer] = ()
    ) -> StepPlan:
        """Return the plan of a step. Without rows it is empty, and changes are sent with the next one."""
        if not step:
            return StepPlan()
        self.is_building = True
        sequences, drafts = step.sequences, step.drafts
        starts, token_ids, others = self._add_streams(step)
        num_streams = len(sequences)
        lengths, num_draws = [1] * num_streams, [1] * num_streams
        sibling_seeds: dict[int, tuple[int, ...]] = {}
        scores: list[PromptScores] = []
        pools: list[PromptPool] = []
        others += step.runs.values()
        for row, (seq, num_new) in enumerate(chain(others, step.chunks.values()), start=num_streams):
            start, request = seq.num_computed, seq.request
            end = start + num_new
            verified = drafts.get(seq.seq_id, ())
            self._send(row, seq, end + len(verified))
            drawing = request.drawing(seq) if end == seq.num_tokens else ()
            if len(drawing) > 1:
                sibling_seeds[row] = tuple(sibling.seed for sibling in drawing[1:])
            scores += _scores_of(row, seq, end)
            pools += _pools_of(row, seq, end)
            sequences.append(seq)
            step.draws.append(drawing)
            starts.append(start)
            lengths.append(num_new + len(verified))
            num_draws.append(len(drawing) + len(verified))
            token_ids += seq.tokens(start, end)
            token_ids += verified
        self._step += 1
        step.plan = StepPlan(
            step=self._step,
            seq_ids=tuple([seq.seq_id for seq in sequences]),
            starts=tuple(starts),
            lengths=tuple(lengths),
            draws=tuple(num_draws),
            num_streams=num_streams,
            num_decodes=num_streams + len(others),
            token_ids=tuple(token_ids),
            sibling_seeds=sibling_seeds,
            scores=tuple(scores),
            pools=tuple(pools),
            reset=self._reset,
            changes=tuple(self._changes),
            new=tuple(self._new),
            tables=tuple(self._tables),
            stores=tuple(stores),
            copies=tuple(step.copies),
            loads=tuple(loads),
            ahead=step.ahead,
        )
        self._changes, self._new, self._tables = [], [], []
        self._reset = self.is_building = False
        self._in_flight.append(step)
        return step.plan

    def _add_streams(self, step: PlannedStep) -> tuple[list[int], list[int], list[tuple[Sequence, int]]]:
        """Make streams the first rows, each of which draws one token.

        Returns:
            Their starts and tokens, and those that may draw for siblings too, or verify a draft, with their tokens.
        """
        size, drafts, sequences = self._block_size, step.drafts, step.sequences
        starts: list[int] = []
        token_ids: list[int] = []
        others: list[tuple[Sequence, int]] = []
        # In one loop for speed: it runs for every token.
        add_sequence, add_start, add_token = sequences.append, starts.append, token_ids.append
        for seq in step.streams:
            output, start, seq_id = seq.output_token_ids, seq.num_computed, seq.seq_id
            if not output or seq_id in drafts:
                others.append((seq, 1))
                continue
            if start >= seq.state.placed.num_sent * size:
                self._send(len(sequences), seq, start + 1)
            add_sequence(seq)
            add_start(start)
            add_token(output[-1])
        return starts, token_ids, others

    def complete(self, plan: StepPlan) -> PlannedStep:
        """Note that `plan` was executed, and return its step.

        Raises:
            OctavoError: it is not the first of the plans in flight.
        """
        if not plan:
            return PlannedStep()
        if not self._in_flight or plan.step != self._in_flight[0].plan.step:
            awaited = [step.plan.step for step in self._in_flight]
            raise OctavoError(f"got the result of step {plan.step}, expected those of steps {awaited} in this order")
        return self._in_flight.popleft()

    def abandon(self) -> None:
        """Abandon the plans being built or in flight, after which the runner's state is unknown."""
        self._in_flight.clear()
        self._changes, self._new, self._tables = [], [], []
        self._reset, self.is_building = True, False

    def idle_plan(self, stores: Iterable[BlockTransfer]) -> StepPlan | None:
        """Return a plan that stores blocks and makes the runner forget every sequence; None if there is no need.

        Usually the runner drops ended sequences with the next plan, but the state of a grammar is too large to keep
        that long.
        """
        forgets, stores = self._sent_grammars and not self._in_flight, tuple(stores)
        if not stores and not forgets:
            return None
        self._step += 1
        if forgets:
            self._changes, self._reset, self._sent_grammars = [], False, False
        return StepPlan(step=self._step, stores=stores, reset=forgets)

    def drop(self, seq: Sequence) -> None:
        """Make the runner drop a sequence that stops running, before its blocks or its id are reused."""
        if seq.state.placed.num_sent >= 0:
            self._changes.append(SequenceDropped(seq.seq_id))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Note that `child` was forked from `parent`, over the same blocks."""
        if (sent := parent.state.placed.num_sent) >= 0:
            child.state.placed.num_sent = sent
            self._changes.append(SequenceForked(child.seq_id, parent.seq_id, child.seed))

    def _send(self, row: int, seq: Sequence, end: int) -> None:
        """Send the runner what it needs to compute the tokens of a row's sequence before `end`."""
        place = seq.state.placed
        if (first := place.num_sent) < 0:
            self._introduce(seq)
            first = 0
        if end > first * self._block_size:
            self._tables.append(TableDelta(row, first, *place.holding.entries(first)))
            place.num_sent = len(place.holding.tables[0])

    def _introduce(self, seq: Sequence) -> None:
        request, params = seq.request, seq.request.params
        sampling = SamplingSnapshot(
            request.request_id,
            params,
            seq.seed,
            seq.num_prompt_tokens,
            request.eos_token_ids,
            request.num_candidates,
            request.bad_word_ids,
        )
        has_grammar = params.structured_outputs is not None
        token_ids = array("i", seq.token_ids).tobytes() if params.counts_tokens or has_grammar else b""
        self._sent_grammars |= has_grammar
        self._new.append(NewSequence(seq.seq_id, sampling, token_ids))


def _scores_of(row: int, seq: Sequence, end: int) -> list[PromptScores]:
    """Return the positions before `end` to score, of a sequence whose prompt's log-probabilities are wanted."""
    if (num_top := seq.request.params.prompt_logprobs) is None:
        return []
    first, last = max(seq.num_computed, len(seq.request.prompt_logprobs)), min(end, seq.num_prompt_tokens - 1)
    return [PromptScores(row, first, tuple(seq.tokens(first + 1, last + 1)), num_top)] if first < last else []


def _pools_of(row: int, seq: Sequence, end: int) -> list[PromptPool]:
    """Return the positions before `end` to sum, of a sequence whose prompt's embedding is wanted."""
    if (pooled := seq.request.pooled) is None:
        return []
    first, last = max(seq.num_computed, pooled.next_position), min(end, seq.num_prompt_tokens)
    return [PromptPool(row, first, last - first)] if first < last else []
