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

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from octavo.sampling.batch import SamplingBatch
from octavo.sampling.grammar_masks import GrammarMasks, allowed_ids, mask, split

Draws = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Choose = Callable[[torch.Tensor, SamplingBatch, Flags, Flags], tuple[torch.Tensor, torch.Tensor]]
"""(logits, batch, which draws are wanted, which use their second number) -> token ids, whether they are sound."""


class StructuredDraws:
    """Draws for batches of which some rows have a grammar."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
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
        token_ids, sound = self._choose(logits, batch, is_first, np.zeros(len(batch), dtype=np.bool_))
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
            self._draw_masked(logits, batch, masked, is_again, token_ids, sound)
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

    def _draw_masked(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        masked: Draws,
        is_again: Flags,
        token_ids: torch.Tensor,
        sound: torch.Tensor,
    ) -> None:
        """Draw the tokens of the draws `masked` among those that their grammars allow."""
        words = self._grammars.fill(batch.select(masked), logits.shape[1])
        for places, few in zip(split(words), (True, False), strict=True):
            if not len(places):
                continue
            draws = masked[places]
            index = torch.from_numpy(draws).to(logits.device)
            every = np.ones(len(draws), dtype=np.bool_)
            if few:
                table, is_token = (torch.from_numpy(each).to(logits.device) for each in allowed_ids(words[places]))
                rows = logits[index.unsqueeze(1), table].masked_fill_(~is_token, -torch.inf)
            else:
                rows = logits[index]
                mask(rows, np.arange(len(draws)), words[places])
            chosen, proper = self._choose(rows, batch.select(draws), every, is_again[places])
            token_ids[index] = table.gather(1, chosen.unsqueeze(1)).squeeze(1) if few else chosen
            sound[index] = proper
