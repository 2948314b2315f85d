"""Logit adjustments before a token is chosen: what may be drawn at all, minimum length, biases and penalties.

Each touches a few tokens of a row (but `allowed_token_ids` all others), so all of it is index arithmetic on flat
positions `row * vocab + token_id`, one gather and one scatter per kind for the whole batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from octavo import kernels
from octavo.sampling.batch import SamplingBatch, SamplingState
from octavo.sampling.counts import TokenCounts
from octavo.storage.device_copy import to_device

# A penalty of 1e-300 is 0 in float32, and would make infinities of logits: no request may do that to a step.
_LARGEST = 1e30

_Ids = npt.NDArray[np.int64]


def adjust(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Change float32 [rows, vocab] in place, in vLLM's order; row i belongs to draw i.

    1. `allowed_token_ids`: all others to -inf.
    2. `bad_words`: the last token of each to -inf, where the output ends in those before it.
    3. `min_tokens`: end-of-sequence and stop token ids to -inf, until that many tokens are out (with `ignore_eos`
       too, whose end-of-sequence would not end anything). Not where a grammar says which tokens may come.
    4. `logit_bias`: added.
    5. `repetition_penalty`, over prompt and output: x / r where x > 0, x * r elsewhere (Keskar et al. 2019, CTRL, 4.1).
    6. `frequency_penalty` times the token's count in the output, and `presence_penalty` if it occurs there at all:
       subtracted (OpenAI).

    Token ids outside the vocabulary are passed over: nothing can draw them.
    """
    rows = [(i, batch.states[i]) for i in np.flatnonzero(batch.records["adjusted"]).tolist()]
    ending = np.flatnonzero(batch.must_not_end).tolist()
    flat = logits.view(-1)
    vocab = logits.shape[1]
    _allow_only(logits, rows)
    _mask_bad_words(flat, vocab, rows)
    _mask_ends(flat, vocab, [(i, batch.states[i]) for i in ending])
    _add_biases(flat, vocab, rows)
    _penalise_repetition(logits, rows)
    _penalise_counts(flat, vocab, rows)


_Rows = list[tuple[int, SamplingState]]


def _allow_only(logits: torch.Tensor, rows: _Rows) -> None:
    for i, state in rows:
        if (allowed := state.allowed) is not None:
            kept = _to(logits, allowed[allowed < logits.shape[1]])
            values = logits[i, kept]
            logits[i] = -torch.inf
            logits[i, kept] = values


def _mask_bad_words(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    pieces = []
    for i, state in rows:
        if (words := state.bad_words) is not None:
            pieces.append((i, np.array(words.forbidden(_counts(state).tail), dtype=np.int64)))
    index, _ = _flat_index(pieces, vocab)
    if index.size:
        flat.index_fill_(0, _to(flat, index), -torch.inf)


def _mask_ends(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    pieces = [(i, state.ends) for i, state in rows if state.ends is not None]
    index, _ = _flat_index(pieces, vocab)
    if index.size:
        flat.index_fill_(0, _to(flat, index), -torch.inf)


def _add_biases(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    biased = [(i, state.biases) for i, state in rows if state.biases is not None]
    index, inside = _flat_index([(i, token_ids) for i, (token_ids, _) in biased], vocab)
    if index.size:
        values = np.concatenate([values for _, (_, values) in biased])
        flat.index_add_(0, _to(flat, index), _to(flat, values[inside]))


def _penalise_repetition(logits: torch.Tensor, rows: _Rows) -> None:
    found = [(i, _counts(state), r) for i, state in rows if (r := state.snapshot.params.repetition_penalty) != 1.0]
    if not found:
        return
    penalties = np.array([r for _, _, r in found]).clip(1 / _LARGEST, _LARGEST).astype(np.float32)
    # A prompt's tokens rise.
    token_ids = np.concatenate([ids for _, counts, _ in found for ids in (counts.prompt_ids, counts.output_ids)])
    num_sorted = np.array([len(counts.prompt_ids) for _, counts, _ in found], dtype=np.int64)
    lengths = num_sorted + [len(counts.output_ids) for _, counts, _ in found]
    bounds = np.concatenate(([0], lengths.cumsum()))
    numbers = np.array([i for i, _, _ in found], dtype=np.int64)
    penalise = penalise_repetition if logits.is_cuda or not kernels.available() else kernels.penalise_repetition
    penalise(logits, *(torch.from_numpy(each) for each in (numbers, bounds, num_sorted, token_ids, penalties)))


def penalise_repetition(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor,
    num_sorted: torch.Tensor,
    token_ids: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """`kernels.penalise_repetition` by torch's operations, on any device."""
    # A token of prompt and output is gathered twice before anything is written, and written twice with the same value:
    # no need to make the ids unique.
    lengths = bounds.diff()
    inside = (token_ids >= 0) & (token_ids < logits.shape[1])
    where = (rows.repeat_interleave(lengths) * logits.shape[1] + token_ids)[inside].to(logits.device)
    r = penalties.repeat_interleave(lengths)[inside].to(logits.device)
    flat = logits.view(-1)
    x = flat[where]
    flat[where] = torch.where(x > 0, (x / r).clamp(max=_LARGEST), x * r)


def _penalise_counts(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    pieces, amounts = [], []
    for i, state in rows:
        params = state.snapshot.params
        if params.presence_penalty or params.frequency_penalty:
            counts = _counts(state)
            pieces.append((i, counts.output_ids))
            penalty = params.presence_penalty + params.frequency_penalty * counts.output_counts
            amounts.append(penalty.astype(np.float32))
    index, inside = _flat_index(pieces, vocab)
    if index.size:
        flat.index_add_(0, _to(flat, index), _to(flat, np.concatenate(amounts)[inside]), alpha=-1)


def _counts(state: SamplingState) -> TokenCounts:
    assert state.counts is not None, f"the tokens of request {state.snapshot.request_id} are not counted"
    return state.counts


def _flat_index(pieces: list[tuple[int, _Ids]], vocab: int) -> tuple[_Ids, npt.NDArray[np.bool_]]:
    """Flat positions of the (row, token ids) pieces that lie in the vocabulary, and which of all ids those are."""
    if not pieces:
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    token_ids = np.concatenate([ids for _, ids in pieces])
    starts = np.repeat(np.array([row * vocab for row, _ in pieces], dtype=np.int64), [len(ids) for _, ids in pieces])
    inside = (token_ids >= 0) & (token_ids < vocab)
    return (starts + token_ids)[inside], inside


def _to(flat: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return to_device(array, flat.device)
