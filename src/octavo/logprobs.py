"""Log-probabilities of tokens, stored so that a thousand positions with twenty each weigh little."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import overload


class TopLogprobs(Seq[tuple[int, float]]):
    """(token id, logprob) of the most likely tokens, best first, stored in two arrays.

    Twenty pairs would be sixty objects at each of a thousand positions, and freeing those of a long prompt took 8 ms.
    """

    __slots__ = ("_logprobs", "_token_ids")

    def __init__(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        self._token_ids = array("i", token_ids)
        self._logprobs = array("d", logprobs)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._token_ids, self._logprobs, strict=True)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[tuple[int, float], ...]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float] | tuple[tuple[int, float], ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        return self._token_ids[place], self._logprobs[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, TopLogprobs) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        logprob: log-probability of the chosen (or given) token, before temperature and filters.
        rank: rank of that token by probability, from 1.
        top: (token id, logprob) of the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top: Seq[tuple[int, float]]
