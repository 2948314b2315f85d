"""Advances the grammars of many draws, and fills their next masks, in another thread during the rest of the step.

    engine's thread   draw ── hand over ── update, plan, ─────── the model, without the GIL ─────── draw
    another                       └─ follow the tokens ── free text? ── fill masks ── apply limits ──┘

llguidance's calls for a single grammar hold the GIL, which the model's computation does not need.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from octavo.grammar.state import GrammarFinding, GrammarState, PendingFindings, allows_free_text
from octavo.sampling.batch import SamplingState
from octavo.sampling.mask_limits import finish_masks, grammars_of, may_go_on

_Task = tuple[SamplingState, Any, int, bool]
"""A state, its matcher, the token that was drawn, and whether the matcher has already followed it."""


class MasksBeside:
    """One thread, started by the first use."""

    def go_on(self, states: Seq[SamplingState], token_ids: Seq[int], followed: Seq[bool], vocab: int) -> None:
        """Let each grammar follow its draw, and find out what may come next, without waiting for it."""
        asked: list[GrammarState] = []
        tasks: list[_Task] = []
        for state, grammar, token_id, has_followed in zip(
            states, grammars_of(states), token_ids, followed, strict=True
        ):
            if grammar.is_sound:  # otherwise it is rebuilt when it draws again
                tasks.append((state, grammar.matcher, token_id, has_followed))
                asked.append(grammar)
            if not has_followed:
                grammar.drew(token_id)
        if asked:
            vocabulary = asked[0].compiled.vocabulary
            task = self._thread.submit(self._find, tasks, vocabulary.eos_token_ids, vocabulary.probes, -(-vocab // 32))
            findings = PendingFindings(task)
            for place, grammar in enumerate(asked):
                grammar.find_later(findings, place)

    def _find(
        self, tasks: list[_Task], ends: frozenset[int], probes: Seq[list[int]], num_words: int
    ) -> list[GrammarFinding]:
        moves = [
            (matcher, token_id) for _, matcher, token_id, followed in tasks if not followed and token_id not in ends
        ]
        accepted = iter(self._executor.consume_token_par(moves) if moves else ())
        found: list[GrammarFinding] = []
        masked: list[tuple[int, SamplingState, Any]] = []
        for place, (state, matcher, token_id, has_followed) in enumerate(tasks):
            is_end = token_id in ends
            is_followed = has_followed or is_end or next(accepted)
            in_free_text: bool | None = None
            if is_followed and not is_end and may_go_on(state):
                in_free_text = allows_free_text(matcher, probes)
                is_followed = in_free_text or not matcher.is_error()
                if is_followed and not in_free_text:
                    masked.append((place, state, matcher))
            found.append(GrammarFinding(is_followed, in_free_text))
        self._fill(masked, num_words, found)
        return found

    def _fill(self, masked: list[tuple[int, SamplingState, Any]], num_words: int, found: list[GrammarFinding]) -> None:
        """Add their masks to the findings at these places; `GrammarMasks.fill` handles those that cannot be filled."""
        if not masked:
            return
        words = np.empty((len(masked), num_words), dtype=np.uint32)
        matchers = [(matcher, row) for row, (_, _, matcher) in enumerate(masked)]
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, num_words * 4, len(words))
        is_filled = [not matcher.is_stopped() for matcher, _ in matchers]
        words[np.logical_not(is_filled)] = 0
        finish_masks(words, [state for _, state, _ in masked])
        for (place, _, _), ok, mask in zip(masked, is_filled, words, strict=True):
            if ok:
                found[place] = found[place]._replace(mask=mask)

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(1)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-masks")
