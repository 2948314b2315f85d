"""Draws from structured outputs: mostly without a mask, and the same tokens as if every row had one.

    1. every row draws a token of the whole vocabulary         (seed, position), first number
    2. its grammar allows it: it stands
    3. else the others are masked, and one is drawn again      (seed, position), second number

A token that is drawn and kept only if it is allowed has the distribution of one that is drawn among the allowed
(von Neumann's rejection), and so has one that is drawn among them with a number of its own: so has the outcome. Under
greedy decoding both steps give the largest allowed logit. Whether step 3 is due depends on the row alone.

Filters (top_k, top_p, min_p) choose among what a mask leaves: their rows go to step 3 at once, with the first number.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.choice import Choice
from octavo.sampling.grammar_masks import GrammarMasks
from octavo.sampling.rows import Draws, Flags, place


class StructuredDraws:
    """Draws for batches of which some rows have a grammar."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._grammars = GrammarMasks()

    def draw(
        self, logits: torch.Tensor, batch: SamplingBatch, structured: Draws, own: Flags
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, tuple[int, ...]]]:
        """Token ids, whether they are sound, and what must follow some of them, by the number of the draw.

        Args:
            logits: float32 [draws, vocab]; only read.
            structured: the draws that have a grammar, rising.
            own: bool [draws]: whether the draw is of the row's own sequence.

        Raises:
            GrammarError: names the requests whose grammar cannot be followed any further.
        """
        records = batch.records[structured]
        is_filtered = (records["top_k"] > 0) | (records["top_p"] < 1.0) | (records["min_p"] > 0.0)
        is_filtered &= ~records["greedy"]
        tried = structured[~is_filtered]
        is_first = np.ones(len(batch), dtype=np.bool_)
        is_first[structured[is_filtered]] = False
        token_ids, sound = self._choice.choose(logits, batch, is_first)
        is_open = np.zeros(len(batch), dtype=np.bool_)
        is_open[structured] = True
        followed = np.zeros(len(batch), dtype=np.bool_)
        if len(tried):
            drawn = token_ids[torch.from_numpy(tried).to(token_ids.device)].tolist()
            accepted, ahead = self._grammars.accept(batch.select(tried), drawn, own[tried].tolist())
            is_open[tried] = ~accepted
            followed[tried] = ahead
        masked = np.flatnonzero(is_open)
        if len(masked):
            is_again = np.isin(masked, tried, assume_unique=True)
            words = self._grammars.fill(batch.select(masked), logits.shape[1])
            chosen, proper = self._choice.choose_allowed(logits, batch, masked, words, is_again)
            place(token_ids, masked, chosen)
            place(sound, masked, proper)
        if not bool(sound.all()):
            return token_ids, sound, {}
        due = structured[own[structured] & ~followed[structured]]
        drawn = token_ids.tolist()
        if len(due):
            self._grammars.follow(batch.select(due), [drawn[i] for i in due.tolist()])
        mine = structured[own[structured]]
        forced = self._grammars.force(batch.select(mine), [drawn[i] for i in mine.tolist()])
        numbers = mine.tolist()
        return token_ids, sound, {numbers[i]: following for i, following in forced.items()}
