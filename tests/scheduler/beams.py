"""Beam search without a model: candidates that depend on a beam's tokens alone, and the search nobody disturbs."""

from __future__ import annotations

import random

from octavo.request import Request, Sequence
from octavo.scheduler.beam import Beam, BeamSearch
from octavo.scheduler.plan import Candidate
from tests.scheduler.results import Draw

VOCAB = 12
EOS = 9


def candidates(request: Request, token_ids: list[int]) -> tuple[Candidate, ...]:
    """The likeliest tokens after these, by a rule that looks at all of them.

    A request with a seed has nearly all of them masked after every other token.
    """
    rng = random.Random(str(token_ids))
    ranked = sorted(((rng.uniform(-6.0, -0.1), token) for token in range(VOCAB)), reverse=True)
    if request.params.seed is not None and len(token_ids) % 2:
        ranked = ranked[: rng.randint(1, 2)]
    return tuple(Candidate(token, logprob) for logprob, token in ranked[: request.num_candidates])


def sample(seq: Sequence) -> Draw:
    found = candidates(seq.request, seq.token_ids)  # type: ignore[arg-type]
    return Draw(found[0].token_id, candidates=found)


def search_alone(request: Request) -> list[list[int]]:
    """The outputs that a request's search finds, straight from `BeamSearch`."""
    search, prompt = BeamSearch(request), request.prompt_token_ids
    beams = [Beam([], 0.0, (), candidates(request, list(prompt)))]
    while going := search.advance(beams):
        outputs = [([*beams[e.parent].token_ids, e.candidate.token_id], e.score) for e in going]
        beams = [Beam(output, score, (), candidates(request, [*prompt, *output])) for output, score in outputs]
    return [hypothesis.token_ids for hypothesis in search.hypotheses[: request.params.n]]
