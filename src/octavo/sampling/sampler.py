"""Chooses tokens from logits: every request's own `SamplingParams`, in one batched pass.

The sampler holds no state. The random number for position p of a sequence is a function of (seed, p), and a row's
result depends on that row alone, so a request gives the same tokens alone or in a batch, before and after preemption.

    greedy rows                  argmax
    temperature, min_p           softmax, sums by chunk, inversion          (`draw.draw_from_all`)
    top_k, top_p as well         the same among the largest logits          (`draw.draw_from_top`)
    beams                        no draw: the largest log-probabilities, for the scheduler to choose from
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo.errors import LogitsError
from octavo.request import Sequence, TokenLogprobs
from octavo.sampling.draw import DrawParams, draw_from_all, draw_from_top
from octavo.sampling.penalties import adjust, adjusts_logits
from octavo.sampling.rng import uniforms
from octavo.sampling.top_k import argmax, largest
from octavo.sampling_params import MAX_LOGPROBS
from octavo.scheduler.beam import num_candidates
from octavo.scheduler.plan import Candidate, SampleResult

ArgMax = Callable[[torch.Tensor], torch.Tensor]
"""float32 [rows, vocab] -> int64 [rows]: the lowest index of the largest value; an index of a NaN if there is one."""

# Rows scored at a time: log-softmax of a long prompt's chunk would need as much memory again as its logits.
_SCORED_ROWS = 64

_HOTTEST = 1e30


class Sampler:
    """Draws one token per sequence, or ranks its candidates.

    Args:
        greedy: finds the largest logit of each row.
    """

    def __init__(self, greedy: ArgMax = argmax) -> None:
        self._greedy = greedy

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, sequences: Seq[Sequence], row_of: Seq[int] | None = None
    ) -> list[SampleResult]:
        """The next token of each sequence, and its logprobs where the request asks for them.

        Logprobs are those of the model: before temperature, penalties and filters (vLLM's `raw_logprobs`).

        Args:
            logits: [rows, vocab], any floating dtype; not changed.
            sequences: as they are before the token: its position is `num_output_tokens`.
            row_of: logits row of each sequence; several may share one. None: row i belongs to sequences[i].

        Raises:
            LogitsError: names the requests whose logits make no distribution.
        """
        if not sequences:
            return []
        logits = _spread(logits, len(sequences), row_of)
        beams = [i for i, seq in enumerate(sequences) if seq.request.params.use_beam_search]
        if not beams:
            return self._draw(logits, sequences)
        results = dict(zip(beams, self._candidates(_select(logits, beams), [sequences[i] for i in beams]), strict=True))
        if others := [i for i in range(len(sequences)) if i not in results]:
            drawn = self._draw(_select(logits, others), [sequences[i] for i in others])
            results.update(zip(others, drawn, strict=True))
        return [results[i] for i in range(len(sequences))]

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, targets: Seq[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of given tokens, for prompt logprobs.

        Args:
            logits: [rows, vocab], any floating dtype.
            targets: one token id a row.
            num_top: how many of the most likely tokens to report beside each.
        """
        scored: list[TokenLogprobs] = []
        for first in range(0, len(targets), _SCORED_ROWS):
            some = targets[first : first + _SCORED_ROWS]
            token_ids = torch.tensor(some, dtype=torch.int64, device=logits.device)
            rows = logits[first : first + len(some)].float()
            scored += _token_logprobs(rows, token_ids, [num_top] * len(some))
        return scored

    def _draw(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[SampleResult]:
        chosen_from = logits
        if any(adjusts_logits(seq) for seq in sequences):
            chosen_from = logits.clone()
            adjust(chosen_from, sequences)
        token_ids, sound = self._choose(chosen_from, sequences)
        _require_sound(sound, sequences)
        results = [SampleResult(token_id) for token_id in token_ids.tolist()]
        wanted = [i for i, seq in enumerate(sequences) if _wants_logprobs(seq)]
        if wanted:
            num_top = [sequences[i].request.params.logprobs or 0 for i in wanted]
            scored = _token_logprobs(_select(logits, wanted), _select(token_ids, wanted), num_top)
            for i, logprobs in zip(wanted, scored, strict=True):
                results[i].logprobs = logprobs
        return results

    def _candidates(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[SampleResult]:
        """Each beam's likeliest next tokens; biases and penalties change log-probabilities here, as in transformers."""
        logprobs = logits.log_softmax(-1)
        if any(adjusts_logits(seq) for seq in sequences):
            adjust(logprobs, sequences)
        counts = [num_candidates(seq.request) for seq in sequences]
        values, ids = largest(logprobs, min(max(counts), logits.shape[1]))
        _require_sound(torch.isfinite(values[:, 0]), sequences)
        results = []
        for i, (seq, count, row) in enumerate(zip(sequences, counts, values.tolist(), strict=True)):
            token_ids = ids[i, :count]
            known: list[TokenLogprobs | None] = [None] * len(token_ids)
            if (num_top := seq.request.params.logprobs) is not None:
                known = [*_token_logprobs(logits[i].expand(len(token_ids), -1), token_ids, [num_top] * len(token_ids))]
            found = tuple(map(Candidate, token_ids.tolist(), row[:count], known))
            results.append(SampleResult(found[0].token_id, known[0], found))
        return results

    def _choose(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows] token ids; bool [rows], whether the row's logits allow a choice."""
        greedy, plain, filtered = _partition(sequences, logits.shape[1])
        token_ids = torch.zeros(len(sequences), dtype=torch.int64, device=logits.device)
        sound = torch.zeros(len(sequences), dtype=torch.bool, device=logits.device)
        if greedy:
            rows = _select(logits, greedy)
            best = self._greedy(rows)
            _place(token_ids, greedy, best)
            _place(sound, greedy, torch.isfinite(rows.gather(1, best.unsqueeze(1)).squeeze(1)))
        for indices, draw in ((plain, draw_from_all), (filtered, draw_from_top)):
            if indices:
                params = _draw_params([sequences[i] for i in indices], logits)
                drawn, proper = draw(_select(logits, indices), params)
                _place(token_ids, indices, drawn)
                _place(sound, indices, proper)
        return token_ids, sound


def _wants_logprobs(seq: Sequence) -> bool:
    """Whether they are reported, or are what the best completions are chosen by."""
    params = seq.request.params
    return params.logprobs is not None or params.chooses


def _require_sound(sound: torch.Tensor, sequences: Seq[Sequence]) -> None:
    if not bool(sound.all()):
        bad = [seq.request.request_id for seq, ok in zip(sequences, sound.tolist(), strict=True) if not ok]
        raise LogitsError(list(dict.fromkeys(bad)))


def _partition(sequences: Seq[Sequence], vocab: int) -> tuple[list[int], list[int], list[int]]:
    """Rows that need an argmax, a draw from the whole vocabulary, a draw among the most likely."""
    greedy: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for i, seq in enumerate(sequences):
        params = seq.request.params
        if params.greedy:
            greedy.append(i)
        elif (params.top_k == 0 or params.top_k >= vocab) and params.top_p >= 1.0:
            plain.append(i)
        else:
            filtered.append(i)
    return greedy, plain, filtered


def _draw_params(sequences: Seq[Sequence], logits: torch.Tensor) -> DrawParams:
    u = uniforms((seq.seed for seq in sequences), (seq.num_output_tokens for seq in sequences))
    params = [seq.request.params for seq in sequences]
    # Infinite in float32, a temperature would make NaN of masked logits.
    floats = np.array([(min(p.temperature, _HOTTEST), p.min_p, p.top_p) for p in params])
    vocab = logits.shape[1]
    top_k = np.array([p.top_k if p.top_k < vocab else 0 for p in params], dtype=np.float64)
    # One transfer to the device; float64 holds every top_k exactly.
    table = torch.from_numpy(np.column_stack((u, floats, top_k))).to(logits.device)
    return DrawParams(
        uniforms=table[:, 0].contiguous(),
        temperature=table[:, 1].float(),
        min_p=table[:, 2].float(),
        top_p=table[:, 3].contiguous(),
        top_k=table[:, 4].long(),
    )


def _token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """Row i's log-probability and rank of token_ids[i], and its num_top[i] most likely tokens (equals by id)."""
    logprobs = logits.log_softmax(-1)
    given = token_ids.unsqueeze(1)
    chosen = logprobs.gather(1, given).squeeze(1).tolist()
    # Counted in float32, exact below 2^24: several times as fast as counting a bool mask.
    above = torch.gt(logits, logits.gather(1, given), out=torch.empty_like(logits))
    ranks = (above.sum(-1).long() + 1).tolist()
    if (most := max(num_top)) == 0:
        return [TokenLogprobs(logprob, rank, ()) for logprob, rank in zip(chosen, ranks, strict=True)]
    top_ids = _top_ids(logits, most)
    top_logprobs = logprobs.gather(1, top_ids).tolist()
    return [
        TokenLogprobs(logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)))
        for logprob, rank, ids, values, k in zip(chosen, ranks, top_ids.tolist(), top_logprobs, num_top, strict=True)
    ]


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [rows, min(k, vocab)]: the most likely tokens, equals by rising id."""
    vocab = logits.shape[1]
    k, width = min(k, vocab), min(2 * MAX_LOGPROBS, vocab)
    values, ids = largest(logits, width)
    if width < vocab:
        tied = (values[:, k - 1] == values[:, -1]).nonzero().squeeze(-1)
        if len(tied):
            ids[tied] = largest(logits[tied], vocab)[1][:, :width]
    return ids[:, :k]


def _spread(logits: torch.Tensor, num_sequences: int, row_of: Seq[int] | None) -> torch.Tensor:
    """float32 [sequences, vocab]; the very tensor where it is that already."""
    if row_of is None:
        row_of = range(num_sequences)
    if len(row_of) != num_sequences:
        raise ValueError(f"row_of names {len(row_of)} rows for {num_sequences} sequences")
    if len(logits) != num_sequences or any(row != i for i, row in enumerate(row_of)):
        if list(row_of) == list(range(num_sequences)):
            logits = logits[:num_sequences]
        else:
            logits = logits[torch.tensor(row_of, device=logits.device)]
    return logits.float().contiguous()


def _select(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor[torch.tensor(rows, device=tensor.device)]


def _place(tensor: torch.Tensor, rows: list[int], values: torch.Tensor) -> None:
    if len(rows) == len(tensor):
        tensor.copy_(values)
    else:
        tensor[torch.tensor(rows, device=tensor.device)] = values
