"""Chooses tokens from rows of logits, in torch on any device, or with the C++ library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo import kernels
from octavo.logprobs import TokenLogprobs, TopLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.draw import draw, largest
from octavo.sampling.masks import Words, mask
from octavo.storage.device_copy import begin_copy_to_host

DrawRows = npt.NDArray[np.int64]
"""Indices of draws."""
Flags = npt.NDArray[np.bool_]
"""One flag per draw."""
Draw = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Chooses from logits; returns what `Choice.choose` does."""

# Number of logits processed at a time. Copies of a few MiB stay in a CPU's cache and with its allocator, which returns
# larger ones to the system after each use.
_AT_ONCE = 2**20


def slices(rows: DrawRows, logits: torch.Tensor) -> Iterator[DrawRows]:
    """Return slices of the rows, each small enough to be processed at once; of a GPU's, all together."""
    at_once = max(1, len(rows) if logits.is_cuda else _AT_ONCE // logits.shape[1])
    return (rows[first : first + at_once] for first in range(0, len(rows), at_once))


def look_at(tensor: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Return some rows, which must be in ascending order; read-only, because adjacent rows are not copied."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return tensor[torch.from_numpy(rows).to(tensor.device)]


def to_host(token_ids: torch.Tensor, valid: torch.Tensor) -> Callable[[], tuple[list[int], list[bool]]]:
    """Copy what `Choice.choose` returns to the host, in one transfer; the returned function waits for it."""
    if not token_ids.is_cuda:
        return lambda: (token_ids.tolist(), valid.tolist())
    arrived = begin_copy_to_host(torch.stack((token_ids, valid.long())))

    def wait() -> tuple[list[int], list[bool]]:
        ids_on_host, flags = arrived()
        return ids_on_host.tolist(), flags.bool().tolist()

    return wait


@dataclass(frozen=True, slots=True)
class DrawMasks:
    """The tokens that some draws of a batch may choose.

    Attributes:
        words: uint32 [masks, ceil(vocab / 32)], with a bit set for each allowed token.
        mask_of: int64 [draws]; the row of `words` for each draw, or -1: it may choose any token.
    """

    words: Words
    mask_of: npt.NDArray[np.int64]

    def apply(self, logits: torch.Tensor, draws: DrawRows) -> None:
        """Set the logits of forbidden tokens to -inf, in place: float32 [draws, vocab], a row for each of the draws."""
        mask_of = self.mask_of[draws]
        mask(logits, np.flatnonzero(mask_of >= 0), self.words[mask_of[mask_of >= 0]])


class Choice:
    """Chooses and scores tokens, with torch operations on any device. The result for a row depends on that row alone.

    It is the oracle of its subclasses, and what draws where they do not run.
    """

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
            masks: of structured outputs; those of `allowed_token_ids` are added.
            rows: the row of logits of each draw, in ascending order; if None, row i belongs to draw i.
            again: whether to use the second random number of each draw in place of its first.

        Returns:
            int64 [draws] token ids, and bool [draws]: whether the row's logits allow a choice.
        """
        return self.prepare(batch, logits.shape[1], masks, rows, again=again)(logits)

    def prepare(
        self,
        batch: SamplingBatch,
        vocab: int,
        masks: DrawMasks | None = None,
        rows: DrawRows | None = None,
        *,
        again: bool = False,
    ) -> Draw:
        """Do what `choose` does before it needs the logits, which have `vocab` columns.

        What it returns may be called again when the batch's positions and `numbers` have changed; it then returns the
        same tensors.
        """
        masks = with_limits(masks, batch, vocab)
        rows = np.arange(len(batch)) if rows is None else rows
        return self._prepare(rows, batch.numbers(again=again), masks)

    def _prepare(self, rows: DrawRows, numbers: npt.NDArray[np.float64], masks: DrawMasks | None) -> Draw:
        return lambda logits: self._draw(logits, rows, numbers, masks)

    def _draw(
        self, logits: torch.Tensor, rows: DrawRows, numbers: npt.NDArray[np.float64], masks: DrawMasks | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `choose` does with a row of logits, and of `SamplingBatch.numbers`, for each draw."""
        found = []
        for draws in slices(np.arange(len(rows)), logits):
            some = look_at(logits, rows[draws])
            if masks is not None:
                masks.apply(some := some.clone(), draws)
            found.append(draw(some, numbers[draws]))
        token_ids, valid = map(torch.cat, zip(*found, strict=True))
        return token_ids, valid

    def score(
        self, logits: torch.Tensor, rows: DrawRows, token_ids: torch.Tensor, num_top: list[int]
    ) -> list[TokenLogprobs]:
        """Score one token in each of some rows: log-probability, rank, and the num_top[i] most likely tokens.

        Args:
            logits: float32 [*, vocab].
            rows: the rows to score, in ascending order.
            token_ids: int64 [*], a token for each row of the logits.
        """
        found: list[TokenLogprobs] = []
        for some in slices(rows, logits):
            found += token_logprobs(look_at(logits, some), look_at(token_ids, some), num_top[len(found) :][: len(some)])
        return found

    def likeliest(self, logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest log-probabilities of each row and their tokens, float32 and int64 [rows, num_top].

        Equals are in order of ascending id. The first value of a row that is not a distribution is not finite.
        """
        ids = largest(logits, num_top)
        return logits.log_softmax(-1).gather(1, ids), ids


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """Return log-probability and rank of token_ids[i] in row i, and its num_top[i] likeliest tokens (equals by id)."""
    logprobs, given = logits.log_softmax(-1), token_ids.unsqueeze(1)
    ranks = (logits > logits.gather(1, given)).sum(-1, keepdim=True) + 1
    most = min(max(num_top), logits.shape[1])
    top_ids = largest(logits, most)
    # In one transfer; float64 holds ids, ranks and float32 values exactly.
    pieces = (logprobs.gather(1, given), ranks, top_ids, logprobs.gather(1, top_ids))
    found = torch.cat([piece.double() for piece in pieces], dim=1).tolist()
    return [
        TokenLogprobs(logprob, int(rank), TopLogprobs([int(i) for i in top[:k]], top[most : most + k]) if k else ())
        for (logprob, rank, *top), k in zip(found, (min(k, most) for k in num_top), strict=True)
    ]


class NativeChoice(Choice):
    """Chooses and scores on a CPU, with one call of the C++ library for the whole batch (`csrc/sampling.cpp`).

    It finds the same tokens as `Choice` from the same random numbers, unless a number falls on a boundary between two
    tokens, or a filter's cut on a token: masses are summed in another order, so boundaries differ by about a millionth
    of a row's mass. Each row is processed by one thread, without the GIL.
    """

    def _prepare(self, rows: DrawRows, numbers: npt.NDArray[np.float64], masks: DrawMasks | None) -> Draw:
        bits = () if masks is None else (masks.words.view(np.int32), masks.mask_of)
        given = [*map(torch.from_numpy, (rows, numbers, *bits))]
        token_ids, valid = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows), dtype=torch.bool)
        flags = valid.view(torch.uint8)

        def draw(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kernels.draw_tokens(token_ids, flags, logits, *given)
            return token_ids, valid

        return draw

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


def with_limits(masks: DrawMasks | None, batch: SamplingBatch, vocab: int) -> DrawMasks | None:
    """Add a mask for each draw that is limited by `allowed_token_ids`; None if there is no mask at all."""
    if "limited" not in batch.kinds:
        return masks
    draws = np.flatnonzero(batch.records["limited"])
    words = np.zeros((len(draws), -(-vocab // 32)), dtype=np.uint32)
    for row, i in zip(words, draws.tolist(), strict=True):
        limited = batch.states[i].allowed_words
        assert limited is not None, "its record says that it is limited"
        places, values = limited
        inside = slice(int(places.searchsorted(len(row))))
        row[places[inside]] = values[inside]
    mask_of = np.full(len(batch), -1) if masks is None else masks.mask_of.copy()
    mask_of[draws] = np.arange(len(draws)) + (0 if masks is None else len(masks.words))
    return DrawMasks(words if masks is None else np.concatenate((masks.words, words)), mask_of)
