"""Choosing and scoring tokens on a CPU by one call of the C++ library for the whole batch.

It finds the tokens that `TorchChoice` finds from the same numbers, but where a number falls onto a boundary between two
tokens, or a filter's cut onto a token: masses are summed in another order there, so that boundaries differ by about a
millionth of a row's mass.

A row is worked on by one thread, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo import kernels
from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.grammar_masks import Words
from octavo.sampling.rng import uniforms
from octavo.sampling.rows import Draws, Flags


class NativeChoice:
    """A `Choice` by the kernels of `csrc/sampling.cpp`."""

    def choose(
        self, logits: torch.Tensor, batch: SamplingBatch, is_wanted: Flags | None = None, again: Flags | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if is_wanted is None or is_wanted.all():
            return _draw(logits, np.arange(len(batch)), batch.records, batch.positions, again, None)
        draws = np.flatnonzero(is_wanted)
        token_ids = torch.zeros(len(batch), dtype=torch.int64)
        sound = torch.zeros(len(batch), dtype=torch.bool)
        if not len(draws):
            return token_ids, sound
        chosen, proper = _draw(
            logits, draws, batch.records[draws], batch.positions[draws], None if again is None else again[draws], None
        )
        index = torch.from_numpy(draws)
        token_ids[index], sound[index] = chosen, proper
        return token_ids, sound

    def choose_allowed(
        self, logits: torch.Tensor, batch: SamplingBatch, draws: Draws, words: Words, again: Flags
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _draw(logits, draws, batch.records[draws], batch.positions[draws], again, words)

    def score(
        self, logits: torch.Tensor, rows: Draws, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        index = torch.from_numpy(rows)
        most = [min(k, logits.shape[1]) for k in num_top]
        found = kernels.score_tokens(logits, index, token_ids[index], torch.tensor(most, dtype=torch.int64))
        scored = zip(*(each.tolist() for each in found), most, strict=True)
        return [
            TokenLogprobs(logprob, rank, TopLogprobs(ids[:k], values[:k]) if k else ())
            for logprob, rank, ids, values, k in scored
        ]


def _draw(
    logits: torch.Tensor,
    rows: Draws,
    records: npt.NDArray[Any],
    positions: npt.NDArray[np.int64],
    again: Flags | None,
    words: Words | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = np.zeros((len(rows), 5))
    is_greedy = records["greedy"]
    if not is_greedy.all():
        numbers[:, 0] = uniforms(records["seed"], positions, again)
        numbers[:, 1] = np.where(is_greedy, 0.0, records["temperature"])
    for column, name in enumerate(("min_p", "top_p", "top_k"), start=2):
        numbers[:, column] = records[name]
    allowed = None if words is None else torch.from_numpy(words.view(np.int32))
    token_ids, sound = kernels.draw_tokens(logits, torch.from_numpy(rows), torch.from_numpy(numbers), allowed)
    return token_ids, sound.view(torch.bool)
