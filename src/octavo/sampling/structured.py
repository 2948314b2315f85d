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
decoding both ways give the largest allowed logit. The choice for a row depends on that row alone. Filters
(top_k, top_p, min_p) must choose among the tokens that the mask allows, so their rows always use a mask.

Threads of llguidance fill masks if there are many. If a mask allows a single token, that token is forced: it follows
the drawn one at once, without a step. If there are many draws, another thread advances the grammars and fills their
next masks during the rest of the step:

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
import torch

from octavo.errors import GrammarError
from octavo.grammar.compiler import Vocabulary
from octavo.grammar.state import GrammarBroken, GrammarFinding, GrammarState, PendingFindings, allows_free_text
from octavo.sampling.batch import NO_DRAFT, SamplingBatch, SamplingState
from octavo.sampling.choice import Choice, DrawMasks, Flags, to_host
from octavo.sampling.masks import Words, finish_masks, forbidden_ends, positions_of
from octavo.scheduler.plan import MOST_FORCED

# With more draws than this in a step, forced tokens are left to the next step: finding them then costs as much as a
# draw.
_MOST_TO_FORCE = 32
_MOST_THREADS = 8
# Up to so many masks are filled by one thread: right after the model, waking llguidance's threads takes longer.
_MOST_ALONE = 8


