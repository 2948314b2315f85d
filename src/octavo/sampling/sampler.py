"""Samples tokens from logits in one batched pass, each request with its own `SamplingParams`.

The sampler holds no state: what a draw depends on comes with it (`sampling/batch.py`). The random number for position p
of a sequence is a function of (seed, p), and a row's result depends on that row alone, so a request gives the same
tokens alone or in a batch, before and after preemption.

    greedy rows                  argmax
    temperature, min_p           softmax, sums by chunk, inversion          (`draw.draw_from_all`)
    top_k, top_p as well         the same among the largest logits          (`draw.draw_from_top`)
    beams                        no draw: the largest log-probabilities, for the scheduler to choose from
    structured outputs           any of the first three, and again under a mask where the grammar refuses (`structured`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import LogitsError
from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.draw import DrawParams, draw_from_all, draw_from_top
from octavo.sampling.penalties import adjust
from octavo.sampling.rng import uniforms
from octavo.sampling.structured import StructuredDraws
from octavo.sampling.top_k import argmax, largest
from octavo.sampling_params import MAX_LOGPROBS
from octavo.scheduler.plan import Candidate, SamplingSnapshot, StepResult

ArgMax = Callable[[torch.Tensor], torch.Tensor]
"""float32 [rows, vocab] -> int64 [rows]: the lowest index of the largest value; an index of a NaN if there is one."""

Draws = npt.NDArray[np.int64]
"""Numbers of draws."""

# Rows scored at a time: what is made of so few stays in a core's cache.
_SCORED_ROWS = 16
# Logits that are drawn from or scored at a time on a CPU. Copies of a few MiB stay in its cache and with the allocator,
# which returns larger ones to the system after each use: draws with logprobs from 57 rows of 49,152 took 41 ms at once,
# and take 9 in slices.
_AT_ONCE = 2**20


class Sampler:
    """Draws one token per sequence, or ranks its candidates.

    Args:
        greedy: finds the largest logit of each row.
    """

    def __init__(self, greedy: ArgMax = argmax) -> None:
        self._greedy = greedy
        self._structured = StructuredDraws(self._choose)

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, row_of: Seq[int] | None = None, *, spoil: bool = False
    ) -> StepResult:
        """The next token of each draw, and its logprobs where the request asks for them.

        Logprobs are those of the model: before temperature, penalties, filters and grammars (vLLM's `raw_logprobs`).

        Args:
            logits: [rows, vocab], any floating dtype.
            row_of: logits row of each draw; several may share one, the first of them is the row's own sequence. None:
                row i belongs to draw i.
            spoil: the logits are of no use to the caller afterwards, and may be written over.

        Raises:
            LogitsError: names the requests whose logits make no distribution, or whose grammar has failed.
        """
        if not len(batch):
            return StepResult()
        own = _own_draws(len(batch), row_of)
        logits = _spread(logits, len(batch), row_of)
        is_beam = batch.records["beam"]
        if not is_beam.any():
            return self._draw(logits, batch, own, spoil=spoil)
        beams, others = np.flatnonzero(is_beam), np.flatnonzero(~is_beam)
        parts = [(beams, self._candidates(_select(logits, beams), batch.select(beams)))]
        if len(others):
            parts.append((others, self._draw(_select(logits, others), batch.select(others), own[others], spoil=True)))
        return _merged(parts, len(batch))

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, targets: Seq[int], num_top: int) -> tuple[TokenLogprobs, ...]:
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
        return tuple(scored)

    def _draw(
        self, logits: torch.Tensor, batch: SamplingBatch, own: npt.NDArray[np.bool_], *, spoil: bool
    ) -> StepResult:
        structured = np.flatnonzero(batch.records["structured"])
        spoil = spoil and not batch.records["needs_logprobs"].any()
        chosen_from = logits
        if batch.adjusted.any():
            chosen_from = logits if spoil else logits.clone()
            adjust(chosen_from, batch)
        forced: dict[int, tuple[int, ...]] = {}
        if len(structured):
            token_ids, sound, forced = self._structured.draw(chosen_from, batch, structured, own)
        else:
            token_ids, sound = self._choose(chosen_from, batch)
        ids_on_host, sound = _on_host(token_ids, sound)
        _require_sound(sound, batch)
        drawn = ids_on_host.tolist()
        wanted = np.flatnonzero(batch.records["needs_logprobs"])
        logprobs: dict[int, TokenLogprobs] = {}
        if len(wanted):
            draws = wanted.tolist()
            num_top = [batch.states[i].snapshot.params.logprobs or 0 for i in draws]
            scored = _all_token_logprobs(logits, token_ids, wanted, num_top)
            logprobs = dict(zip(draws, scored, strict=True))
        return StepResult(tuple(drawn), logprobs, forced=forced)

    def _candidates(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """Each beam's likeliest next tokens; biases and penalties change log-probabilities here, as in transformers."""
        logprobs = logits.log_softmax(-1)
        if batch.adjusted.any():
            adjust(logprobs, batch)
        snapshots = [state.snapshot for state in batch.states]
        most = max(snapshot.num_candidates for snapshot in snapshots)
        values, ids = largest(logprobs, min(most, logits.shape[1]))
        _require_sound(torch.isfinite(values[:, 0]), batch)
        found: dict[int, tuple[Candidate, ...]] = {}
        for i, (snapshot, row) in enumerate(zip(snapshots, values.tolist(), strict=True)):
            places = _places_to_choose_from(ids[i, : snapshot.num_candidates].tolist(), snapshot)
            token_ids = ids[i, places]
            known: list[TokenLogprobs | None] = [None] * len(token_ids)
            if (num_top := snapshot.params.logprobs) is not None:
                known = [*_logprobs_of_row(logits[i], token_ids, num_top)]
            found[i] = tuple(map(Candidate, token_ids.tolist(), [row[place] for place in places], known))
        best = {i: candidates[0] for i, candidates in found.items()}
        return StepResult(
            tuple(candidate.token_id for candidate in best.values()),
            {i: candidate.logprobs for i, candidate in best.items() if candidate.logprobs is not None},
            found,
        )

    def _choose(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        is_wanted: npt.NDArray[np.bool_] | None = None,
        again: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows] token ids; bool [rows], whether the row's logits allow a choice.

        Args:
            is_wanted: bool [rows]; what is returned of the others is void. None: all are.
            again: bool [rows]; whose first number has been used. None: nobody's.
        """
        records = batch.records
        if is_wanted is None:
            is_wanted = np.ones(len(batch), dtype=np.bool_)
        is_greedy = records["greedy"]
        # An argmax; a draw from the whole vocabulary; a draw among the most likely.
        is_filtered = ((records["top_k"] > 0) & (records["top_k"] < logits.shape[1])) | (records["top_p"] < 1.0)
        greedy = np.flatnonzero(is_wanted & is_greedy)
        plain = np.flatnonzero(is_wanted & ~is_greedy & ~is_filtered)
        filtered = np.flatnonzero(is_wanted & ~is_greedy & is_filtered)
        token_ids = torch.zeros(len(batch), dtype=torch.int64, device=logits.device)
        sound = torch.zeros(len(batch), dtype=torch.bool, device=logits.device)
        if len(greedy):
            rows = _look_at(logits, greedy)
            best = self._greedy(rows)
            _place(token_ids, greedy, best)
            _place(sound, greedy, torch.isfinite(rows.gather(1, best.unsqueeze(1)).squeeze(1)))
        for draws, draw in ((plain, draw_from_all), (filtered, draw_from_top)):
            for some in _slices(draws, logits):
                params = _draw_params(
                    records[some], batch.positions[some], logits, None if again is None else again[some]
                )
                drawn, proper = draw(_look_at(logits, some), params)
                _place(token_ids, some, drawn)
                _place(sound, some, proper)
        return token_ids, sound


def _merged(parts: list[tuple[Draws, StepResult]], num_draws: int) -> StepResult:
    token_ids = [0] * num_draws
    logprobs: dict[int, TokenLogprobs] = {}
    candidates: dict[int, tuple[Candidate, ...]] = {}
    forced: dict[int, tuple[int, ...]] = {}
    for draws, result in parts:
        places = draws.tolist()
        for place, token_id in zip(places, result.token_ids, strict=True):
            token_ids[place] = token_id
        logprobs.update((places[i], value) for i, value in result.logprobs.items())
        candidates.update((places[i], found) for i, found in result.candidates.items())
        forced.update((places[i], following) for i, following in result.forced.items())
    return StepResult(tuple(token_ids), logprobs, candidates, forced=forced)


def _own_draws(num_draws: int, row_of: Seq[int] | None) -> npt.NDArray[np.bool_]:
    """bool [draws]: whether a draw is the first from its row."""
    own = np.ones(num_draws, dtype=np.bool_)
    if row_of is not None and num_draws > 1:
        rows = np.asarray(row_of)
        own[1:] = rows[1:] != rows[:-1]
    return own


def _places_to_choose_from(token_ids: list[int], snapshot: SamplingSnapshot) -> list[int]:
    """Of a beam's likeliest tokens, best first, the places of those that a search of w beams may choose.

    The w best, of which those that end become hypotheses, and the w best that do not end: at most 2w, however many
    tokens end an output.
    """
    width = snapshot.params.num_sequences
    ends = snapshot.params.stop_token_ids
    if not snapshot.params.ignore_eos:
        ends = snapshot.eos_token_ids.union(ends)
    going_on = [place for place, token_id in enumerate(token_ids) if token_id not in ends]
    return sorted({*range(min(width, len(token_ids))), *going_on[:width]})


def _require_sound(sound: torch.Tensor, batch: SamplingBatch) -> None:
    if not bool(sound.all()):
        bad = [state.snapshot.request_id for state, ok in zip(batch.states, sound.tolist(), strict=True) if not ok]
        raise LogitsError(list(dict.fromkeys(bad)))


def _on_host(token_ids: torch.Tensor, sound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one transfer from a GPU, which waits for all that it has to do."""
    if not token_ids.is_cuda:
        return token_ids, sound
    both = torch.stack((token_ids, sound.long())).cpu()
    return both[0], both[1].bool()


def _draw_params(
    records: npt.NDArray[Any],
    positions: npt.NDArray[np.int64],
    logits: torch.Tensor,
    again: npt.NDArray[np.bool_] | None,
) -> DrawParams:
    top_k = np.where(records["top_k"] < logits.shape[1], records["top_k"], 0.0)
    # One transfer to the device; float64 holds every top_k exactly.
    numbers = uniforms(records["seed"], positions, again)
    columns = (numbers, records["temperature"], records["min_p"], records["top_p"], top_k)
    table = torch.from_numpy(np.column_stack(columns)).to(logits.device)
    return DrawParams(
        uniforms=table[:, 0].contiguous(),
        temperature=table[:, 1].float(),
        min_p=table[:, 2].float(),
        top_p=table[:, 3].contiguous(),
        top_k=table[:, 4].long(),
    )


def _all_token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Draws, num_top: list[int]
) -> list[TokenLogprobs]:
    """`_token_logprobs` of some rows."""
    found: list[TokenLogprobs] = []
    for some in _slices(rows, logits):
        found += _token_logprobs(_look_at(logits, some), _look_at(token_ids, some), num_top[len(found) :][: len(some)])
    return found


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
        TokenLogprobs(logprob, rank, TopLogprobs(ids[:k], values[:k]))
        for logprob, rank, ids, values, k in zip(chosen, ranks, top_ids.tolist(), top_logprobs, num_top, strict=True)
    ]


