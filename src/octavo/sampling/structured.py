"""Draws from structured outputs: many without a mask, and of the same distribution as if every row had one.

    narrow grammars    1. a token is drawn under the mask                  (seed, position), first number
    broad grammars     1. a token of the whole vocabulary is drawn         (seed, position), first number
                       2. its grammar allows it: it stands
                       3. else another is drawn under the mask             (seed, position), second number

A token that is drawn and kept only if it is allowed has the distribution of one that is drawn among the allowed
(von Neumann's rejection), and so has one that is drawn among them with a number of its own: so has the outcome. Under
greedy decoding every way gives the largest allowed logit. Which way a row goes depends on that row alone.

Filters (top_k, top_p, min_p) choose among what a mask leaves: their rows have a mask always.
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
        states = [batch.states[i] for i in structured.tolist()]
        positions = batch.positions[structured].tolist()
        records, own = batch.records[structured], own[structured]
        is_tried = (records["top_k"] == 0) & (records["top_p"] == 1.0) & (records["min_p"] == 0.0) | records["greedy"]
        is_tried &= self._grammars.find_broad(states, positions)
        is_first = np.ones(len(batch), dtype=np.bool_)
        is_first[structured[~is_tried]] = False
        token_ids, sound = self._choice.choose(logits, batch, is_first)
        is_open = np.ones(len(structured), dtype=np.bool_)
        followed = np.zeros(len(structured), dtype=np.bool_)
        if len(tried := np.flatnonzero(is_tried)):
            drawn = token_ids[torch.from_numpy(structured[tried]).to(token_ids.device)].tolist()
            accepted, followed[tried] = self._grammars.accept(
                [states[i] for i in tried.tolist()], [positions[i] for i in tried.tolist()], drawn, own[tried].tolist()
            )
            is_open[tried] = ~accepted
        if len(masked := np.flatnonzero(is_open)):
            words = self._grammars.fill(
                [states[i] for i in masked.tolist()], [positions[i] for i in masked.tolist()], logits.shape[1]
            )
            draws = structured[masked]
            chosen, proper = self._choice.choose_allowed(logits, batch, draws, words, is_tried[masked])
            place(token_ids, draws, chosen)
            place(sound, draws, proper)
        if not bool(sound.all()):
            return token_ids, sound, {}
        drawn = token_ids[torch.from_numpy(structured).to(token_ids.device)].tolist()
        due = np.flatnonzero(own & ~followed).tolist()
        self._grammars.follow([states[i] for i in due], [drawn[i] for i in due])
        mine = np.flatnonzero(own).tolist()
        forced = self._grammars.look_ahead(
            [states[i] for i in mine], [positions[i] for i in mine], [drawn[i] for i in mine], logits.shape[1]
        )
        numbers = structured[mine].tolist()
        return token_ids, sound, {numbers[i]: following for i, following in forced.items()}