class StructuredDraws:
    """Draws for batches in which some rows have a grammar. It holds no state of sequences.

    `draw` does it all; the other methods are its parts. They take the states of some draws, which all have a grammar,
    and `positions`, the number of output tokens before the one being drawn.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def draw(
        self, logits: torch.Tensor, batch: SamplingBatch, own: Flags | None
    ) -> tuple[list[int], list[bool], dict[int, tuple[int, ...]]]:
        """Draw token ids; also returns whether each row's logits allow a draw, and forced tokens by draw.

        Args:
            logits: float32 [draws, vocab]; read-only.
            own: bool [draws]: whether the draw is for the row's own sequence; None if all are.

        Raises:
            GrammarError: some grammars cannot be followed any further; names the requests.
        """
        states, positions, vocab = batch.states, batch.positions.tolist(), logits.shape[1]
        mine: list[int] = []  # with a grammar, and for the row's own sequence
        tried: list[int] = []
        masked: list[int] = []
        for i, state in enumerate(states):
            if state.grammar is not None:
                may_try = not state.has_filters and _in_free_text(state, positions[i])
                (tried if may_try else masked).append(i)
                if own is None or own[i]:
                    mine.append(i)
        masks = None
        if masked:
            mask_of = np.full(len(batch), -1)
            mask_of[masked] = np.arange(len(masked))
            masks = DrawMasks(self.fill([states[i] for i in masked], [positions[i] for i in masked], vocab), mask_of)
        drawn, valid = to_host(*self._choice.choose(logits, batch, masks))()
        followed: set[int] = set()
        if tried:
            accepted, followed = self._accept(batch, tried, positions, drawn, set(mine))
            if refused := [i for i in tried if i not in accepted]:
                words = self.fill([states[i] for i in refused], [positions[i] for i in refused], vocab)
                rows = np.array(refused)
                each = DrawMasks(words, np.arange(len(rows)))
                chosen = to_host(*self._choice.choose(logits, batch.select(rows), each, rows, again=True))()
                for i, token_id, is_valid in zip(refused, *chosen, strict=True):
                    drawn[i], valid[i] = token_id, is_valid
        if not all(valid):
            return drawn, valid, {}
        going = _going_on(mine, batch.drafted.tolist(), drawn)
        forced = self.go_on(
            [states[i] for i in going], [drawn[i] for i in going], [i in followed for i in going], vocab
        )
        return drawn, valid, {going[i]: following for i, following in forced.items()}

    @staticmethod
    def _accept(
        batch: SamplingBatch, tried: list[int], positions: list[int], drawn: list[int], own: set[int]
    ) -> tuple[set[int], set[int]]:
        """Check draws that were made without a mask in free text against their grammars.

        Args:
            tried: these draws.
            own: the draws for the row's own sequence; a parallel sample's token is passed to its fork later.

        Returns:
            The draws whose token the grammar allows; and those whose token it has already followed, as it does for an
            allowed token of the row's own sequence if no other draw shares the grammar.
        """
        draws_of = Counter(id(batch.states[i].grammar) for i in tried)
        accepted: set[int] = set()
        followed: set[int] = set()
        for i in tried:
            state, token_id = batch.states[i], drawn[i]
            if token_id in forbidden_ends(state, positions[i]):
                continue  # only a mask shows whether anything else can follow
            follow = i in own and draws_of[id(state.grammar)] == 1
            try:
                if state.followed.takes(token_id, follow=follow):
                    accepted.add(i)
                    if follow:
                        followed.add(i)
            except GrammarBroken:
                continue  # `fill` reports it
        return accepted, followed

    def fill(self, states: Seq[SamplingState], positions: Seq[int], vocab: int) -> Words:
        """Return the masks of allowed tokens, uint32 [draws, ceil(vocab / 32)].

        Raises:
            GrammarError: some grammars cannot be followed any further; names the requests.
        """
        masks: list[Words | None] = []
        due: dict[int, SamplingState] = {}  # by their grammar's identity: the parallel samples of a prompt share one
        for state, position in zip(states, positions, strict=True):
            grammar = state.followed
            grammar.return_to(position)
            masks.append(mask := grammar.mask)
            if mask is None:
                due[id(grammar)] = state
        grammars, num_words = [state.followed for state in due.values()], -(-vocab // 32)
        filled = np.empty((len(due), num_words), dtype=np.uint32)
        matchers: list[tuple[Any, int]] = []
        broken: dict[int, str] = {}
        for row, grammar in enumerate(grammars):
            try:
                matchers.append((grammar.matcher, row))
            except GrammarBroken as error:
                broken[id(grammar)] = str(error)
        for matcher, row in self._compute(matchers, filled, grammars):
            grammar = grammars[row]
            try:
                # A mask that became too complex is tried once more, without searching for forced tokens.
                if grammar.give_up_forcing():
                    matcher = grammar.matcher
                    if not self._compute([(matcher, row)], filled, grammars):
                        continue
                raise GrammarBroken(matcher.get_error(), len(grammar.token_ids))
            except GrammarBroken as error:
                broken[id(grammar)] = str(error)
        if broken:
            of = [(state.snapshot.request_id, id(state.grammar)) for state in states]
            raise GrammarError({request_id: broken[identity] for request_id, identity in of if identity in broken})
        finish_masks(filled, list(due.values()))
        row_of = {identity: row for row, identity in enumerate(due)}
        words = np.empty((len(states), num_words), dtype=np.uint32)
        for word, mask, state in zip(words, masks, states, strict=True):
            word[:] = filled[row_of[id(state.grammar)]] if mask is None else mask
        return words

    def _compute(
        self, matchers: list[tuple[Any, int]], words: Words, grammars: Seq[GrammarState]
    ) -> list[tuple[Any, int]]:
        return _compute(self._executor, matchers, words, grammars[0].eos_token_id) if matchers else []

    def go_on(
        self, states: Seq[SamplingState], token_ids: Seq[int], followed: Seq[bool], vocab: int
    ) -> dict[int, tuple[int, ...]]:
        """Let each grammar follow its draw, and compute what may come next: for many draws, in another thread.

        Args:
            followed: bool [draws]: whether the grammar has already followed its draw in `accept`.

        Returns:
            Forced tokens by index of the draw, which their grammars have followed; otherwise they would be drawn in
            later steps. Empty for more than `_MOST_TO_FORCE` draws.
        """
        if len(states) > _MOST_TO_FORCE:
            self._find_out(states, token_ids, followed, vocab, self._thread)
            return {}
        forced: dict[int, list[int]] = {}
        self._find_out(states, token_ids, followed, vocab)
        going = list(range(len(states)))
        while going := [i for i in going if _force(states[i], forced.setdefault(i, []))]:
            self._find_out([states[i] for i in going], [forced[i][-1] for i in going], [False] * len(going), vocab)
        return {i: tuple(following) for i, following in forced.items() if following}

    def _find_out(
        self,
        states: Seq[SamplingState],
        token_ids: Seq[int],
        followed: Seq[bool],
        vocab: int,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """Let each grammar follow its draw, and find out what may come next; in a thread, without waiting for it."""
        asked: list[GrammarState] = []
        tasks: list[_Task] = []
        for state, token_id, has_followed in zip(states, token_ids, followed, strict=True):
            grammar = state.followed
            if grammar.is_valid:  # otherwise it is rebuilt when it draws again
                tasks.append((state, grammar.matcher, token_id, has_followed))
                asked.append(grammar)
            if not has_followed:
                grammar.drew(token_id)
        if not asked:
            return
        vocabulary = asked[0].compiled.vocabulary
        findings: PendingFindings | list[GrammarFinding]
        if thread is not None:
            findings = PendingFindings(thread.submit(_find, self._single, tasks, vocabulary, vocab))
        else:
            findings = _find(self._executor, tasks, vocabulary, vocab)
        for index, grammar in enumerate(asked):
            grammar.find_later(findings, index)

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))

    @cached_property
    def _single(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(1)  # the model needs the cores

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-masks")


def _going_on(draws: list[int], drafted: list[int], token_ids: list[int]) -> list[int]:
    """Return the draws after which sequences go on: where a draft is verified, the first that differs from it."""
    going: list[int] = []
    refuted = False
    for draw in draws:
        if not refuted and drafted[draw] != token_ids[draw]:
            going.append(draw)
            refuted = True
        refuted = refuted and drafted[draw] != NO_DRAFT  # until the last draw of the sequence
    return going


def _in_free_text(state: SamplingState, position: int) -> bool:
    """Whether a token may be drawn without a mask."""
    grammar = state.followed
    grammar.return_to(position)
    try:
        return grammar.in_free_text
    except GrammarBroken:
        return False  # `fill` reports it


def _force(state: SamplingState, already: list[int]) -> bool:
    """Add the only token that may come next to those that are forced; False if none is."""
    mask = state.followed.mask
    if mask is None or np.count_nonzero(mask) != 1 or np.bitwise_count(mask).sum() != 1:
        return False
    params = state.snapshot.params
    # With logprobs or stop strings a token is drawn rather than forced, because it is reported with its
    # log-probability, or may end the text.
    if len(already) == MOST_FORCED or params.needs_logprobs or params.stop:
        return False
    already.append(int(positions_of(mask[None])[1][0]))
    return True


_Task = tuple[SamplingState, Any, int, bool]
"""A state, its matcher, the token that was drawn, and whether the matcher has already followed it."""


def _find(executor: Any, tasks: list[_Task], vocabulary: Vocabulary, vocab: int) -> list[GrammarFinding]:
    """Advance matchers by the tokens that were drawn, and find out what may come next."""
    ends = vocabulary.eos_token_ids
    moves = [(matcher, token_id) for _, matcher, token_id, followed in tasks if not followed and token_id not in ends]
    accepted = iter(executor.consume_token_par(moves) if moves else ())
    found: list[GrammarFinding] = []
    masked: list[int] = []
    for index, (state, matcher, token_id, has_followed) in enumerate(tasks):
        is_end = token_id in ends
        is_followed = has_followed or is_end or next(accepted)
        in_free_text: bool | None = None
        may_go_on = len(state.followed.token_ids) < (state.snapshot.params.max_tokens or 1)
        if is_followed and not is_end and may_go_on:
            in_free_text = allows_free_text(matcher, vocabulary.probes)
            is_followed = in_free_text or not matcher.is_error()
            if is_followed and not in_free_text:
                masked.append(index)
        found.append(GrammarFinding(is_followed, in_free_text))
    if masked:
        words = np.empty((len(masked), -(-vocab // 32)), dtype=np.uint32)
        matchers = [(tasks[index][1], row) for row, index in enumerate(masked)]
        broken = {row for _, row in _compute(executor, matchers, words, vocabulary.eos_token_id)}
        words[list(broken)] = 0
        finish_masks(words, [tasks[index][0] for index in masked])
        for row, index in enumerate(masked):
            if row not in broken:  # or `StructuredDraws.fill` computes it
                found[index] = found[index]._replace(mask=words[row])
    return found


def _compute(executor: Any, matchers: list[tuple[Any, int]], words: Words, eos_token_id: int) -> list[tuple[Any, int]]:
    """Fill the masks of matchers, each in its row; returns those in error, whose masks are meaningless."""
    address, size = words.ctypes.data, words.shape[1] * 4
    if len(matchers) <= _MOST_ALONE:
        for matcher, row in matchers:
            matcher.unsafe_compute_mask_ptr(address + row * size, size)
    else:
        executor.unsafe_compute_mask_ptr(matchers, address, size, len(words))
    stopped = [(matcher, row) for matcher, row in matchers if matcher.is_stopped()]
    for matcher, row in stopped:
        if not matcher.is_error():
            words[row] = 0
            words[row, eos_token_id // 32] = np.uint32(1 << eos_token_id % 32)
    return [(matcher, row) for matcher, row in stopped if matcher.is_error()]
