"""Chooses tokens on a GPU, with one kernel for the whole batch, without waiting for the host.

It finds the same tokens as `TorchChoice` from the same random numbers, unless a number falls on a boundary between two
tokens, or a filter's cut on a token, because masses are summed in another order.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.choice import DrawRows, Flags, TorchChoice, look_at
from octavo.sampling.draw import uniforms
from octavo.sampling.masks import Words
from octavo.sampling.triton_draw import draw_rows
from octavo.storage.device_copy import to_device


class TritonChoice(TorchChoice):
    """A `Choice` with the kernel of `triton_draw`, which also applies masks; scoring uses torch, with one transfer."""

    def score(
        self, logits: torch.Tensor, rows: DrawRows, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        logits, token_ids = look_at(logits, rows), look_at(token_ids, rows)
        logprobs, given = logits.log_softmax(-1), token_ids.unsqueeze(1)
        ranks = (logits > logits.gather(1, given)).sum(-1, keepdim=True) + 1
        most = min(max(num_top), logits.shape[1])
        top_ids = _likeliest(logits, most)
        # float64 holds ids, ranks and float32 values exactly.
        pieces = (logprobs.gather(1, given), ranks, top_ids, logprobs.gather(1, top_ids))
        found = torch.cat([piece.double() for piece in pieces], dim=1).tolist()
        return [
            TokenLogprobs(logprob, int(rank), TopLogprobs([int(i) for i in top[:k]], top[most : most + k]) if k else ())
            for (logprob, rank, *top), k in zip(found, num_top, strict=True)
        ]

    def _choose(
        self, logits: torch.Tensor, batch: SamplingBatch, is_wanted: Flags | None = None, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, valid = draw_rows(logits, _table(logits, batch, again=again))
        return token_ids, valid.bool()

    def _choose_allowed(
        self, logits: torch.Tensor, batch: SamplingBatch, draws: DrawRows, words: Words, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits[torch.from_numpy(draws).to(logits.device)]
        masks = torch.from_numpy(words.view(np.int32)).to(logits.device)
        token_ids, valid = draw_rows(rows, _table(rows, batch.select(draws), again=again), masks)
        return token_ids, valid.bool()


def draw_masked_row(vocab_size: int, device: torch.device) -> int:
    """Draw a token under a mask that allows the last one only, which compiles the kernel; returns that token."""
    logits = torch.zeros(1, vocab_size, device=device)
    table = torch.tensor([[0.5, 1.0, -torch.inf, 1.0, 0.0, 0.0]], dtype=torch.float64, device=device)
    masks = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    masks[0, -1] = int(np.array(1 << (vocab_size - 1) % 32, np.uint32).view(np.int32))
    token_ids, _ = draw_rows(logits, table, masks)
    return int(token_ids.item())


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k largest, int64 [rows, k], equals by ascending id, which is part of the key to avoid ties."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    last = 0x7FFF_FFFF
    keys = (order << 31) + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(k, dim=-1).values & last)


def _table(logits: torch.Tensor, batch: SamplingBatch, *, again: bool) -> torch.Tensor:
    """Return the table of `triton_draw.PARAMETERS`, float64 [draws, 6], moved to the device in one transfer."""
    records = batch.records
    with np.errstate(divide="ignore"):
        log_min_p = np.log(records["min_p"].astype(np.float32))
    columns = (
        uniforms(records["seed"], batch.positions, again=again),
        np.where(records["greedy"], 1.0, records["temperature"]),
        log_min_p,
        records["top_p"],
        np.where(records["top_k"] < logits.shape[1], records["top_k"], 0.0),
        records["greedy"],
    )
    return to_device(np.column_stack(columns), logits.device)
