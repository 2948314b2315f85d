"""Drafts by a smaller model, which has its own small paged KV cache.

    the sequence's tokens   | prompt … | output … | the token drawn last |
    the draft's cache       | computed, and they agree   | its last draft, as far as it was refuted |
                                                         ^ num_known: the next draft is computed from here on

A draft of k tokens takes k steps of the smaller model: the first computes what its cache lacks of the sequence, each
other one the token drawn before. It draws with the sequence's own temperature and random numbers, so that a model that
agrees with the target drafts what the target is going to draw. Sequences share the cache; the one that drafted least
recently gives way.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from octavo.kvcache.block import BlockId
from octavo.request import Sequence, SequenceId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import (
    NewSequence,
    SamplingSnapshot,
    SequenceDropped,
    StepPlan,
    StepResult,
    TableDelta,
)
from octavo.scheduler.step_time import MOST_DECODES, StepLoad, StepTimeModel

logger = logging.getLogger(__name__)

MOST_LACKING = 64
"""Tokens that a sequence may lack in the draft's cache when it drafts; before that, it catches up."""

_RESTING = 1024  # looks for a draft that find none after a failure


class _Cached:
    """A sequence in the draft's cache.

    Attributes:
        token_ids: the tokens whose keys and values are stored, of which those from `num_known` on may be refuted.
        tables: its block tables, one for each group of layers.
        num_sent: entries of each that the runner has.
    """

    __slots__ = ("num_known", "num_sent", "seq_id", "snapshot", "tables", "token_ids")

    def __init__(self, seq: Sequence, num_groups: int) -> None:
        params = seq.request.params
        # Without what follows the tokens, such as penalties and grammars: a draft may be wrong.
        alike = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            logit_bias=params.logit_bias,
        )
        self.seq_id = seq.seq_id
        self.snapshot = SamplingSnapshot(seq.request.request_id, alike, seq.seed, seq.num_prompt_tokens)
        self.token_ids = array("i")
        self.num_known = self.num_sent = 0
        self.tables: tuple[list[BlockId], ...] = tuple([] for _ in range(num_groups))

    def compare(self, seq: Sequence) -> None:
        """Drop the tokens of its last draft that the sequence did not draw."""
        tokens = self.token_ids
        following = seq.tokens(self.num_known, min(seq.num_tokens, len(tokens)))
        for token_id in following:
            if tokens[self.num_known] != token_id:
                break
            self.num_known += 1
        del tokens[self.num_known :]


