"""Which tokens the grammars of a step's draws allow.

A grammar is broad or narrow after each token (`GrammarState.is_broad`):

    narrow   {"name": …     its mask is found out as soon as it is, 30 µs, and the next token is drawn under it
    broad    "in a text     a mask would take 200 µs and allow nearly all: a token is drawn as if there were no
                            grammar, and asked for, 10 µs; another is drawn under a mask where it is refused

(`structured.py` says why that is the same distribution.) Masks are filled in one pass of llguidance over all who need
one. A mask that allows one token forces it: it follows the drawn one at once, and takes no step of its own.

A row of masks is a bit a token, 32 in a word. For torch's operations it is index arithmetic then:

    few         their logits are gathered, and the token is drawn among these alone     [rows, FEW]
    nearly all  the few others become -inf                                              [rows, vocab]
    else        all others become -inf
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import GrammarError
from octavo.grammar.state import GrammarBroken, GrammarState
from octavo.sampling.batch import SamplingState

# A row that allows no more is drawn from among those.
FEW = 256
# A row that forbids no more has them masked one by one.
_FEW_FORBIDDEN = 4096
# Tokens that follow one drawn token at once. A grammar may force thousands: the rest follow the next one.
_MOST_FORCED = 32
# Draws of a step with more leave forced tokens to the next: with so many rows, another costs as much as a draw.
_MOST_TO_FORCE = 32
_MOST_THREADS = 8

Words = npt.NDArray[np.uint32]
"""Masks: [rows, ceil(vocab / 32)]."""
_Ids = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


class GrammarMasks:
    """Asks grammars about draws, fills masks, and tells them what was drawn. Holds nothing of a sequence.

    Its methods are given the states of some draws, which all have a grammar, and `positions`: how many output tokens
    each has before the one that is drawn.
    """

    def find_broad(self, states: Seq[SamplingState], positions: Seq[int]) -> _Flags:
        """bool [draws]: whether a token may be drawn without a mask."""
        broad = np.zeros(len(states), dtype=np.bool_)
        for i, (grammar, position) in enumerate(zip(_grammars(states), positions, strict=True)):
            grammar.return_to(position)
            try:
                broad[i] = grammar.is_broad
            except GrammarBroken:
                continue  # the mask's to say
        return broad

    def accept(
        self, states: Seq[SamplingState], positions: Seq[int], token_ids: Seq[int], own: Seq[bool]
    ) -> tuple[_Flags, _Flags]:
        """Which draws, made without a mask from broad grammars, these allow: bool [draws].

        Also says which of them their grammars have followed already: those that share theirs with no other draw.

        Args:
            own: whether the draw is of the row's own sequence. What a parallel sample drew will be told of its fork.
        """
        grammars = _grammars(states)
        draws_of = Counter(map(id, grammars))
        accepted = np.zeros(len(states), dtype=np.bool_)
        followed = np.zeros(len(states), dtype=np.bool_)
        for i, (grammar, token_id) in enumerate(zip(grammars, token_ids, strict=True)):
            if token_id in _ends(states[i], positions[i]):
                continue  # the mask knows whether anything else can follow
            follow = own[i] and draws_of[id(grammar)] == 1
            try:
                accepted[i] = grammar.takes(token_id, follow=follow)
            except GrammarBroken:
                continue  # the mask's to say
            followed[i] = accepted[i] and follow
        return accepted, followed

    def fill(self, states: Seq[SamplingState], positions: Seq[int], vocab: int) -> Words:
        """What each draw may be: uint32 [draws, ceil(vocab / 32)].

        Raises:
            GrammarError: names the requests whose grammar cannot be followed any further.
        """
        grammars = _grammars(states)
        due: dict[int, GrammarState] = {}  # by identity: the parallel samples of a prompt share one
        masks: dict[int, Words] = {}
        for grammar, position in zip(grammars, positions, strict=True):
            grammar.return_to(position)
            if (mask := grammar.mask) is None:
                due[id(grammar)] = grammar
            else:
                masks[id(grammar)] = mask
        filled, broken = self._fill(list(due.values()), vocab)
        masks.update(zip(due, filled, strict=True))
        if broken:
            reasons = {identity: broken[row] for row, identity in enumerate(due) if row in broken}
            of = zip(states, grammars, strict=True)
            raise GrammarError({s.snapshot.request_id: reasons[id(g)] for s, g in of if id(g) in reasons})
        words = np.concatenate([masks[id(grammar)] for grammar in grammars]).reshape(len(grammars), -1)
        _forbid_ends(words, states, positions)
        return words

    def follow(self, states: Seq[SamplingState], token_ids: Seq[int]) -> None:
        """Let each grammar follow its draw, which a mask has allowed, or `accept` without following it."""
        self._follow(_grammars(states), token_ids)

    def look_ahead(
        self, states: Seq[SamplingState], positions: Seq[int], token_ids: Seq[int], vocab: int
    ) -> dict[int, tuple[int, ...]]:
        """Find out what may follow the draws; what must, one way only, is taken in and returned by their numbers.

        Each such token is the one that a mask would have allowed in its place: without it, it would be drawn next.
        """
        going: dict[int, GrammarState] = {}
        for i, (state, grammar) in enumerate(zip(states, _grammars(states), strict=True)):
            goes_on = positions[i] + 1 < (state.snapshot.params.max_tokens or 1)
            if goes_on and grammar.is_sound and token_ids[i] not in grammar.eos_token_ids:
                going[i] = grammar
        narrow = _narrow(going)
        if len(states) > _MOST_TO_FORCE:
            self._begin_masks(list(narrow.values()), vocab)
            return {}
        forced: dict[int, list[int]] = {}
        while narrow:
            forcing: dict[int, int] = {}
            for i, token_id in self._find_only(narrow, vocab).items():
                params, already = states[i].snapshot.params, forced.setdefault(i, [])
                room = min((params.max_tokens or 1) - positions[i] - 1, _MOST_FORCED) - len(already)
                # Each token is reported with what the model gave it, or may end the text: it is drawn, not forced.
                if room > 0 and not params.needs_logprobs and not params.stop:
                    already.append(token_id)
                    forcing[i] = token_id
            going = {i: narrow[i] for i in forcing}
            self._follow(list(going.values()), list(forcing.values()))
            narrow = _narrow(
                {
                    i: grammar
                    for i, grammar in going.items()
                    if grammar.is_sound and forcing[i] not in grammar.eos_token_ids
                }
            )
        return {i: tuple(following) for i, following in forced.items() if following}

    def _find_only(self, grammars: dict[int, GrammarState], vocab: int) -> dict[int, int]:
        """Let some grammars keep their masks; returns the token of each that allows one only."""
        words, broken = self._fill(list(grammars.values()), vocab)
        for row, grammar in enumerate(grammars.values()):
            if row in broken:
                grammar.failed()  # said when it draws again
                words[row] = 0
            else:
                grammar.keep(words[row])
        single = np.flatnonzero(np.bitwise_count(words).sum(-1) == 1)
        _, token_ids = _positions(words[single])
        numbers = list(grammars)
        return {numbers[row]: token_id for row, token_id in zip(single.tolist(), token_ids.tolist(), strict=True)}

    def _begin_masks(self, grammars: list[GrammarState], vocab: int) -> None:
        """Let another thread fill some masks while this one does the rest of the step."""
        if not grammars:
            return
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        words = np.empty((len(grammars), -(-vocab // 32)), dtype=np.uint32)
        begun = threading.Event()

        def fill() -> None:
            begun.set()
            self._one_thread.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.shape[1] * 4, len(words))

        filling = self._beside.submit(fill)
        begun.wait()  # so that it has had the interpreter's lock, else it would begin when the model does
        for grammar, (matcher, row) in zip(grammars, matchers, strict=True):
            grammar.keep_later(_MaskBeside(filling, matcher, words[row]))

    def _follow(self, grammars: Seq[GrammarState], token_ids: Seq[int]) -> None:
        """Let grammars follow tokens that they allow."""
        going: list[tuple[Any, int]] = []
        followers: list[GrammarState] = []
        for grammar, token_id in zip(grammars, token_ids, strict=True):
            if token_id not in grammar.eos_token_ids:
                going.append((grammar.matcher, token_id))
                followers.append(grammar)
            grammar.drew(token_id)
        if going:
            for grammar, ok in zip(followers, self._executor.consume_token_par(going), strict=True):
                if not ok:
                    grammar.failed()

    def _fill(self, grammars: Seq[GrammarState], vocab: int) -> tuple[Words, dict[int, str]]:
        """A mask for each; those of broken ones are void: by their rows, why they are."""
        words = np.empty((len(grammars), -(-vocab // 32)), dtype=np.uint32)
        broken: dict[int, str] = {}
        matchers: list[tuple[Any, int]] = []
        for row, grammar in enumerate(grammars):
            try:
                matchers.append((grammar.matcher, row))
            except GrammarBroken as error:
                broken[row] = str(error)
        self._compute(matchers, words)
        for matcher, row in matchers:
            if not matcher.is_stopped():
                continue
            if matcher.is_error():
                try:
                    matcher = self._compute_anew(grammars[row], row, words)
                except GrammarBroken as error:
                    broken[row] = str(error)
                    continue
            if matcher.is_stopped():
                words[row] = 0
                _set(words[row], grammars[row].eos_token_id)
        return words, broken

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

    @cached_property
    def _one_thread(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(1)

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-masks")


@dataclass(frozen=True, slots=True)
class _MaskBeside:
    """One of many that another thread fills."""

    filling: Future[None]
    matcher: Any
    words: Words

    def result(self) -> Words | None:
        self.filling.result()
        # What cannot go on, or has become too complex, is left to `GrammarMasks.fill`.
        return None if self.matcher.is_stopped() else self.words


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


def _forbid_ends(words: Words, states: Seq[SamplingState], positions: Seq[int]) -> None:
    """`min_tokens` and `ignore_eos` keep an output from ending, as long as the grammar allows anything else."""
    for row, (state, position) in enumerate(zip(states, positions, strict=True)):
        if not (ends := [token_id for token_id in _ends(state, position) if _is_set(words, row, token_id)]):
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


def _is_set(words: Words, row: int, token_id: int) -> bool:
    return token_id // 32 < words.shape[1] and bool(int(words.item(row, token_id // 32)) >> token_id % 32 & 1)


def _set(words: Words, token_id: int) -> None:
    words[token_id // 32] |= np.uint32(1 << token_id % 32)


def _narrow(grammars: dict[int, GrammarState]) -> dict[int, GrammarState]:
    narrow: dict[int, GrammarState] = {}
    for i, grammar in grammars.items():
        try:
            if not grammar.is_broad:
                narrow[i] = grammar
        except GrammarBroken:
            continue  # said when it draws again
    return narrow


def _grammars(states: Seq[SamplingState]) -> list[GrammarState]:
    return [state.grammar for state in states if state.grammar is not None]
