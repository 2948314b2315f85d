"""The inputs of a step's draws besides logits, gathered from a table of running sequences.

SamplingTable     one row per running sequence: a record of numbers, and a `SamplingState` with all else
  └─ batch ──>    SamplingBatch: the rows of a step's draws
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.state import GrammarState
from octavo.limits import MOST_BAD_WORD_TOKENS
from octavo.sampling.draw import uniforms
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


# The maximum temperature: if it were infinite in float32, masked logits would become NaN.
_HOTTEST = 1e30

_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("temperature", np.float64),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("top_k", np.float64),  # exact below 2^53
        ("greedy", np.bool_),
        ("beam", np.bool_),
        ("needs_logprobs", np.bool_),
        ("adjusted", np.bool_),  # by biases or penalties, but not `min_tokens`
        ("limited", np.bool_),  # to `allowed_token_ids`
        ("structured", np.bool_),  # by a grammar, which handles `min_tokens` too
    ]
)
_MASK_64 = 2**64 - 1


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
        allowed: the tokens that it may draw in ascending order; None for all.
        allowed_words: the same as a mask with one bit per token, 32 per word: indices and values of the nonzero words.
        grammar: state of a structured output's grammar after the tokens so far.
        biases: token ids of `logit_bias`, and their float32 biases.
        ends: the tokens that `min_tokens` forbids at first.
        bad_words: token sequences that must not be completed.
    """

    snapshot: SamplingSnapshot
    counts: TokenCounts | None = None
    allowed: npt.NDArray[np.int64] | None = None
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
        given = params.allowed_token_ids
        allowed = None if given is None else np.array(sorted(given), dtype=np.int64)
        # Converted to arrays once, because a thousand biases of 64 sequences took 4 ms per step.
        biases = ends = None
        if bias := params.logit_bias:
            biases = np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
        if params.min_tokens:
            ends = np.array([*snapshot.eos_token_ids, *params.stop_token_ids], dtype=np.int64)
        bad_words = BadWords.of(snapshot.bad_word_ids) if snapshot.bad_word_ids else None
        words = None if allowed is None else _words(allowed)
        return cls(snapshot, counts, allowed, words, grammar, biases, ends, bad_words)

    @property
    def counted(self) -> TokenCounts:
        """The token counts of a sequence that needs them."""
        assert self.counts is not None, f"the tokens of request {self.snapshot.request_id} are not counted"
        return self.counts

    def fork(self) -> SamplingState:
        """Return a copy for a forked sequence."""
        return SamplingState(
            self.snapshot,
            None if self.counts is None else self.counts.fork(),
            self.allowed,
            self.allowed_words,
            None if self.grammar is None else self.grammar.fork(),
            self.biases,
            self.ends,
            self.bad_words,
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The draws of one step.

    Attributes:
        records: `_RECORD` [draws].
        positions: int64 [draws]; number of output tokens before the one being drawn.
        states: one per draw.
    """

    records: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    states: list[SamplingState]

    @classmethod
    def of(cls, states: Seq[SamplingState], positions: Seq[int]) -> SamplingBatch:
        """Build the inputs of draws from these sequences, one each."""
        records = np.zeros(len(states), dtype=_RECORD)
        for i, state in enumerate(states):
            records[i] = _record(state.snapshot)
        return cls(records, np.array(positions, dtype=np.int64), list(states))

    def __len__(self) -> int:
        return len(self.states)

    @property
    def is_plain(self) -> bool:
        """Whether all draws need only a token: no grammar, no log-probabilities, no beam candidates."""
        records = self.records
        return not (records["structured"] | records["needs_logprobs"] | records["beam"]).any()

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
        """Return what the choice of each token depends on besides its logits: float64 [draws, 5].

            uniform | temperature | min_p | top_p | top_k        a temperature of 0 is greedy, and needs no uniform

        Args:
            again: see `uniforms`.
        """
        records, table = self.records, np.zeros((len(self), 5))
        is_greedy = records["greedy"]
        if not is_greedy.all():
            table[:, 0] = uniforms(records["seed"], self.positions, again=again)
            table[:, 1] = np.where(is_greedy, 0.0, records["temperature"])
        for column, name in enumerate(("min_p", "top_p", "top_k"), start=2):
            table[:, column] = records[name]
        return table

    def select(self, draws: npt.NDArray[np.int64]) -> SamplingBatch:
        """Return a batch of some of the draws."""
        if len(draws) == len(self.states):
            return self
        return SamplingBatch(self.records[draws], self.positions[draws], [self.states[i] for i in draws.tolist()])


class SamplingTable:
    """The sampling state of running sequences, one row each."""

    def __init__(self, max_rows: int) -> None:
        self._records = np.zeros(max_rows, dtype=_RECORD)
        self._following = np.zeros(max_rows, dtype=np.bool_)  # whether tokens must be counted, or followed by a grammar
        self._states: list[SamplingState | None] = [None] * max_rows
        # By row that verifies a draft and must be told its tokens: the state before each of them and after the last,
        # and the number of tokens in the first. The next step's start says which of them holds.
        self._along: dict[int, tuple[int, list[SamplingState]]] = {}

    def put(self, row: int, state: SamplingState) -> None:
        self._records[row] = _record(state.snapshot)
        self._following[row] = state.counts is not None or state.grammar is not None
        self._states[row] = state

    def fork(self, parent: int, child: int, seed: int) -> None:
        """Copy row `parent` to row `child`, with its own seed."""
        self._records[child] = self._records[parent]
        self._records[child]["seed"] = seed & _MASK_64
        self._following[child] = self._following[parent]
        self._states[child] = self._state(parent).fork()

    def clear(self, row: int) -> None:
        self._following[row] = False
        self._states[row] = None
        self._along.pop(row, None)

    def follows(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether any sequence's tokens must be passed to `count`."""
        return bool(self._following[rows].any())

    def count(
        self,
        rows: npt.NDArray[np.int64],
        starts: Seq[int],
        bounds: npt.NDArray[np.int32],
        token_ids: Seq[int],
        num_drafted: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Count a step's tokens for penalties, and let grammars follow them; tokens already known are skipped.

        Args:
            starts: position of each row's first token.
            bounds: row i has token_ids[bounds[i] : bounds[i + 1]].
            num_drafted: int64 [rows]; the last tokens of each row that are unverified. None if none is.
        """
        for i in np.flatnonzero(self._following[rows]).tolist():
            row = int(rows[i])
            if (along := self._along.pop(row, None)) is not None:
                first, states = along
                self._states[row] = states[starts[i] - first]
            state = self._state(row)
            begin, end = int(bounds[i]), int(bounds[i + 1])
            drafted = token_ids[end - int(num_drafted[i]) : end] if num_drafted is not None else ()
            end -= len(drafted)
            if (counts := state.counts) is not None:
                for token_id in token_ids[begin + counts.num_tokens - starts[i] : end]:
                    counts.append(token_id)
            if (grammar := state.grammar) is not None:
                of_prompt = max(0, state.snapshot.num_prompt_tokens - starts[i])
                if begin + of_prompt < end:
                    first = starts[i] + of_prompt - state.snapshot.num_prompt_tokens
                    grammar.follow(first, token_ids[begin + of_prompt : end])
            if drafted:
                num_tokens = starts[i] + end - begin
                if grammar is not None:  # a fork's has followed what was forced after its parent's token
                    grammar.return_to(num_tokens - state.snapshot.num_prompt_tokens)
                self._along[row] = num_tokens, _states_along(state, drafted)

    def batch(
        self, rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64], seeds: Iterable[tuple[int, int]] = ()
    ) -> SamplingBatch:
        """Return the draws from these rows, in order.

        Args:
            num_tokens: int64 [draws]; number of tokens of the sequence before the one being drawn.
            seeds: (draw, seed) of draws that do not use the seed of their row.
        """
        records = self._records[rows]
        for draw, seed in seeds:
            records[draw]["seed"] = seed & _MASK_64
        states = [self._state(row) for row in rows.tolist()]
        if self._along:
            for draw, (row, count) in enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True)):
                if (along := self._along.get(row)) is not None:
                    first, following = along
                    states[draw] = following[count - first]
        return SamplingBatch(records, num_tokens - records["num_prompt_tokens"], states)

    def _state(self, row: int) -> SamplingState:
        state = self._states[row]
        assert state is not None, f"row {row} holds no sequence"
        return state


def _states_along(state: SamplingState, drafted: Iterable[int]) -> list[SamplingState]:
    """Return the state before each drafted token, and after the last.

    A token that the grammar refuses is not drawn, so the draws after it are dropped; any state serves for them.
    """
    states, is_valid = [state], True
    for token_id in drafted:
        state = states[-1].fork()
        states.append(state)
        if state.counts is not None:
            state.counts.append(token_id)
        if state.grammar is not None and is_valid:
            is_valid = state.grammar.follow_draft(token_id)
    return states


def _words(token_ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    places, first = np.unique(token_ids // 32, return_index=True)
    bits = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    return places, np.bitwise_or.reduceat(bits, first)


def _record(snapshot: SamplingSnapshot) -> tuple[Any, ...]:
    params = snapshot.params
    return (
        snapshot.seed & _MASK_64,
        snapshot.num_prompt_tokens,
        params.min_tokens,
        min(params.temperature, _HOTTEST),
        params.min_p,
        params.top_p,
        float(params.top_k),
        params.greedy,
        params.use_beam_search,
        params.needs_logprobs,
        params.counts_tokens or bool(params.logit_bias) or params.allowed_token_ids is not None,
        params.allowed_token_ids is not None,
        params.structured_outputs is not None,
    )
