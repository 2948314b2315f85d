"""Chooses and scores tokens on a CPU, with one call of the C++ library for the whole batch.

It finds the same tokens as `TorchChoice` from the same random numbers, unless a number falls on a boundary between two
tokens, or a filter's cut on a token: masses are summed in another order, so boundaries differ by about a millionth of a
row's mass.

Each row is processed by one thread, without the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo import kernels
from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.mask_words import Words
from octavo.sampling.rng import uniforms
from octavo.sampling.rows import DrawRows, Flags


class NativeChoice:
    """A `Choice` with the kernels of `csrc/sampling.cpp`."""

    leaves_out = True

    def choose(
        self, logits: torch.Tensor, batch: SamplingBatch, is_wanted: Flags | None = None, again: Flags | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_limited = batch.records["limited"]
        if is_wanted is None:
            is_wanted = np.ones(len(batch), dtype=np.bool_)
        if is_wanted.all() and not is_limited.any():
            return _draw(logits, np.arange(len(batch)), batch.records, batch.positions, again, None)
        token_ids = torch.zeros(len(batch), dtype=torch.int64)
        sound = torch.zeros(len(batch), dtype=torch.bool)
        for draws in map(np.flatnonzero, (is_wanted & ~is_limited, is_wanted & is_limited)):
            if not len(draws):
                continue
            words = _words(batch, draws, logits.shape[1]) if is_limited[draws[0]] else None
            some = None if again is None else again[draws]
            chosen, proper = _draw(logits, draws, batch.records[draws], batch.positions[draws], some, words)
            index = torch.from_numpy(draws)
            token_ids[index], sound[index] = chosen, proper
        return token_ids, sound

    def choose_allowed(
        self, logits: torch.Tensor, batch: SamplingBatch, draws: DrawRows, words: Words, again: Flags
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _draw(logits, draws, batch.records[draws], batch.positions[draws], again, words)

    def score(
        self, logits: torch.Tensor, rows: DrawRows, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        index = torch.from_numpy(rows)
        most = [min(k, logits.shape[1]) for k in num_top]
        found = kernels.score_tokens(logits, index, token_ids[index], torch.tensor(most, dtype=torch.int64))
        scored = zip(*(each.tolist() for each in found), most, strict=True)
        return [
            TokenLogprobs(logprob, rank, TopLogprobs(ids[:k], values[:k]) if k else ())
            for logprob, rank, ids, values, k in scored
        ]

    def likeliest(self, logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(logits))
        # The scored token itself, 0, is not needed.
        _, _, ids, values = kernels.score_tokens(logits, rows, torch.zeros_like(rows), torch.full_like(rows, num_top))
        return values, ids


def _words(batch: SamplingBatch, draws: DrawRows, vocab: int) -> Words:
    """Return the masks of `allowed_token_ids`, uint32 [len(draws), ceil(vocab / 32)]."""
    words = np.zeros((len(draws), -(-vocab // 32)), dtype=np.uint32)
    for row, draw in zip(words, draws.tolist(), strict=True):
        limited = batch.states[draw].allowed_words
        assert limited is not None, "its record says that it is limited"
        places, values = limited
        inside = slice(int(places.searchsorted(len(row))))
        row[places[inside]] = values[inside]
    return words


def _draw(
    logits: torch.Tensor,
    rows: DrawRows,
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
