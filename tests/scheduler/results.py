"""Step results draw by draw, for tests that make or check them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.logprobs import TokenLogprobs
from octavo.scheduler.plan import Candidate, StepResult


class Draw(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[Candidate, ...] = ()
    forced: tuple[int, ...] = ()


def result_of(draws: Iterable[Draw | int], prompt_logprobs: Iterable[Iterable[TokenLogprobs]] = ()) -> StepResult:
    """The result with these draws; one that is a number is just a token."""
    all_draws = [Draw(draw) if isinstance(draw, int) else draw for draw in draws]
    return StepResult(
        tuple(draw.token_id for draw in all_draws),
        {i: draw.logprobs for i, draw in enumerate(all_draws) if draw.logprobs is not None},
        {i: draw.candidates for i, draw in enumerate(all_draws) if draw.candidates},
        tuple(map(tuple, prompt_logprobs)),
        {i: draw.forced for i, draw in enumerate(all_draws) if draw.forced},
    )


def draws_of(result: StepResult) -> list[Draw]:
    return [
        Draw(token_id, result.logprobs.get(i), result.candidates.get(i, ()), result.forced.get(i, ()))
        for i, token_id in enumerate(result.token_ids)
    ]
