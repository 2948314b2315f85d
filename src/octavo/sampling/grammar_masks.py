"""Which tokens the grammars of a step's draws allow.

Most draws need no mask. A token is drawn as if there were no grammar; where its grammar allows it, which takes some
microseconds to say, it stands, and else another is drawn under a mask (`structured.py` says why that is the same
distribution). Masks are filled in one pass of llguidance over all who need one, then it is index arithmetic.

A row of the mask is a bit a token, 32 in a word. What becomes of a row depends on how many it allows:

    few      {"name": …     their logits are gathered, and the token is drawn among these alone     [rows, FEW]
    nearly all  "in a text  the few others become -inf                                              [rows, vocab]
    else                    all others become -inf

Most states of JSON are of the first two kinds, so that hardly a row of logits is written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import GrammarError
from octavo.grammar.state import GrammarBroken, GrammarState
from octavo.sampling.batch import SamplingBatch, SamplingState

# A row that allows no more is drawn from among those.
FEW = 256
# A row that forbids no more has them masked one by one.
_FEW_FORBIDDEN = 4096
_MOST_THREADS = 8

Words = npt.NDArray[np.uint32]
_Ids = npt.NDArray[np.int64]


class GrammarMasks:
    """Asks grammars about draws, fills masks, and tells them what was drawn. Holds nothing of a sequence."""

    def accept(
        self, batch: SamplingBatch, token_ids: Seq[int], own: Seq[bool]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which draws, made without a mask, their grammars allow: bool [draws]; every draw has a grammar.

        Also says which of them their grammars have followed already: those that share theirs with no other draw.

        Args:
            own: whether the draw is of the row's own sequence. What a parallel sample drew will be told of its fork.
        """
        grammars = _grammars(batch)
        draws_of = Counter(map(id, grammars))
        accepted = np.zeros(len(batch), dtype=np.bool_)
        followed = np.zeros(len(batch), dtype=np.bool_)
        for i, (grammar, position) in enumerate(zip(grammars, batch.positions.tolist(), strict=True)):
            if token_ids[i] in _ends(batch.states[i], position):
                continue  # the mask knows whether anything else can follow
            follow = own[i] and draws_of[id(grammar)] == 1
            try:
                grammar.return_to(position)
                accepted[i] = grammar.takes(token_ids[i], follow=follow)
            except GrammarBroken:
                continue  # the mask's to say
            followed[i] = accepted[i] and follow
        return accepted, followed

    def fill(self, batch: SamplingBatch, vocab: int) -> Words:
        """What each draw may be: uint32 [draws, ceil(vocab / 32)]; every draw has a grammar.

        Raises:
            GrammarError: names the requests whose grammar cannot be followed any further.
        """
        words = np.zeros((len(batch), -(-vocab // 32)), dtype=np.uint32)
        rows: dict[int, int] = {}  # by the state's identity: the parallel samples of a prompt share one
        matchers: list[tuple[Any, int]] = []
        broken: dict[str, str] = {}
        copies: list[tuple[int, int]] = []
        grammars = _grammars(batch)
        for row, (grammar, position) in enumerate(zip(grammars, batch.positions.tolist(), strict=True)):
            if (first := rows.setdefault(id(grammar), row)) != row:
                copies.append((first, row))
                continue
            try:
                grammar.return_to(position)
                matchers.append((grammar.matcher, row))
            except GrammarBroken as error:
                broken[batch.states[row].snapshot.request_id] = str(error)
        self._compute(matchers, words)
        for matcher, row in matchers:
            if matcher.is_error():
                try:
                    matcher = self._compute_anew(grammars[row], row, words)
                except GrammarBroken as error:
                    broken[batch.states[row].snapshot.request_id] = str(error)
                    continue
            if matcher.is_stopped():
                words[row] = 0
                _set(words[row], grammars[row].eos_token_id)
        if broken:
            raise GrammarError(broken)
        for first, row in copies:
            words[row] = words[first]
        _forbid_ends(words, batch)
        return words

    def follow(self, batch: SamplingBatch, token_ids: Seq[int]) -> None:
        """Let each grammar follow its draw, which a mask has allowed, or `accept` without following it."""
        grammars = _grammars(batch)
        for grammar, token_id in zip(grammars, token_ids, strict=True):
            grammar.drew(token_id)
        draws = [i for i, grammar in enumerate(grammars) if token_ids[i] not in grammar.eos_token_ids]
        if draws:
            followed = self._executor.consume_token_par([(grammars[i].matcher, token_ids[i]) for i in draws])
            for i, ok in zip(draws, followed, strict=True):
                if not ok:
                    grammars[i].failed()

    def force(self, batch: SamplingBatch, token_ids: Seq[int]) -> dict[int, tuple[int, ...]]:
        """What must come next after the draws, by their numbers."""
        forced: dict[int, tuple[int, ...]] = {}
        for i, grammar in enumerate(_grammars(batch)):
            params = batch.states[i].snapshot.params
            if token_ids[i] in grammar.eos_token_ids or not grammar.is_sound:
                continue
            if params.needs_logprobs or params.stop:
                # Each of its tokens is reported with what the model gave it, or may end the text.
                continue
            if following := grammar.force((params.max_tokens or 1) - int(batch.positions[i]) - 1):
                forced[i] = tuple(following)
        return forced

    def _compute(self, matchers: list[tuple[Any, int]], words: Words) -> None:
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.shape[1] * 4, len(words))

    def _compute_anew(self, grammar: GrammarState, row: int, words: Words) -> Any:
        """A mask that became too complex, without looking at what it forces. Raises `GrammarBroken`."""
        matcher = grammar.matcher
        if grammar.give_up_forcing():
            matcher = grammar.matcher
            self._compute([(matcher, row)], words)
        if matcher.is_error():
            raise GrammarBroken(matcher.get_error(), len(grammar.token_ids))
        return matcher

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def split(words: Words) -> tuple[_Ids, _Ids]:
    """Rows that allow no more than `FEW` tokens, and the others."""
    is_few = np.bitwise_count(words).sum(-1) <= FEW
    return np.flatnonzero(is_few), np.flatnonzero(~is_few)


def allowed_ids(words: Words) -> tuple[_Ids, npt.NDArray[np.bool_]]:
    """The allowed tokens of rows that have few: int64 [rows, FEW] in rising order, and which entries are any."""
    rows, token_ids = _positions(words)
    counts = np.bincount(rows, minlength=len(words))
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((len(words), FEW), dtype=np.int64)
    table[rows, place] = token_ids
    return table, np.arange(FEW) < counts[:, None]


def mask(logits: torch.Tensor, rows: _Ids, words: Words) -> None:
    """Set every token that row `rows[i]` does not allow by `words[i]` to -inf, in place: float32 [*, vocab]."""
    vocab = logits.shape[1]
    forbidden = ~words
    if rest := vocab % 32:
        forbidden[:, -1] &= np.uint32((1 << rest) - 1)
    is_dense = np.bitwise_count(forbidden).sum(-1) > _FEW_FORBIDDEN
    sparse = np.flatnonzero(~is_dense)
    if len(sparse):
        which, token_ids = _positions(forbidden[sparse])
        index = torch.from_numpy(rows[sparse][which] * vocab + token_ids).to(logits.device)
        logits.view(-1).index_fill_(0, index, -torch.inf)
    dense = np.flatnonzero(is_dense)
    if len(dense):
        bits = np.unpackbits(forbidden[dense].view(np.uint8), axis=1, bitorder="little", count=vocab)
        is_forbidden = torch.from_numpy(bits).view(torch.bool).to(logits.device)
        for row, each in zip(rows[dense].tolist(), is_forbidden, strict=True):
            logits[row].masked_fill_(each, -torch.inf)


def _positions(words: Words) -> tuple[_Ids, _Ids]:
    """(row, token id) of every bit that is set, in rising order."""
    rows, columns = np.nonzero(words)
    bits = np.unpackbits(words[rows, columns].astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    which, bit = np.nonzero(bits)
    return rows[which], columns[which] * 32 + bit


def _forbid_ends(words: Words, batch: SamplingBatch) -> None:
    """`min_tokens` and `ignore_eos` keep an output from ending, as long as the grammar allows anything else."""
    for row, (state, position) in enumerate(zip(batch.states, batch.positions.tolist(), strict=True)):
        ends = [token_id for token_id in _ends(state, position) if _is_set(words[row], token_id)]
        if not ends:
            continue
        going_on = words[row].copy()
        for token_id in ends:
            going_on[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if going_on.any():
            words[row] = going_on


def _ends(state: SamplingState, position: int) -> frozenset[int]:
    """The tokens that may not end the output yet."""
    params, eos_token_ids = state.snapshot.params, state.snapshot.eos_token_ids
    if position < params.min_tokens:
        return eos_token_ids.union(params.stop_token_ids)
    return eos_token_ids if params.ignore_eos else frozenset()


def _is_set(words: Words, token_id: int) -> bool:
    return token_id // 32 < len(words) and bool(int(words[token_id // 32]) >> token_id % 32 & 1)


def _set(words: Words, token_id: int) -> None:
    words[token_id // 32] |= np.uint32(1 << token_id % 32)


def _grammars(batch: SamplingBatch) -> list[GrammarState]:
    found = [state.grammar for state in batch.states]
    return [grammar for grammar in found if grammar is not None]
