"""The inputs of a step's draws besides logits, gathered from a table of running sequences.

SequenceTable     one row per running sequence: a record of numbers, and a `SamplingState` with all else
  └─ draws ──>    SamplingBatch: the rows of a step's draws
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.state import GrammarState
from octavo.request_limits import MOST_BAD_WORD_TOKENS
from octavo.sampling.draw import random_streams, uniforms
from octavo.scheduler.plan import SamplingSnapshot

IntArray = npt.NDArray[np.int64]
"""Token ids, their counts or their rows."""

# Number of last output tokens kept: as many as the longest bad word has before its last token.
MAX_TAIL = MOST_BAD_WORD_TOKENS - 1


class TokenCounts:
    """The distinct tokens of a prompt, and those of an output with their counts; O(1) per new token.

        prompt_ids        [ 3 17 90 ]        sorted; the same array for all forks
        output_ids        [ 4 90 … |   ]     new ones in order of first occurrence, with room to grow
        output_counts     [ 1  2 … |   ]
        tail              [ 4  7  4 ]        the last output tokens, in order

    Args:
        token_ids: all tokens so far.
        num_prompt_tokens: how many of them belong to the prompt.
    """

    __slots__ = ("_counts", "_ids", "_places", "num_tokens", "prompt_ids", "tail")

    def __init__(self, token_ids: npt.NDArray[np.integer], num_prompt_tokens: int) -> None:
        # Counting by id takes a tenth of the time of sorting.
        self.prompt_ids: IntArray = np.flatnonzero(np.bincount(token_ids[:num_prompt_tokens]))
        self.num_tokens = len(token_ids)
        counts = np.bincount(token_ids[num_prompt_tokens:])
        self._ids: IntArray = np.flatnonzero(counts)
        self._counts: IntArray = counts[self._ids].astype(np.int64)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
        self.tail: deque[int] = deque(token_ids[num_prompt_tokens:][-MAX_TAIL:].tolist(), MAX_TAIL)

    @property
    def output_ids(self) -> IntArray:
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> IntArray:
        return self._counts[: len(self._places)]

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        self.num_tokens += 1
        self.tail.append(token_id)
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = _grown(self._ids)
            self._counts = _grown(self._counts)
        self._ids[place] = token_id
        self._counts[place] += 1

    def fork(self) -> TokenCounts:
        """Return a copy of the counts for a forked sequence. O(distinct tokens of the output)."""
        child = TokenCounts.__new__(TokenCounts)
        child.prompt_ids, child.num_tokens = self.prompt_ids, self.num_tokens
        child.tail = self.tail.copy()
        child._ids, child._counts, child._places = self._ids.copy(), self._counts.copy(), self._places.copy()
        return child


def _grown(array: IntArray) -> IntArray:
    grown = np.zeros(max(16, 2 * len(array)), dtype=np.int64)
    grown[: len(array)] = array
    return grown


NO_DRAFT = -1

# The maximum temperature: if it were infinite in float32, masked logits would become NaN.
_HOTTEST = 1e30

KINDS = (
    "random",  # not greedy
    "beam",
    "needs_logprobs",
    "adjusted",  # by biases or penalties, but not `min_tokens`
    "lengthened",  # by `min_tokens`
    "limited",  # to `allowed_token_ids`
    "structured",  # by a grammar, which handles `min_tokens` too
)
RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("choice", np.float64, 4),  # temperature (0 if greedy), min_p, top_p and top_k, which is exact below 2^53
        *((kind, np.bool_) for kind in KINDS),
    ]
)
MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not be completed, indexed by the last token but one.

    Attributes:
        alone: sequences of one token.
        after: the other sequences by their last token but one, as (tokens before the last, last token).
    """

    alone: list[int]
    after: dict[int, list[tuple[list[int], int]]]

    @classmethod
    def of(cls, words: Iterable[Seq[int]]) -> BadWords:
        found = cls([], {})
        for *before, last in words:
            if before:
                found.after.setdefault(before[-1], []).append((before, last))
            else:
                found.alone.append(last)
        return found

    def forbidden(self, tail: Seq[int]) -> list[int]:
        """Return the tokens that would complete a sequence after an output that ends in `tail`."""
        if not tail or not (near := self.after.get(tail[-1])):
            return self.alone
        end = list(tail)
        return self.alone + [last for before, last in near if end[-len(before) :] == before]