def _logprobs_of_row(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """`_token_logprobs` of several tokens of one row [vocab], which is not read anew for each of them."""
    logprobs = logits.log_softmax(-1)
    given = logits[token_ids]
    above = logits[logits > given.min()]
    ranks = ((above > given.unsqueeze(1)).sum(-1) + 1).tolist()
    top: Seq[tuple[int, float]] = ()
    if num_top:
        top_ids = _top_ids(logits.unsqueeze(0), num_top).squeeze(0)
        top = TopLogprobs(top_ids.tolist(), logprobs[top_ids].tolist())
    return [
        TokenLogprobs(logprob, rank, top) for logprob, rank in zip(logprobs[token_ids].tolist(), ranks, strict=True)
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


def _spread(logits: torch.Tensor, num_draws: int, row_of: Seq[int] | None) -> torch.Tensor:
    """float32 [draws, vocab]; the very tensor where it is that already."""
    rows = list(range(num_draws)) if row_of is None else list(row_of)
    if len(rows) != num_draws:
        raise ValueError(f"row_of names {len(rows)} rows for {num_draws} draws")
    in_order = rows == list(range(num_draws))
    spread = logits[:num_draws] if in_order else logits[torch.tensor(rows, device=logits.device)]
    return spread.float().contiguous()


def _slices(rows: Draws, logits: torch.Tensor) -> Iterator[Draws]:
    """Some of the rows at a time, as many as are worked on at once."""
    at_once = max(1, len(logits) if logits.is_cuda else _AT_ONCE // logits.shape[1])
    return (rows[first : first + at_once] for first in range(0, len(rows), at_once))


def _look_at(tensor: torch.Tensor, rows: Draws) -> torch.Tensor:
    """Some rows, rising, to be read only: not copied where they are neighbours."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return _select(tensor, rows)


def _select(tensor: torch.Tensor, rows: Draws) -> torch.Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor[torch.from_numpy(rows).to(tensor.device)]


def _place(tensor: torch.Tensor, rows: Draws, values: torch.Tensor) -> None:
    if len(rows) == len(tensor):
        tensor.copy_(values)
    else:
        tensor[torch.from_numpy(rows).to(tensor.device)] = values
