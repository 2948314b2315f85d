"""Samples tokens from logits in one batched pass, each request with its own `SamplingParams`.

The sampler holds no state: each batch contains everything that its draws depend on (`sampling/batch.py`). The random
number for position p of a sequence is a function of (seed, p), and a row's result depends on that row alone, so a
request gives the same tokens alone or in a batch, before and after preemption.

    greedy rows            argmax                                        by a `Choice`: the C++ library's, Triton's or,
    others                 softmax, filters, inversion in id order       where neither runs, torch's
    beams                  no draw: the largest log-probabilities, for the scheduler to choose from
    structured outputs     any of the first two, and again under a mask if the grammar refuses (`structured`)
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from octavo import kernels
from octavo.errors import LogitsError
from octavo.logprobs import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.choice import Choice, DrawRows, Flags, NativeChoice, look_at, to_host, with_limits
from octavo.sampling.penalties import adjust
from octavo.sampling.structured import StructuredDraws
from octavo.scheduler.plan import Candidate, SamplingSnapshot, StepResult

PlainDraw = Callable[[torch.Tensor], tuple[torch.Tensor, Callable[[], StepResult]]]
"""Samples from logits; see `Sampler.prepare`."""


def make_choice(device: torch.device) -> Choice:
    """Return the fastest `Choice` that runs on the device."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.sampling.triton_choice import TritonChoice

        return TritonChoice()
    return NativeChoice() if device.type == "cpu" and kernels.available() else Choice()


