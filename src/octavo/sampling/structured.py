"""Draws for structured outputs: many without a mask, but with the same distribution as with one.

After each token a grammar is either in free text or not (`GrammarState.in_free_text`):

    {"name": …    few tokens may follow: a mask takes 30 µs
    "in a text    a mask would take 200 µs and allow nearly all tokens; checking one token takes 10 µs

    in free text    1. a token is drawn from the whole vocabulary       (seed, position), first number
                    2. if its grammar allows it, it is kept
                    3. otherwise another is drawn under the mask        (seed, position), second number
    elsewhere       1. a token is drawn under the mask                  (seed, position), first number

A token that is kept only if it is allowed has the distribution of a draw among the allowed tokens (von Neumann's
rejection sampling), and so has a draw among them with an independent number; hence so has the result. With greedy
decoding both ways give the largest allowed logit. Which way is used for a row depends on that row alone. Filters
(top_k, top_p, min_p) must choose among the tokens that the mask allows, so their rows always use a mask.

One call of llguidance fills all masks that are needed. If a mask allows a single token, that token is forced: it
follows the drawn one at once, without a step. If there are many draws, another thread advances the grammars and fills
their next masks during the rest of the step:

    engine's thread   draw ── hand over ── update, plan, ─────── the model, without the GIL ─────── draw
    another                       └─ follow the tokens ── free text? ── fill masks ── apply limits ──┘

llguidance's calls for a single grammar hold the GIL, which the model's computation does not need.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import GrammarError
from octavo.grammar.state import GrammarBroken, GrammarFinding, GrammarState, PendingFindings, allows_free_text
from octavo.sampling.batch import SamplingBatch, SamplingState
from octavo.sampling.choice import Choice, DrawMasks, DrawRows, Flags, look_at, place
from octavo.sampling.masks import Words, finish_masks, forbidden_ends, grammars_of, may_go_on, positions_of
from octavo.scheduler.plan import MOST_FORCED

# With more draws than this in a step, forced tokens are left to the next step: finding them then costs as much as a
# draw.
_MOST_TO_FORCE = 32
_MOST_THREADS = 8


class StructuredDraws:
    """Draws for batches in which some rows have a grammar. It holds no state of sequences.

    `draw` does it all; the other methods are its parts. They take the states of some draws, which all have a grammar,
    and `positions`, the number of output tokens before the one being drawn.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._thread = _MaskThread()

    def draw(
        self, logits: torch.Tensor, batch: SamplingBatch, structured: DrawRows, own: Flags
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, tuple[int, ...]]]:
        """Draw token ids; also returns whether each row's logits allow a draw, and forced tokens by draw.

        Args:
            logits: float32 [draws, vocab]; read-only.
            structured: the draws that have a grammar, in ascending order.
            own: bool [draws]: whether the draw is for the row's own sequence.

        Raises:
            GrammarError: some grammars cannot be followed any further; names the requests.
        """
        states = [batch.states[i] for i in structured.tolist()]
        positions = batch.positions[structured].tolist()
        records, own = batch.records[structured], own[structured]
        is_tried = (records["top_k"] == 0) & (records["top_p"] == 1.0) & (records["min_p"] == 0.0) | records["greedy"]
        is_tried &= self.find_free_text(states, positions)
        masks = None
        if len(masked := np.flatnonzero(~is_tried)):
            mask_of = np.full(len(batch), -1)
            mask_of[structured[masked]] = np.arange(len(masked))
            masks = DrawMasks(self.fill(*_some(masked, states, positions), logits.shape[1]), mask_of)
        token_ids, valid = self._choice.choose(logits, batch, masks)
        followed = np.zeros(len(structured), dtype=np.bool_)
        if len(tried := np.flatnonzero(is_tried)):
            drawn = look_at(token_ids, structured[tried]).tolist()
            accepted, followed[tried] = self.accept(*_some(tried, states, positions), drawn, own[tried].tolist())
            if len(refused := tried[~accepted]):
                words = self.fill(*_some(refused, states, positions), logits.shape[1])
                rows = structured[refused]
                each = DrawMasks(words, np.arange(len(rows)))
                chosen, proper = self._choice.choose(logits, batch.select(rows), each, rows, again=True)
                place(token_ids, rows, chosen)
                place(valid, rows, proper)
        if not bool(valid.all()):
            return token_ids, valid, {}
        drawn = look_at(token_ids, structured).tolist()
        mine = np.flatnonzero(own).tolist()
        forced = self.go_on(
            [states[i] for i in mine],
            [positions[i] for i in mine],
            [drawn[i] for i in mine],
            followed[mine].tolist(),
            logits.shape[1],
        )
        numbers = structured[mine].tolist()
        return token_ids, valid, {numbers[i]: following for i, following in forced.items()}

    def find_free_text(self, states: Seq[SamplingState], positions: Seq[int]) -> Flags:
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
    ) -> tuple[Flags, Flags]:
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
            self._thread.go_on(states, token_ids, followed, vocab)
            return {}
        due = [i for i, has_followed in enumerate(followed) if not has_followed]
        grammars = grammars_of(states)
        self.follow([grammars[i] for i in due], [token_ids[i] for i in due])
        return self.look_ahead(states, positions, token_ids, vocab)

    def look_ahead(
        self, states: Seq[SamplingState], positions: Seq[int], token_ids: Seq[int], vocab: int
    ) -> dict[int, tuple[int, ...]]:
        """Find and follow the forced tokens after the draws, which have been followed; returns them like `go_on`."""
        going: dict[int, GrammarState] = {}
        for i, (state, grammar) in enumerate(zip(states, grammars_of(states), strict=True)):
            if may_go_on(state) and grammar.is_valid and token_ids[i] not in grammar.eos_token_ids:
                going[i] = grammar
        going = _outside_free_text(going)
        forced: dict[int, list[int]] = {}
        while going:
            forcing: dict[int, int] = {}
            for i, token_id in self._find_only({i: states[i] for i in going}, vocab).items():
                params, already = states[i].snapshot.params, forced.setdefault(i, [])
                room = min((params.max_tokens or 1) - positions[i] - 1, MOST_FORCED) - len(already)
                # With logprobs or stop strings a token is drawn rather than forced, because it is reported with its
                # log-probability, or may end the text.
                if room > 0 and not params.needs_logprobs and not params.stop:
                    already.append(token_id)
                    forcing[i] = token_id
            forced_on = {i: going[i] for i in forcing}
            self.follow(list(forced_on.values()), list(forcing.values()))
            going = _outside_free_text(
                {
                    i: grammar
                    for i, grammar in forced_on.items()
                    if grammar.is_valid and forcing[i] not in grammar.eos_token_ids
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

    def follow(self, grammars: Seq[GrammarState], token_ids: Seq[int]) -> None:
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


def _some(
    places: npt.NDArray[np.int64], states: list[SamplingState], positions: list[int]
) -> tuple[list[SamplingState], list[int]]:
    chosen = places.tolist()
    return [states[i] for i in chosen], [positions[i] for i in chosen]


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


_Task = tuple[SamplingState, Any, int, bool]
"""A state, its matcher, the token that was drawn, and whether the matcher has already followed it."""


class _MaskThread:
    """Advances the grammars of many draws, and fills their next masks, in a thread started by the first use."""

    def go_on(self, states: Seq[SamplingState], token_ids: Seq[int], followed: Seq[bool], vocab: int) -> None:
        """Let each grammar follow its draw, and find out what may come next, without waiting for it."""
        asked: list[GrammarState] = []
        tasks: list[_Task] = []
        for state, grammar, token_id, has_followed in zip(
            states, grammars_of(states), token_ids, followed, strict=True
        ):
            if grammar.is_valid:  # otherwise it is rebuilt when it draws again
                tasks.append((state, grammar.matcher, token_id, has_followed))
                asked.append(grammar)
            if not has_followed:
                grammar.drew(token_id)
        if asked:
            vocabulary = asked[0].compiled.vocabulary
            task = self._thread.submit(self._find, tasks, vocabulary.eos_token_ids, vocabulary.probes, -(-vocab // 32))
            findings = PendingFindings(task)
            for index, grammar in enumerate(asked):
                grammar.find_later(findings, index)

    def _find(
        self, tasks: list[_Task], ends: frozenset[int], probes: Seq[list[int]], num_words: int
    ) -> list[GrammarFinding]:
        moves = [
            (matcher, token_id) for _, matcher, token_id, followed in tasks if not followed and token_id not in ends
        ]
        accepted = iter(self._executor.consume_token_par(moves) if moves else ())
        found: list[GrammarFinding] = []
        masked: list[tuple[int, SamplingState, Any]] = []
        for index, (state, matcher, token_id, has_followed) in enumerate(tasks):
            is_end = token_id in ends
            is_followed = has_followed or is_end or next(accepted)
            in_free_text: bool | None = None
            if is_followed and not is_end and may_go_on(state):
                in_free_text = allows_free_text(matcher, probes)
                is_followed = in_free_text or not matcher.is_error()
                if is_followed and not in_free_text:
                    masked.append((index, state, matcher))
            found.append(GrammarFinding(is_followed, in_free_text))
        self._fill(masked, num_words, found)
        return found

    def _fill(self, masked: list[tuple[int, SamplingState, Any]], num_words: int, found: list[GrammarFinding]) -> None:
        """Add the masks to the findings at these indices; `StructuredDraws.fill` handles the others."""
        if not masked:
            return
        words = np.empty((len(masked), num_words), dtype=np.uint32)
        matchers = [(matcher, row) for row, (_, _, matcher) in enumerate(masked)]
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, num_words * 4, len(words))
        is_filled = [not matcher.is_stopped() for matcher, _ in matchers]
        words[np.logical_not(is_filled)] = 0
        finish_masks(words, [state for _, state, _ in masked])
        for (index, _, _), ok, mask in zip(masked, is_filled, words, strict=True):
            if ok:
                found[index] = found[index]._replace(mask=mask)

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(1)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-masks")