class DraftModel:
    """A model that drafts for sequences, step by step.

    Args:
        execute: executes plans on it; nothing else uses that runner.
        num_blocks: size of its cache, including the null block.
        num_groups: groups of its layers.
        max_num_seqs: maximum number of sequences in its cache.
        max_model_len: maximum number of tokens of a sequence for which it drafts.
        vocab_size: number of tokens that both models know.

    Attributes:
        times: how long its steps take.
    """

    def __init__(
        self,
        execute: Callable[[StepPlan], StepResult],
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.times = StepTimeModel()
        self.max_num_seqs = max_num_seqs
        self._execute = execute
        self._block_size, self._num_groups = block_size, num_groups
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._free = [BlockId(number) for number in range(num_blocks - 1, 0, -1)]
        self._cached: OrderedDict[SequenceId, _Cached] = OrderedDict()  # the one that drafted last at the end
        self._changes: list[SequenceDropped] = []
        self._step = self._resting = 0
        self._reset = True

    def num_lacking(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence must be computed before the first of a draft; 0 if it cannot draft."""
        self._resting -= self._resting > 0
        if seq.num_tokens + 1 >= self._max_model_len or self._resting:
            return 0
        if (cached := self._cached.get(seq.seq_id)) is None:
            return seq.num_tokens
        cached.compare(seq)
        cached.num_known = min(cached.num_known, seq.num_tokens - 1)  # the last token's logits are needed
        del cached.token_ids[cached.num_known :]
        return seq.num_tokens - cached.num_known

    def seconds(self, num_lacking: int, num_seqs: int, length: int, context: float) -> float:
        """Predict how long it takes to draft `length` tokens for each of some sequences; 0 before the first draft.

        Args:
            num_lacking: tokens that they lack together.
            context: mean number of tokens of the sequences.
        """
        return self._seconds_of(num_lacking, context) + (length - 1) * self._seconds_of(num_seqs, context)

    def _seconds_of(self, rows: int, context: float) -> float:
        if rows <= MOST_DECODES:
            return self.times.decode_seconds(rows, context)
        return self.times.predict(StepLoad().with_chunk(0, rows))

    def catch_up(self, seq: Sequence, count: int) -> None:
        """Compute the next `count` of the tokens that a sequence lacks."""
        if (cached := self._take(seq, seq.num_tokens, {seq.seq_id})) is not None:
            self._run([(cached, tuple(seq.tokens(cached.num_known, cached.num_known + count)))], draws=0)
            cached.num_known = len(cached.token_ids)

    def draft(self, seqs: Seq[Sequence], length: int) -> list[tuple[int, ...]]:
        """Return `length` tokens that may follow each of these sequences, or none where the cache has no room."""
        wanted = {seq.seq_id for seq in seqs}
        drafts: dict[SequenceId, list[int]] = {seq_id: [] for seq_id in wanted}
        rows: list[tuple[_Cached, tuple[int, ...]]] = []
        for seq in seqs:
            most = min(length, self._max_model_len - seq.num_tokens)
            if (cached := self._take(seq, seq.num_tokens + most, wanted)) is not None:
                rows.append((cached, tuple(seq.tokens(cached.num_known, seq.num_tokens))))
        rows.sort(key=lambda row: len(row[1]))
        for place in range(length):
            drawn = self._run(rows, draws=1)
            following: list[tuple[_Cached, tuple[int, ...]]] = []
            for (cached, _), token_id in zip(rows, drawn, strict=False):
                if not place:
                    cached.num_known = len(cached.token_ids)
                if token_id < self._vocab_size:
                    drafts[cached.seq_id].append(token_id)
                    if len(cached.token_ids) + 1 < self._max_model_len:
                        following.append((cached, (token_id,)))
            if not (rows := following):
                break
        return [tuple(drafts[seq.seq_id]) for seq in seqs]

    def forget(self, seq_id: SequenceId) -> None:
        """Free a sequence's blocks in the cache, if it has any."""
        if (cached := self._cached.pop(seq_id, None)) is None:
            return
        for table in cached.tables:
            self._free += table
        if cached.num_sent:
            self._changes.append(SequenceDropped(seq_id))

    def forget_all(self) -> None:
        """Free the whole cache."""
        for seq_id in list(self._cached):
            self.forget(seq_id)

    def _take(self, seq: Sequence, num_tokens: int, kept: set[SequenceId]) -> _Cached | None:
        """Return a sequence's place in the cache with room for so many tokens; None if those kept leave no room."""
        if (cached := self._cached.get(seq.seq_id)) is None:
            others = (seq_id for seq_id in self._cached if seq_id not in kept)
            if len(self._cached) >= self.max_num_seqs:
                if (oldest := next(others, None)) is None:
                    return None
                self.forget(oldest)
            cached = self._cached[seq.seq_id] = _Cached(seq, self._num_groups)
        self._cached.move_to_end(seq.seq_id)
        lacking = (-(-num_tokens // self._block_size) - len(cached.tables[0])) * self._num_groups
        while lacking > len(self._free):
            oldest = next((seq_id for seq_id in self._cached if seq_id not in kept), None)
            if oldest is None:
                return None
            self.forget(oldest)
        for number in range(lacking):
            cached.tables[number % self._num_groups].append(self._free.pop())
        return cached

    def _run(self, rows: Seq[tuple[_Cached, tuple[int, ...]]], *, draws: int) -> Seq[int]:
        """Compute tokens of some sequences, those with one token first; returns what each draws, nothing on failure."""
        if not rows:
            return ()
        self._step += 1
        new, tables = [], []
        for row, (cached, _) in enumerate(rows):
            size = len(cached.tables[0])
            if not cached.num_sent:
                new.append(NewSequence(cached.seq_id, cached.snapshot))
            if size > cached.num_sent:
                more = tuple(tuple(table[cached.num_sent :]) for table in cached.tables)
                tables.append(TableDelta(row, cached.num_sent, more))
            cached.num_sent = size
        num_single = sum(len(token_ids) == 1 for _, token_ids in rows) if draws else 0
        plan = StepPlan(
            step=self._step,
            seq_ids=tuple(cached.seq_id for cached, _ in rows),
            starts=tuple(len(cached.token_ids) for cached, _ in rows),
            lengths=tuple(len(token_ids) for _, token_ids in rows),
            draws=(draws,) * len(rows),
            # Ids beyond its vocabulary mean nothing, but may stand in a prompt.
            token_ids=tuple(i if i < self._vocab_size else 0 for _, token_ids in rows for i in token_ids),
            reset=self._reset,
            changes=tuple(self._changes),
            new=tuple(new),
            tables=tuple(tables),
            num_streams=num_single,
            num_decodes=num_single,
        )
        self._changes, self._reset = [], False
        began = time.perf_counter()
        try:
            drawn = self._execute(plan).token_ids
        except Exception:
            # Drafts only save time, so requests go on without them. The runner's state is unknown now.
            logger.exception("the draft model failed; no drafts from it for a while")
            self.forget_all()
            self._changes, self._reset, self._resting = [], True, _RESTING
            return ()
        seconds, num_tokens = time.perf_counter() - began, plan.num_tokens
        context = sum(plan.starts) / len(rows) + 1
        if num_tokens <= MOST_DECODES:
            self.times.observe_decodes(num_tokens, context, seconds)
        else:
            self.times.observe(StepLoad.of(plan.starts, plan.lengths), seconds)
        for cached, token_ids in rows:
            cached.token_ids.extend(token_ids)
        return drawn
