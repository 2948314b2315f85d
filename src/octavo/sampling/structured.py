"""Draws for structured outputs: many without a mask, but with the same distribution as with one.

    in free text    1. a token is drawn from the whole vocabulary       (seed, position), first number
                    2. if its grammar allows it, it is kept
                    3. otherwise another is drawn under the mask        (seed, position), second number
    elsewhere       1. a token is drawn under the mask                  (seed, position), first number

A token that is kept only if it is allowed has the distribution of a draw among the allowed tokens (von Neumann's
rejection sampling), and so has a draw among them with an independent number; hence so has the result. With greedy
decoding both ways give the largest allowed logit. Which way is used for a row depends on that row alone.

Filters (top_k, top_p, min_p) must choose among the tokens that the mask allows, so their rows always use a mask.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo.sampling.batch import SamplingBatch, SamplingState
from octavo.sampling.choice import Choice, DrawMasks
from octavo.sampling.grammar_masks import GrammarMasks
from octavo.sampling.rows import DrawRows, Flags, look_at, place


class StructuredDraws:
    """Draws for batches in which some rows have a grammar."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._grammars = GrammarMasks()

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
        is_tried &= self._grammars.find_free_text(states, positions)
        masks = None
        if len(masked := np.flatnonzero(~is_tried)):
            mask_of = np.full(len(batch), -1)
            mask_of[structured[masked]] = np.arange(len(masked))
            masks = DrawMasks(self._grammars.fill(*_some(masked, states, positions), logits.shape[1]), mask_of)
        token_ids, sound = self._choice.choose(logits, batch, masks)
        followed = np.zeros(len(structured), dtype=np.bool_)
        if len(tried := np.flatnonzero(is_tried)):
            drawn = look_at(token_ids, structured[tried]).tolist()
            accepted, followed[tried] = self._grammars.accept(
                *_some(tried, states, positions), drawn, own[tried].tolist()
            )
            if len(refused := tried[~accepted]):
                words = self._grammars.fill(*_some(refused, states, positions), logits.shape[1])
                chosen, proper = self._choice.choose_again(logits, batch, structured[refused], words)
                place(token_ids, structured[refused], chosen)
                place(sound, structured[refused], proper)
        if not bool(sound.all()):
            return token_ids, sound, {}
        drawn = look_at(token_ids, structured).tolist()
        mine = np.flatnonzero(own).tolist()
        forced = self._grammars.go_on(
            [states[i] for i in mine],
            [positions[i] for i in mine],
            [drawn[i] for i in mine],
            followed[mine].tolist(),
            logits.shape[1],
        )
        numbers = structured[mine].tolist()
        return token_ids, sound, {numbers[i]: following for i, following in forced.items()}


def _some(
    places: npt.NDArray[np.int64], states: list[SamplingState], positions: list[int]
) -> tuple[list[SamplingState], list[int]]:
    chosen = places.tolist()
    return [states[i] for i in chosen], [positions[i] for i in chosen]
