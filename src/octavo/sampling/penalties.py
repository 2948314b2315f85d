"""What changes single logits before a token is chosen: minimum length, biases and penalties.

Each touches a few tokens of a row, so all of it is index arithmetic on flat positions `row * vocab + token_id`,
one gather and one scatter per kind for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from octavo.request import Sequence
from octavo.sampling_params import SamplingParams

# A penalty of 1e-300 is 0 in float32, and would make infinities of logits: no request may do that to a step.
_LARGEST = 1e30

_Ids = npt.NDArray[np.int64]


def adjusts_logits(seq: Sequence) -> bool:
    """Whether `adjust` would change this sequence's logits at its next token."""
    params = seq.request.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
        or seq.num_output_tokens < params.min_tokens
    )


def adjust(logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Change float32 [rows, vocab] in place, in vLLM's order; row i belongs to sequences[i].

    1. `min_tokens`: end-of-sequence and stop token ids to -inf, until that many tokens are out (with `ignore_eos`
       too, whose end-of-sequence would not end anything).
    2. `logit_bias`: added.
    3. `repetition_penalty`, over prompt and output: x / r where x > 0, x * r elsewhere (Keskar et al. 2019, CTRL, 4.1).
    4. `frequency_penalty` times the token's count in the output, and `presence_penalty` if it occurs there at all:
       subtracted (OpenAI).

    Token ids outside the vocabulary are passed over: nothing can draw them.
    """
    rows = [(i, seq, seq.request.params) for i, seq in enumerate(sequences) if adjusts_logits(seq)]
    flat = logits.view(-1)
    vocab = logits.shape[1]
    _mask_ends(flat, vocab, rows)
    _add_biases(flat, vocab, rows)
    _penalise_repetition(flat, vocab, rows)
    _penalise_counts(flat, vocab, rows)


_Rows = list[tuple[int, Sequence, SamplingParams]]


def _mask_ends(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    pieces = [
        (i, _ids([*seq.request.eos_token_ids, *params.stop_token_ids]))
        for i, seq, params in rows
        if seq.num_output_tokens < params.min_tokens
    ]
    index, _ = _flat_index(pieces, vocab)
    if index.size:
        flat.index_fill_(0, _to(flat, index), -torch.inf)


def _add_biases(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    biased = [(i, params.logit_bias) for i, _, params in rows if params.logit_bias]
    index, inside = _flat_index([(i, _ids(bias)) for i, bias in biased], vocab)
    if index.size:
        values = np.concatenate([np.fromiter(bias.values(), np.float32, len(bias)) for _, bias in biased])
        flat.index_add_(0, _to(flat, index), _to(flat, values[inside]))


def _penalise_repetition(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    # A token that occurs twice is gathered twice before anything is written, and written twice with the same value:
    # no need to make the ids unique.
    penalised = [(i, seq.token_ids, p.repetition_penalty) for i, seq, p in rows if p.repetition_penalty != 1.0]
    pieces = [(i, _ids(token_ids)) for i, token_ids, _ in penalised]
    index, inside = _flat_index(pieces, vocab)
    if index.size:
        penalty = np.repeat(
            np.array([min(r, _LARGEST) for *_, r in penalised], dtype=np.float32),
            [len(token_ids) for _, token_ids, _ in penalised],
        )
        where, r = _to(flat, index), _to(flat, penalty[inside].clip(1 / _LARGEST, _LARGEST))
        x = flat[where]
        flat[where] = torch.where(x > 0, (x / r).clamp(max=_LARGEST), x * r)


def _penalise_counts(flat: torch.Tensor, vocab: int, rows: _Rows) -> None:
    pieces, amounts = [], []
    for i, seq, params in rows:
        if (params.presence_penalty or params.frequency_penalty) and seq.num_output_tokens:
            token_ids, counts = np.unique(_ids(seq.output_token_ids), return_counts=True)
            pieces.append((i, token_ids))
            amounts.append((params.presence_penalty + params.frequency_penalty * counts).astype(np.float32))
    index, inside = _flat_index(pieces, vocab)
    if index.size:
        flat.index_add_(0, _to(flat, index), _to(flat, np.concatenate(amounts)[inside]), alpha=-1)


def _ids(token_ids: Iterable[int]) -> _Ids:
    return np.array(token_ids if isinstance(token_ids, list) else list(token_ids), dtype=np.int64)


def _flat_index(pieces: list[tuple[int, _Ids]], vocab: int) -> tuple[_Ids, npt.NDArray[np.bool_]]:
    """Flat positions of the (row, token ids) pieces that lie in the vocabulary, and which of all ids those are."""
    if not pieces:
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    token_ids = np.concatenate([ids for _, ids in pieces])
    starts = np.repeat(np.array([row * vocab for row, _ in pieces], dtype=np.int64), [len(ids) for _, ids in pieces])
    inside = (token_ids >= 0) & (token_ids < vocab)
    return (starts + token_ids)[inside], inside


def _to(flat: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(flat.device)
