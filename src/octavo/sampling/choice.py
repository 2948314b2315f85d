"""Chooses tokens from rows of logits: the protocol, and its implementation in torch for any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.request import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.draw import DrawParams, argmax, draw_from_all, draw_from_top, largest
from octavo.sampling.masks import Words, allowed_ids, mask, split
from octavo.sampling_params import MAX_LOGPROBS

DrawRows = npt.NDArray[np.int64]
"""Indices of draws."""
Flags = npt.NDArray[np.bool_]
"""One flag per draw."""

# Number of logits processed at a time on a CPU. Copies of a few MiB stay in its cache and with the allocator, which
# returns larger ones to the system after each use: draws with logprobs from 57 rows of 49,152 took 41 ms at once, and
# take 9 ms in slices.
_AT_ONCE = 2**20


def slices(rows: DrawRows, logits: torch.Tensor) -> Iterator[DrawRows]:
    """Return slices of the rows, each small enough to be processed at once."""
    at_once = max(1, len(logits) if logits.is_cuda else _AT_ONCE // logits.shape[1])
    return (rows[first : first + at_once] for first in range(0, len(rows), at_once))


def look_at(tensor: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Return some rows, which must be in ascending order; read-only, because adjacent rows are not copied."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return select(tensor, rows)


def select(tensor: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor[torch.from_numpy(rows).to(tensor.device)]


def place(tensor: torch.Tensor, rows: DrawRows, values: torch.Tensor) -> None:
    if len(rows) == len(tensor):
        tensor.copy_(values)
    else:
        tensor[torch.from_numpy(rows).to(tensor.device)] = values


@dataclass(frozen=True, slots=True)
class DrawMasks:
    """The tokens that some draws of a batch may choose.

    Attributes:
        words: uint32 [masks, ceil(vocab / 32)], with a bit set for each allowed token.
        mask_of: int64 [draws]; the row of `words` for each draw, or -1: it may choose any token.
    """

    words: Words
    mask_of: npt.NDArray[np.int64]


class Choice(Protocol):
    """Chooses and scores tokens. The result for a row depends on that row alone, not on the rest of the batch.

    Attributes:
        leaves_out: whether `choose` excludes tokens not in `allowed_token_ids`; if not, their logits must be -inf.
    """

    leaves_out: bool

    def choose(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        masks: DrawMasks | None = None,
        rows: DrawRows | None = None,
        *,
        again: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token for each draw.

        Args:
            logits: float32 [*, vocab]; read-only.
            masks: of structured outputs.
            rows: the row of logits of each draw, in ascending order; if None, row i belongs to draw i.
            again: whether to use the second random number of each draw in place of its first.

        Returns:
            int64 [draws] token ids, and bool [draws]: whether the row's logits allow a choice.
        """

    def score(
        self, logits: torch.Tensor, rows: DrawRows, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        """Score one token in each of some rows: log-probability, rank, and the num_top[i] most likely tokens.

        Args:
            logits: float32 [*, vocab].
            rows: the rows to score, in ascending order.
            token_ids: int64 [*], a token for each row of the logits.
        """

    def likeliest(self, logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest log-probabilities of each row and their tokens, float32 and int64 [rows, num_top].

        Equals are in order of ascending id. The first value of a row that is not a distribution is not finite.
        """


class TorchChoice:
    """A `Choice` with torch operations, for any device."""

    leaves_out = False

    def choose(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        masks: DrawMasks | None = None,
        rows: DrawRows | None = None,
        *,
        again: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits if rows is None else select(logits, rows)
        if masks is None:
            return self._choose(logits, batch, again=again)
        draws = np.flatnonzero(masks.mask_of >= 0)
        chosen, proper = self._choose_allowed(logits, batch, draws, masks.words[masks.mask_of[draws]], again=again)
        if len(draws) == len(batch):
            return chosen, proper
        token_ids, valid = self._choose(logits, batch, masks.mask_of < 0, again=again)
        place(token_ids, draws, chosen)
        place(valid, draws, proper)
        return token_ids, valid

    def score(
        self, logits: torch.Tensor, rows: DrawRows, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = []
        for some in slices(rows, logits):
            found += token_logprobs(look_at(logits, some), look_at(token_ids, some), num_top[len(found) :][: len(some)])
        return found

    def likeliest(self, logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, ids = largest(logits, num_top)
        return logits.log_softmax(-1).gather(1, ids), ids

    def _choose(
        self, logits: torch.Tensor, batch: SamplingBatch, is_wanted: Flags | None = None, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose without masks; results for draws that are not wanted are meaningless."""
        records = batch.records
        if is_wanted is None:
            is_wanted = np.ones(len(batch), dtype=np.bool_)
        is_greedy = records["greedy"]
        # Three kinds: argmax, a draw from the whole vocabulary, a draw among the most likely tokens.
        is_filtered = ((records["top_k"] > 0) & (records["top_k"] < logits.shape[1])) | (records["top_p"] < 1.0)
        greedy = np.flatnonzero(is_wanted & is_greedy)
        plain = np.flatnonzero(is_wanted & ~is_greedy & ~is_filtered)
        filtered = np.flatnonzero(is_wanted & ~is_greedy & is_filtered)
        token_ids = torch.zeros(len(batch), dtype=torch.int64, device=logits.device)
        valid = torch.zeros(len(batch), dtype=torch.bool, device=logits.device)
        if len(greedy):
            rows = look_at(logits, greedy)
            best = argmax(rows)
            place(token_ids, greedy, best)
            place(valid, greedy, torch.isfinite(rows.gather(1, best.unsqueeze(1)).squeeze(1)))
        numbers = batch.numbers(again=again)
        for draws, draw in ((plain, draw_from_all), (filtered, draw_from_top)):
            for some in slices(draws, logits):
                drawn, proper = draw(look_at(logits, some), DrawParams.of(numbers[some], logits))
                place(token_ids, some, drawn)
                place(valid, some, proper)
        return token_ids, valid

    def _choose_allowed(
        self, logits: torch.Tensor, batch: SamplingBatch, draws: DrawRows, words: Words, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids = torch.zeros(len(draws), dtype=torch.int64, device=logits.device)
        valid = torch.zeros(len(draws), dtype=torch.bool, device=logits.device)
        for places, few in zip(split(words), (True, False), strict=True):
            if not len(places):
                continue
            index = torch.from_numpy(draws[places]).to(logits.device)
            if few:
                table, is_token = (torch.from_numpy(each).to(logits.device) for each in allowed_ids(words[places]))
                rows = logits[index.unsqueeze(1), table].masked_fill_(~is_token, -torch.inf)
            else:
                rows = logits[index]
                mask(rows, np.arange(len(places)), words[places])
            chosen, proper = self._choose(rows, batch.select(draws[places]), again=again)
            place(token_ids, places, table.gather(1, chosen.unsqueeze(1)).squeeze(1) if few else chosen)
            place(valid, places, proper)
        return token_ids, valid


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """Return log-probability and rank of token_ids[i] in row i, and its num_top[i] likeliest tokens (equals by id)."""
    logprobs = logits.log_softmax(-1)
    given = token_ids.unsqueeze(1)
    chosen = logprobs.gather(1, given).squeeze(1).tolist()
    # Counting in float32 is exact below 2^24, and several times as fast as counting a bool mask.
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


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the most likely tokens, int64 [rows, min(k, vocab)]; equals by ascending id."""
    vocab = logits.shape[1]
    k, width = min(k, vocab), min(2 * MAX_LOGPROBS, vocab)
    values, ids = largest(logits, width)
    if width < vocab:
        tied = (values[:, k - 1] == values[:, -1]).nonzero().squeeze(-1)
        if len(tied):
            ids[tied] = largest(logits[tied], vocab)[1][:, :width]
    return ids[:, :k]
