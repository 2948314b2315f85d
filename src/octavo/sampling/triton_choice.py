"""Choosing tokens on a GPU by one kernel for the whole batch, between which and the next step nothing waits.

It finds the tokens that `TorchChoice` finds from the same numbers, but where a number falls onto a boundary between two
tokens, or a filter's cut onto a token: masses are summed in another order there.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.choice import TorchChoice
from octavo.sampling.grammar_masks import Words
from octavo.sampling.rng import uniforms
from octavo.sampling.rows import Draws, Flags, look_at
from octavo.sampling.triton_draw import draw_rows
from octavo.storage.device_copy import to_device


class TritonChoice(TorchChoice):
    """A `Choice` by the kernel of `triton_draw`, which applies masks too; torch scores, with one wait for the host."""

    def choose(
        self, logits: torch.Tensor, batch: SamplingBatch, is_wanted: Flags | None = None, again: Flags | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, sound = draw_rows(logits, _table(logits, batch, again))
        return token_ids, sound.bool()

    def choose_allowed(
        self, logits: torch.Tensor, batch: SamplingBatch, draws: Draws, words: Words, again: Flags
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits[torch.from_numpy(draws).to(logits.device)]
        masks = torch.from_numpy(words.view(np.int32)).to(logits.device)
        token_ids, sound = draw_rows(rows, _table(rows, batch.select(draws), again), masks)
        return token_ids, sound.bool()

    def score(
        self, logits: torch.Tensor, rows: Draws, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        logits, token_ids = look_at(logits, rows), look_at(token_ids, rows)
        logprobs, given = logits.log_softmax(-1), token_ids.unsqueeze(1)
        ranks = (logits > logits.gather(1, given)).sum(-1, keepdim=True) + 1
        most = min(max(num_top), logits.shape[1])
        top_ids = _likeliest(logits, most)
        # Exact in float64: ids, ranks and float32 alike.
        pieces = (logprobs.gather(1, given), ranks, top_ids, logprobs.gather(1, top_ids))
        found = torch.cat([piece.double() for piece in pieces], dim=1).tolist()
        return [
            TokenLogprobs(logprob, int(rank), TopLogprobs([int(i) for i in top[:k]], top[most : most + k]) if k else ())
            for (logprob, rank, *top), k in zip(found, num_top, strict=True)
        ]


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [rows, k]: equals by rising id. Order and id are one number each, so that no tie is left to `topk`."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    last = 0x7FFF_FFFF
    keys = (order << 31) + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(k, dim=-1).values & last)


def _table(logits: torch.Tensor, batch: SamplingBatch, again: Flags | None) -> torch.Tensor:
    """float64 [draws, 6], as `triton_draw.PARAMETERS` says, in one transfer."""
    records = batch.records
    with np.errstate(divide="ignore"):
        log_min_p = np.log(records["min_p"].astype(np.float32))
    columns = (
        uniforms(records["seed"], batch.positions, again),
        np.where(records["greedy"], 1.0, records["temperature"]),
        log_min_p,
        records["top_p"],
        np.where(records["top_k"] < logits.shape[1], records["top_k"], 0.0),
        records["greedy"],
    )
    return to_device(np.column_stack(columns), logits.device)