def warm_up_choice(vocab_size: int, device: torch.device) -> None:
    """Compile the kernel that draws under masks, which is launched for structured outputs only."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.sampling.triton_choice import draw_masked_row

        draw_masked_row(vocab_size, device)


class Sampler:
    """Draws one token per sequence, or ranks its candidates.

    Args:
        choice: chooses and scores tokens; by default with torch operations.
    """

    def __init__(self, choice: Choice | None = None) -> None:
        self._choice = choice or Choice()
        self._structured = StructuredDraws(self._choice)

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        row_of: Seq[int] | None = None,
        *,
        overwrite_logits: bool = False,
    ) -> StepResult:
        """Draw the next token for each draw, with its logprobs if the request asks for them.

        Logprobs are those of the model, before temperature, penalties, filters and grammars (vLLM's `raw_logprobs`).

        Args:
            logits: [rows, vocab], any floating dtype.
            row_of: logits row of each draw; several may share one, the first of which is for the row's own sequence. If
                None, row i belongs to draw i.
            overwrite_logits: whether the logits may be overwritten, because the caller no longer needs them.

        Raises:
            LogitsError: some logits are not a distribution, or a grammar has failed; names the requests.
        """
        if not len(batch):
            return StepResult()
        logits = _spread(logits, len(batch), row_of)
        own = None if row_of is None else np.diff(row_of, prepend=-1) != 0
        if "beam" not in batch.kinds:
            return self._draw(logits, batch, own, overwrite_logits=overwrite_logits)
        is_beam = batch.records["beam"]
        # Apart, because the two ways of finding candidates round differently, and neighbours must not matter.
        beams = (np.flatnonzero(is_beam & ~batch.adjusted), np.flatnonzero(is_beam & batch.adjusted))
        parts = [(rows, self._candidates(look_at(logits, rows), batch.select(rows))) for rows in beams if len(rows)]
        if len(others := np.flatnonzero(~is_beam)):
            own = None if own is None else own[others]
            drawn = self._draw(look_at(logits, others), batch.select(others), own, overwrite_logits=True)
            parts.append((others, drawn))
        return _merged(parts, len(batch))

    def prepare(
        self, batch: SamplingBatch, vocab: int, row_of: Seq[int] | None = None, *, overwrite_logits: bool = False
    ) -> PlainDraw:
        """Prepare to sample for a batch that `is_plain`, without waiting for the tokens; arguments as of `sample`.

        Right after a model has read all its weights, each call of another function costs microseconds, so this is done
        once for all steps with the same batch. Before each, the batch's `numbers` must be brought up to date.

        Args:
            vocab: width of the logits.

        Returns:
            A function of the logits. It returns int64 [draws] token ids, on the device, which the next call may
            overwrite, and a function that waits for them; either raises as `sample` does.
        """
        choose = self._choice.prepare(batch, vocab)

        def draw(logits: torch.Tensor) -> tuple[torch.Tensor, Callable[[], StepResult]]:
            logits = _spread(logits, len(batch), row_of)
            token_ids, valid = choose(_adjusted(logits, batch, overwrite_logits) if batch.is_adjusted else logits)
            arrived = to_host(token_ids, valid)

            def collect() -> StepResult:
                drawn, valid = arrived()
                _require_valid(valid, batch)
                return StepResult(tuple(drawn))

            if token_ids.is_cuda:
                return token_ids, collect
            result = collect()
            return token_ids, lambda: result

        return draw

    def score(self, logits: torch.Tensor, targets: Seq[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of given tokens, for prompt logprobs.

        Args:
            logits: [rows, vocab], any floating dtype.
            targets: one token id per row.
            num_top: number of most likely tokens to report with each.
        """
        token_ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        rows, num_tops = np.arange(len(targets)), [num_top] * len(targets)
        return tuple(self._choice.score(logits[: len(targets)].float(), rows, token_ids, num_tops))

    def _draw(
        self, logits: torch.Tensor, batch: SamplingBatch, own: Flags | None, *, overwrite_logits: bool
    ) -> StepResult:
        """Draw for the rows that are no beams.

        Args:
            own: bool [draws]: whether a draw is the first from its row; None if all are.
        """
        if batch.is_plain:
            return self.prepare(batch, logits.shape[1], overwrite_logits=overwrite_logits)(logits)[1]()
        overwrite_logits = overwrite_logits and "needs_logprobs" not in batch.kinds
        chosen_from = _adjusted(logits, batch, overwrite_logits) if batch.is_adjusted else logits
        forced: dict[int, tuple[int, ...]] = {}
        if "structured" in batch.kinds:
            drawn, valid, forced = self._structured.draw(chosen_from, batch, own)
        else:
            drawn, valid = to_host(*self._choice.choose(chosen_from, batch))()
        _require_valid(valid, batch)
        logprobs: dict[int, TokenLogprobs] = {}
        if "needs_logprobs" in batch.kinds:
            wanted = np.flatnonzero(batch.records["needs_logprobs"])
            draws = wanted.tolist()
            num_top = [batch.states[i].snapshot.params.logprobs or 0 for i in draws]
            scored = self._choice.score(logits, wanted, torch.tensor(drawn, device=logits.device), num_top)
            logprobs = dict(zip(draws, scored, strict=True))
        return StepResult(tuple(drawn), logprobs, forced=forced)

    def _candidates(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """Return each beam's likeliest tokens; biases and penalties change log-probabilities, as in transformers.

        Either all of these beams are adjusted, or none is.
        """
        snapshots = [state.snapshot for state in batch.states]
        most = min(max(snapshot.num_candidates for snapshot in snapshots), logits.shape[1])
        is_adjusted = batch.is_adjusted
        # The model's likeliest tokens, which are reported, and the likeliest after biases and penalties.
        raw, raw_ids = logits, torch.empty(0)
        if not is_adjusted or "needs_logprobs" in batch.kinds:
            reported = max(snapshot.params.logprobs or 0 for snapshot in snapshots)
            raw, raw_ids = self._choice.likeliest(logits, min(max(most, reported), logits.shape[1]))
        values, ids = raw, raw_ids
        if is_adjusted:
            logprobs = logits.log_softmax(-1)
            adjust(logprobs, batch)
            if (limits := with_limits(None, batch, logits.shape[1])) is not None:
                limits.apply(logprobs, np.arange(len(batch)))
            first, ids = self._choice.likeliest(logprobs, most)
            # Not `first`, whose rows add up to 1 again, but it is not finite if a row is not a distribution.
            values = torch.where(first.isfinite(), logprobs.gather(1, ids), first)
        _require_valid(torch.isfinite(values[:, 0]).tolist(), batch)
        found: dict[int, tuple[Candidate, ...]] = {}
        for i, (snapshot, row) in enumerate(zip(snapshots, values.tolist(), strict=True)):
            places = _places_to_choose_from(ids[i, : snapshot.num_candidates].tolist(), snapshot)
            token_ids = ids[i, places]
            known: list[TokenLogprobs | None] = [None] * len(token_ids)
            if (num_top := snapshot.params.logprobs) is not None:
                known = [*_known_of_likeliest(logits[i], raw[i].tolist(), raw_ids[i], token_ids.tolist(), num_top)]
            found[i] = tuple(map(Candidate, token_ids.tolist(), [row[place] for place in places], known))
        best = {i: candidates[0] for i, candidates in found.items()}
        return StepResult(
            tuple(candidate.token_id for candidate in best.values()),
            {i: candidate.logprobs for i, candidate in best.items() if candidate.logprobs is not None},
            found,
        )


def _adjusted(logits: torch.Tensor, batch: SamplingBatch, overwrite: bool) -> torch.Tensor:
    logits = logits if overwrite else logits.clone()
    adjust(logits, batch)
    return logits


def _merged(parts: list[tuple[DrawRows, StepResult]], num_draws: int) -> StepResult:
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


def _places_to_choose_from(token_ids: list[int], snapshot: SamplingSnapshot) -> list[int]:
    """Return the positions, among a beam's most likely tokens, of those that a search of w beams may choose.

    These are the w best, of which those that end an output become hypotheses, and the w best that do not end it: at
    most 2w in total.
    """
    width = snapshot.params.num_sequences
    ends = snapshot.params.stop_token_ids
    if not snapshot.params.ignore_eos:
        ends = snapshot.eos_token_ids.union(ends)
    going_on = [place for place, token_id in enumerate(token_ids) if token_id not in ends]
    return sorted({*range(min(width, len(token_ids))), *going_on[:width]})


def _known_of_likeliest(
    logits: torch.Tensor, logprobs: list[float], ids: torch.Tensor, token_ids: list[int], num_top: int
) -> list[TokenLogprobs]:
    """Return the `TokenLogprobs` of some tokens of a row, which is only read if one is not among the likeliest.

    Args:
        logprobs, ids: the likeliest tokens, at least `num_top`.
    """
    listed = ids.tolist()
    values = logits[ids].tolist()
    top = TopLogprobs(listed[:num_top], logprobs[:num_top]) if num_top else ()
    place_of = {token_id: place for place, token_id in enumerate(listed)}
    ascending = sorted(values)
    known: list[TokenLogprobs] = []
    for token_id in token_ids:
        if (place := place_of.get(token_id)) is not None:
            rank = 1 + len(ascending) - bisect_right(ascending, values[place])
            known.append(TokenLogprobs(logprobs[place], rank, top))
        else:
            value = logits[token_id]
            rank = 1 + int(torch.count_nonzero(logits > value))
            known.append(TokenLogprobs(float(value) - values[0] + logprobs[0], rank, top))
    return known


def _require_valid(valid: list[bool], batch: SamplingBatch) -> None:
    if not all(valid):
        bad = [state.snapshot.request_id for state, ok in zip(batch.states, valid, strict=True) if not ok]
        raise LogitsError(list(dict.fromkeys(bad)))


def _spread(logits: torch.Tensor, num_draws: int, row_of: Seq[int] | None) -> torch.Tensor:
    """Return the logits of each draw, float32 [draws, vocab]; without a copy, if possible, for one row per draw."""
    if row_of is not None and len(row_of) != num_draws:
        raise ValueError(f"row_of names {len(row_of)} rows for {num_draws} draws")
    if row_of is not None and list(row_of) != list(range(num_draws)):
        logits = logits[torch.tensor(row_of, device=logits.device)]
    elif len(logits) != num_draws:
        logits = logits[:num_draws]
    # Even calls without effect take time right after the model.
    if logits.dtype is torch.float32 and logits.is_contiguous():
        return logits
    return logits.float().contiguous()
