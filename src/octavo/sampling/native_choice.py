"""Chooses and scores tokens on a CPU, with one call of the C++ library for the whole batch.

It finds the same tokens as `TorchChoice` from the same random numbers, unless a number falls on a boundary between two
tokens, or a filter's cut on a token: masses are summed in another order, so boundaries differ by about a millionth of a
row's mass.

Each row is processed by one thread, without the GIL.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo import kernels
from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.choice import DrawMasks, DrawRows


class NativeChoice:
    """A `Choice` with the kernels of `csrc/sampling.cpp`."""

    leaves_out = True

    def choose(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        masks: DrawMasks | None = None,
        rows: DrawRows | None = None,
        *,
        again: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.records["limited"].any():
            masks = _with_limits(masks, batch, logits.shape[1])
        inputs = [np.arange(len(batch)) if rows is None else rows, batch.numbers(again=again)]
        if masks is not None:
            inputs += [masks.words.view(np.int32), masks.mask_of]
        token_ids, valid = kernels.draw_tokens(logits, *map(torch.from_numpy, inputs))
        return token_ids, valid.view(torch.bool)

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


def _with_limits(masks: DrawMasks | None, batch: SamplingBatch, vocab: int) -> DrawMasks:
    """Add a mask for each draw that is limited by `allowed_token_ids`."""
    draws = np.flatnonzero(batch.records["limited"])
    words = np.zeros((len(draws), -(-vocab // 32)), dtype=np.uint32)
    for row, draw in zip(words, draws.tolist(), strict=True):
        limited = batch.states[draw].allowed_words
        assert limited is not None, "its record says that it is limited"
        places, values = limited
        inside = slice(int(places.searchsorted(len(row))))
        row[places[inside]] = values[inside]
    mask_of = np.full(len(batch), -1) if masks is None else masks.mask_of.copy()
    mask_of[draws] = np.arange(len(draws)) + (0 if masks is None else len(masks.words))
    return DrawMasks(words if masks is None else np.concatenate((masks.words, words)), mask_of)
