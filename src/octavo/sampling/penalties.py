"""Adjusts logits before a token is chosen: minimum length, biases and penalties.

Each adjustment changes a few tokens of a row, so it is done by index arithmetic on flat positions
`row * vocab + token_id`, with one gather and one scatter per kind for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from octavo import kernels
from octavo.sampling.batch import IntArray, SamplingBatch, SamplingState
from octavo.storage.device_copy import to_device

# Limit of penalties: 1e-300 would be 0 in float32 and make logits infinite, which would fail the step.
_LARGEST = 1e30


def adjust(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Adjust logits, float32 [rows, vocab], in place, in vLLM's order; row i belongs to draw i.

    1. `bad_words`: the last token of each to -inf, if the output ends with the tokens before it. Where this would leave
       no token to draw, words of several tokens are allowed for this draw; words of one token never are.
    2. `min_tokens`: end-of-sequence and stop token ids to -inf, until the output has that many tokens (also with
       `ignore_eos`, although end-of-sequence would not end it then). Not if a grammar decides which tokens may come.
    3. `logit_bias`: added.
    4. `repetition_penalty`, over prompt and output: x / r if x > 0, else x * r (Keskar et al. 2019, CTRL, 4.1).
    5. `frequency_penalty` times the token's count in the output, and `presence_penalty` if it occurs there at all:
       subtracted (OpenAI).

    Token ids outside the vocabulary are ignored, because they cannot be drawn. `allowed_token_ids` are a mask, which
    the draw applies.
    """
    rows = [(i, batch.states[i]) for i in np.flatnonzero(batch.records["adjusted"]).tolist()]
    ending = np.flatnonzero(batch.must_not_end).tolist()
    _forbid(logits, _bad_words(logits.shape[1], rows, set(ending)))
    _forbid(logits, [(i, ids) for i in ending if (ids := batch.states[i].ends) is not None])
    _add(logits, [(i, *state.biases) for i, state in rows if state.biases is not None])
    _penalise_repetition(logits, rows)
    _penalise_counts(logits, rows)


_Rows = list[tuple[int, SamplingState]]


def _bad_words(vocab: int, rows: _Rows, ending: set[int]) -> Iterator[tuple[int, IntArray]]:
    """Yield the tokens that would complete a bad word in each row."""
    for i, state in rows:
        if (words := state.bad_words) is not None:
            forbidden = words.forbidden(state.counted.tail)
            if len(forbidden) > len(words.alone) and not _leaves_any(forbidden, state, vocab, must_not_end=i in ending):
                # Requests whose words of one token leave nothing are refused when they arrive.
                forbidden = words.alone
            yield i, np.array(forbidden, dtype=np.int64)


def _leaves_any(forbidden: list[int], state: SamplingState, vocab: int, *, must_not_end: bool) -> bool:
    """Whether a token is left that the sequence may draw, if it may draw none of `forbidden`."""
    never, allowed = set(forbidden), state.snapshot.params.allowed_token_ids
    if must_not_end and state.ends is not None:
        never.update(state.ends.tolist())
    if len(never) < (vocab if allowed is None else len(allowed)):
        return True
    return not never.issuperset(range(vocab) if allowed is None else allowed)


def _forbid(logits: torch.Tensor, pieces: Iterable[tuple[int, IntArray]]) -> None:
    _add(logits, [(row, token_ids, np.full(len(token_ids), -np.inf, np.float32)) for row, token_ids in pieces])


def _add(logits: torch.Tensor, pieces: list[tuple[int, IntArray, npt.NDArray[np.float32]]]) -> None:
    """Add amounts to the logits of some token ids; the rows must be in ascending order."""
    if not pieces:
        return
    rows = np.array([row for row, _, _ in pieces], dtype=np.int64)
    bounds = np.concatenate(([0], np.cumsum([len(token_ids) for _, token_ids, _ in pieces])))
    token_ids, amounts = (np.concatenate([piece[part] for piece in pieces]) for part in (1, 2))
    add = add_amounts if logits.is_cuda or not kernels.available() else kernels.add_amounts
    add(logits, *(torch.from_numpy(each) for each in (rows, bounds, token_ids, amounts)))


def add_amounts(
    logits: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor, token_ids: torch.Tensor, amounts: torch.Tensor
) -> None:
    """Do what `kernels.add_amounts` does with torch operations, on any device."""
    inside = (token_ids >= 0) & (token_ids < logits.shape[1])
    where = (rows.repeat_interleave(bounds.diff()) * logits.shape[1] + token_ids)[inside]
    logits.view(-1).index_add_(0, _to(logits, where.numpy()), _to(logits, amounts[inside].numpy()))


def _penalise_repetition(logits: torch.Tensor, rows: _Rows) -> None:
    found = [(i, state.counted, r) for i, state in rows if (r := state.snapshot.params.repetition_penalty) != 1.0]
    if not found:
        return
    penalties = np.array([r for _, _, r in found]).clip(1 / _LARGEST, _LARGEST).astype(np.float32)
    # A prompt's tokens are in ascending order.
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
    """Do what `kernels.penalise_repetition` does with torch operations, on any device."""
    # A token in both prompt and output is gathered twice before anything is written, then written twice with the same
    # value, so the ids need not be unique.
    lengths = bounds.diff()
    inside = (token_ids >= 0) & (token_ids < logits.shape[1])
    where = _to(logits, (rows.repeat_interleave(lengths) * logits.shape[1] + token_ids)[inside].numpy())
    r = _to(logits, penalties.repeat_interleave(lengths)[inside].numpy())
    flat = logits.view(-1)
    x = flat[where]
    flat[where] = torch.where(x > 0, (x / r).clamp(max=_LARGEST), x * r)


def _penalise_counts(logits: torch.Tensor, rows: _Rows) -> None:
    pieces = []
    for i, state in rows:
        params = state.snapshot.params
        if params.presence_penalty or params.frequency_penalty:
            counts = state.counted
            penalty = params.presence_penalty + params.frequency_penalty * counts.output_counts
            pieces.append((i, counts.output_ids, (-penalty).astype(np.float32)))
    _add(logits, pieces)


def _to(flat: torch.Tensor, array: npt.NDArray[np.generic]) -> torch.Tensor:
    return to_device(array, flat.device)
