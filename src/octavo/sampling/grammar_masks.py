"""Computes which tokens the grammars of a step's draws allow.

After each token a grammar is either in free text or not (`GrammarState.in_free_text`):

    {"name": …    few tokens may follow: a mask takes 30 µs, and the next token is drawn under it
    "in a text    a mask would take 200 µs and allow nearly all tokens: a token is drawn without a mask and checked by
                  the grammar, which takes 10 µs; if it is refused, another is drawn under a mask

(`structured.py` explains why the distribution is the same.) One call of llguidance fills all masks that are needed. If
a mask allows a single token, that token is forced: it follows the drawn one at once, without a step. If there are many
draws, another thread advances the grammars and fills the masks while the engine's thread does the rest of the step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import GrammarError
from octavo.grammar.state import GrammarBroken, GrammarState
from octavo.sampling.batch import SamplingState
from octavo.sampling.mask_limits import finish_masks, forbidden_ends, grammars_of, may_go_on
from octavo.sampling.mask_words import Words, positions_of
from octavo.sampling.masks_beside import MasksBeside

# The maximum number of tokens forced after one drawn token. A grammar may force thousands; the rest follow later.
_MOST_FORCED = 32
# With more draws than this in a step, forced tokens are left to the next step: finding them then costs as much as a
# draw.
_MOST_TO_FORCE = 32
_MOST_THREADS = 8

_Flags = npt.NDArray[np.bool_]


class GrammarMasks:
    """Fills the masks of draws from their grammars, and advances the grammars. It holds no state of sequences.

    Its methods take the states of some draws, which all have a grammar, and `positions`, the number of output tokens
    before the one being drawn.
    """

    def __init__(self) -> None:
        self._beside = MasksBeside()

    def find_free_text(self, states: Seq[SamplingState], positions: Seq[int]) -> _Flags:
        """Return bool [draws]: whether a token may be drawn without a mask."""
        found = np.zeros(len(states), dtype=np.bool_)
        for i, (grammar, position) in enumerate(zip(grammars_of(states), positions, strict=True)):
            grammar.return_to(position)
            try:
                found[i] = grammar.in_free_text
            except GrammarBroken:
                continue  # `fill` reports it
        return found

    def accept(
        self, states: Seq[SamplingState], positions: Seq[int], token_ids: Seq[int], own: Seq[bool]
    ) -> tuple[_Flags, _Flags]:
        """Check draws that were made without a mask in free text against their grammars.

        Args:
            own: whether the draw is for the row's own sequence; a parallel sample's token is passed to its fork later.

        Returns:
            bool [draws]: whether the grammar allows the token; and bool [draws]: whether it has already followed it, as
            it does for an allowed token of the row's own sequence if no other draw shares the grammar.
        """
        grammars = grammars_of(states)
        draws_of = Counter(map(id, grammars))
        accepted = np.zeros(len(states), dtype=np.bool_)
        followed = np.zeros(len(states), dtype=np.bool_)
        for i, (grammar, token_id) in enumerate(zip(grammars, token_ids, strict=True)):
            if token_id in forbidden_ends(states[i], positions[i]):
                continue  # only a mask shows whether anything else can follow
            follow = own[i] and draws_of[id(grammar)] == 1
            try:
                accepted[i] = grammar.takes(token_id, follow=follow)
            except GrammarBroken:
                continue  # `fill` reports it
            followed[i] = accepted[i] and follow
        return accepted, followed

    def fill(self, states: Seq[SamplingState], positions: Seq[int], vocab: int) -> Words:
        """Return the masks of allowed tokens, uint32 [draws, ceil(vocab / 32)].

        Raises:
            GrammarError: some grammars cannot be followed any further; names the requests.
        """
        masks: list[Words | None] = []
        due: dict[int, SamplingState] = {}  # by their grammar's identity: the parallel samples of a prompt share one
        for state, grammar, position in zip(states, grammars_of(states), positions, strict=True):
            grammar.return_to(position)
            masks.append(mask := grammar.mask)
            if mask is None:
                due[id(grammar)] = state
        filled, broken = self._fill(list(due.values()), vocab)
        if broken:
            reasons = {identity: broken[row] for row, identity in enumerate(due) if row in broken}
            of = zip(states, map(id, grammars_of(states)), strict=True)
            raise GrammarError({s.snapshot.request_id: reasons[identity] for s, identity in of if identity in reasons})
        row_of = {identity: row for row, identity in enumerate(due)}
        words = np.empty((len(states), -(-vocab // 32)), dtype=np.uint32)
        for word, mask, state in zip(words, masks, states, strict=True):
            word[:] = filled[row_of[id(state.grammar)]] if mask is None else mask
        return words

    def follow(self, states: Seq[SamplingState], token_ids: Seq[int]) -> None:
        """Advance each grammar by its draw, which must be allowed by a mask or `accept`."""
        self._follow(grammars_of(states), token_ids)

    def go_on(
        self, states: Seq[SamplingState], positions: Seq[int], token_ids: Seq[int], followed: Seq[bool], vocab: int
    ) -> dict[int, tuple[int, ...]]:
        """Let each grammar follow its draw, and compute what may come next.

        Args:
            followed: bool [draws]: whether the grammar has already followed its draw in `accept`.

        Returns:
            Forced tokens by index of the draw, which their grammars have followed; otherwise they would be drawn in
            later steps. Empty for more than `_MOST_TO_FORCE` draws.
        """
        if len(states) > _MOST_TO_FORCE:
            self._beside.go_on(states, token_ids, followed, vocab)
            return {}
        due = [i for i, has_followed in enumerate(followed) if not has_followed]
        self.follow([states[i] for i in due], [token_ids[i] for i in due])
        return self.look_ahead(states, positions, token_ids, vocab)

    def look_ahead(
        self, states: Seq[SamplingState], positions: Seq[int], token_ids: Seq[int], vocab: int
    ) -> dict[int, tuple[int, ...]]:
        """Find and follow the forced tokens after the draws, which have been followed; returns them like `go_on`."""
        going: dict[int, GrammarState] = {}
        for i, (state, grammar) in enumerate(zip(states, grammars_of(states), strict=True)):
            if may_go_on(state) and grammar.is_sound and token_ids[i] not in grammar.eos_token_ids:
                going[i] = grammar
        going = _outside_free_text(going)
        forced: dict[int, list[int]] = {}
        while going:
            forcing: dict[int, int] = {}
            for i, token_id in self._find_only({i: states[i] for i in going}, vocab).items():
                params, already = states[i].snapshot.params, forced.setdefault(i, [])
                room = min((params.max_tokens or 1) - positions[i] - 1, _MOST_FORCED) - len(already)
                # With logprobs or stop strings a token is drawn rather than forced, because it is reported with its
                # log-probability, or may end the text.
                if room > 0 and not params.needs_logprobs and not params.stop:
                    already.append(token_id)
                    forcing[i] = token_id
            forced_on = {i: going[i] for i in forcing}
            self._follow(list(forced_on.values()), list(forcing.values()))
            going = _outside_free_text(
                {
                    i: grammar
                    for i, grammar in forced_on.items()
                    if grammar.is_sound and forcing[i] not in grammar.eos_token_ids
                }
            )
        return {i: tuple(following) for i, following in forced.items() if following}

    def _find_only(self, states: dict[int, SamplingState], vocab: int) -> dict[int, int]:
        """Compute and keep the masks of some grammars; returns the token of each that allows only one."""
        words, broken = self._fill(list(states.values()), vocab)
        for row, grammar in enumerate(grammars_of(list(states.values()))):
            if row in broken:
                grammar.failed()  # reported when it draws again
            else:
                grammar.keep(words[row])
        single = np.flatnonzero(np.bitwise_count(words).sum(-1) == 1)
        _, token_ids = positions_of(words[single])
        numbers = list(states)
        return {numbers[row]: token_id for row, token_id in zip(single.tolist(), token_ids.tolist(), strict=True)}

    def _follow(self, grammars: Seq[GrammarState], token_ids: Seq[int]) -> None:
        """Advance grammars by tokens that they allow."""
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

    def _fill(self, states: Seq[SamplingState], vocab: int) -> tuple[Words, dict[int, str]]:
        """Fill a mask for each grammar; also returns the reasons of broken ones by row, whose masks are empty."""
        grammars = grammars_of(states)
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
        words[list(broken)] = 0
        finish_masks(words, states)
        return words, broken

    def _compute(self, matchers: list[tuple[Any, int]], words: Words) -> None:
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.shape[1] * 4, len(words))

    def _compute_anew(self, grammar: GrammarState, row: int, words: Words) -> Any:
        """Retry a mask that became too complex, without searching for forced tokens; raises `GrammarBroken`."""
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


def _set(words: Words, token_id: int) -> None:
    words[token_id // 32] |= np.uint32(1 << token_id % 32)


def _outside_free_text(grammars: dict[int, GrammarState]) -> dict[int, GrammarState]:
    found: dict[int, GrammarState] = {}
    for i, grammar in grammars.items():
        try:
            if not grammar.in_free_text:
                found[i] = grammar
        except GrammarBroken:
            continue  # reported when it draws again
    return found