@dataclass(frozen=True, slots=True)
class SamplingState:
    """One sequence's parameters, and everything else that its draws depend on.

    Attributes:
        counts: token counts, if a penalty needs them.
        allowed_words: the tokens that it may draw, as a mask with one bit per token, 32 per word: indices and values of
            the nonzero words; None for all.
        grammar: state of a structured output's grammar after the tokens so far.
        biases: token ids of `logit_bias`, and their float32 biases.
        ends: the tokens that `min_tokens` forbids at first.
        bad_words: token sequences that must not be completed.
    """

    snapshot: SamplingSnapshot
    counts: TokenCounts | None = None
    allowed_words: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]] | None = None
    grammar: GrammarState | None = None
    biases: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    ends: npt.NDArray[np.int64] | None = None
    bad_words: BadWords | None = None

    @classmethod
    def of(
        cls,
        snapshot: SamplingSnapshot,
        token_ids: npt.NDArray[np.integer],
        grammars: GrammarCompiler | None = None,
    ) -> SamplingState:
        """Return the state of a sequence with these tokens, which are read only for penalties and grammars."""
        counts = grammar = None
        params = snapshot.params
        if params.counts_tokens:
            counts = TokenCounts(token_ids, snapshot.num_prompt_tokens)
        if params.structured_outputs is not None:
            assert grammars is not None, "requests with grammars are rejected when there is no tokenizer"
            output = token_ids[snapshot.num_prompt_tokens :].tolist()
            grammar = GrammarState(grammars.in_use(params.structured_outputs), output)
        # Converted to arrays once, because a thousand biases of 64 sequences took 4 ms per step.
        biases = ends = None
        if bias := params.logit_bias:
            biases = np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
        if params.min_tokens:
            ends = np.array([*snapshot.eos_token_ids, *params.stop_token_ids], dtype=np.int64)
        bad_words = BadWords.of(snapshot.bad_word_ids) if snapshot.bad_word_ids else None
        allowed = None if params.allowed_token_ids is None else _words(sorted(params.allowed_token_ids))
        return cls(snapshot, counts, allowed, grammar, biases, ends, bad_words)

    @property
    def has_filters(self) -> bool:
        """Whether draws choose among the likeliest tokens only."""
        params = self.snapshot.params
        return not params.greedy and (params.top_k != 0 or params.top_p != 1.0 or params.min_p != 0.0)

    @property
    def counted(self) -> TokenCounts:
        """The token counts of a sequence that needs them."""
        assert self.counts is not None, f"the tokens of request {self.snapshot.request_id} are not counted"
        return self.counts

    @property
    def followed(self) -> GrammarState:
        """The grammar of a structured output."""
        assert self.grammar is not None, f"the output of request {self.snapshot.request_id} is not structured"
        return self.grammar

    def fork(self) -> SamplingState:
        """Return a copy for a forked sequence."""
        counts = None if self.counts is None else self.counts.fork()
        return replace(self, counts=counts, grammar=None if self.grammar is None else self.grammar.fork())


@dataclass(frozen=True)
class SamplingBatch:
    """The draws of one step. Usually the next step has the same: only `positions` change, in place.

    Attributes:
        records: `RECORD` [draws].
        positions: int64 [draws]; number of output tokens before the one being drawn.
        states: one per draw.
        drafted: int64 [draws]; the drafted token that each draw verifies, or `NO_DRAFT`, as for a sequence's last draw.
    """

    records: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    states: list[SamplingState]
    drafted: npt.NDArray[np.int64]

    @classmethod
    def of(cls, states: Seq[SamplingState], positions: Seq[int]) -> SamplingBatch:
        """Build the inputs of draws from these sequences, one each."""
        records = np.zeros(len(states), dtype=RECORD)
        for i, state in enumerate(states):
            records[i] = record_of(state.snapshot)
        return cls(records, np.array(positions, dtype=np.int64), list(states), np.full(len(states), NO_DRAFT))

    def __len__(self) -> int:
        return len(self.states)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Those of `KINDS` to which any of the draws belongs."""
        flags = self.records.view(np.bool_).reshape(len(self), RECORD.itemsize)[:, -len(KINDS) :]
        return frozenset(compress(KINDS, np.logical_or.reduce(flags)))

    @property
    def is_plain(self) -> bool:
        """Whether all draws need only a token: no grammar, no log-probabilities, no beam candidates."""
        return self.kinds.isdisjoint(("structured", "needs_logprobs", "beam"))

    @property
    def is_adjusted(self) -> bool:
        """Whether any of the draws is `adjusted`."""
        # `min_tokens` matters at the first positions only.
        return not self.kinds.isdisjoint(("adjusted", "lengthened")) and bool(self.adjusted.any())

    @property
    def adjusted(self) -> npt.NDArray[np.bool_]:
        """bool [draws]: whether biases, penalties or `min_tokens` change the logits before the choice."""
        adjusted: npt.NDArray[np.bool_] = self.records["adjusted"] | self.must_not_end
        return adjusted

    @property
    def must_not_end(self) -> npt.NDArray[np.bool_]:
        """bool [draws]: whether `min_tokens` forbids an end; False for structured outputs, whose masks handle it."""
        forbidden: npt.NDArray[np.bool_] = self.positions < self.records["min_tokens"]
        forbidden &= ~self.records["structured"]
        return forbidden

    def numbers(self, *, again: bool = False) -> npt.NDArray[np.float64]:
        """Return the inputs of each token's choice other than its logits: float64 [draws, 5].

            uniform | temperature | min_p | top_p | top_k        a temperature of 0 is greedy, and needs no uniform

        Always the same array, with the numbers of the present `positions`, unless `again` is set.

        Args:
            again: see `random_streams`.
        """
        table, streams = self._table
        if streams is not None:
            if again:
                table, streams = table.copy(), random_streams(self.records["seed"], again=True)
            table[:, 0] = uniforms(streams, self.positions)
        return table

    @cached_property
    def _table(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64] | None]:
        """The columns of `numbers` but the first, and the streams of its numbers; None if all draws are greedy."""
        records, table = self.records, np.zeros((len(self), 5))
        table[:, 1:] = records["choice"]
        return table, random_streams(records["seed"]) if "random" in self.kinds else None

    def select(self, draws: npt.NDArray[np.int64]) -> SamplingBatch:
        """Return a batch of some of the draws."""
        if len(draws) == len(self.states):
            return self
        states = [self.states[i] for i in draws.tolist()]
        return SamplingBatch(self.records[draws], self.positions[draws], states, self.drafted[draws])


def _words(allowed: Seq[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    token_ids = np.array(allowed, dtype=np.int64)
    places, first = np.unique(token_ids // 32, return_index=True)
    bits = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    return places, np.bitwise_or.reduceat(bits, first)


def record_of(snapshot: SamplingSnapshot) -> tuple[Any, ...]:
    params = snapshot.params
    return (
        snapshot.seed & MASK_64,
        snapshot.num_prompt_tokens,
        params.min_tokens,
        (0.0 if params.greedy else min(params.temperature, _HOTTEST), params.min_p, params.top_p, float(params.top_k)),
        not params.greedy,
        params.use_beam_search,
        params.needs_logprobs,
        params.counts_tokens or bool(params.logit_bias) or params.allowed_token_ids is not None,
        params.min_tokens > 0,
        params.allowed_token_ids is not None,
        params.structured_outputs is not None,
    )
