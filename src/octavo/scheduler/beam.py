"""Beam search over one prompt: which continuations survive, and which finished ones are kept.

`BeamSearch` is the search itself, pure computation; `BeamDecoding` makes forks and vacant places of what it chose.

The rules are those of transformers' `generate(num_beams=w, do_sample=False)` (`_beam_search` in 5.23):

    w live beams ── candidates ──> all continuations, best first
                                     ├─ of the first w, those that end ──> hypotheses: the w best by normalised score
                                     └─ the w best that do not end ──────> live beams of the next step

For this choice each beam needs at most w candidates plus one for each token that ends an output.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from octavo.logprobs import TokenLogprobs
from octavo.request import FinishReason, Request, Sequence
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.plan import Candidate, SequenceUpdate, StepResult


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam with its candidates for the next token.

    Attributes:
        token_ids: its output so far, of the same length for all beams of a search.
        score: sum of the log-probabilities of `token_ids`.
        logprobs: one entry per token if the request asks for them, else empty.
        candidates: candidates for the next token, best first.
    """

    token_ids: Seq[int]
    score: float
    logprobs: tuple[TokenLogprobs, ...]
    candidates: Seq[Candidate]

    def logprobs_with(self, candidate: Candidate) -> tuple[TokenLogprobs, ...]:
        return self.logprobs if candidate.logprobs is None else (*self.logprobs, candidate.logprobs)


@dataclass(frozen=True, slots=True)
class Extension:
    """A beam with one more token, which `score` includes; `parent` is its index among the beams given to `advance`."""

    parent: int
    candidate: Candidate
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output.

    Attributes:
        score: cumulative_logprob / number of tokens ** length_penalty.
    """

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: int | None


class BeamSearch:
    """The beam search of one request's prompt.

    Attributes:
        hypotheses: the best found so far, best first, as many as there are beams.
    """

    def __init__(self, request: Request) -> None:
        self.hypotheses: list[Hypothesis] = []
        self._params = request.params
        self._width = request.params.num_sequences
        self._max_tokens = request.params.max_tokens or 1
        self._enders = request.ending_ids

    def advance(self, beams: Seq[Beam]) -> list[Extension]:
        """Choose among the candidates of all live beams.

        Returns:
            The live beams of the next step, best first; empty if the search is over.
        """
        length = len(beams[0].token_ids) + 1
        going: list[Extension] = []
        # Each beam's candidates are sorted, so the merge stops at the last one that can matter.
        for rank, extension in enumerate(heapq.merge(*map(_extensions, count(), beams), key=lambda each: -each.score)):
            if rank >= self._width and (len(going) == self._width or length >= self._max_tokens):
                break
            reason = self._end_reason(extension.candidate.token_id, length)
            if reason is None:
                if len(going) < self._width:
                    going.append(extension)
            elif rank < self._width:
                self._keep(beams[extension.parent], extension, reason)
        # The sort is stable: among equals the one found first stays first.
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._width :]
        return [] if self._is_over(going, length) else going

    def _end_reason(self, token_id: int, length: int) -> FinishReason | None:
        if token_id in self._enders and length >= self._params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._max_tokens else None

    def _keep(self, beam: Beam, extension: Extension, reason: FinishReason) -> None:
        token_id = extension.candidate.token_id
        token_ids = [*beam.token_ids, token_id]
        self.hypotheses.append(
            Hypothesis(
                token_ids,
                extension.score / math.pow(len(token_ids), self._params.length_penalty),
                extension.score,
                beam.logprobs_with(extension.candidate),
                reason,
                self._enders[token_id] if reason is FinishReason.STOP else None,
            )
        )

    def _is_over(self, going: list[Extension], length: int) -> bool:
        if not going:
            return True
        if len(self.hypotheses) < self._width:
            return False
        if self._params.early_stopping is True:
            return True
        # With a length penalty above 0 a beam's score can still rise; only "never" waits until it no longer can.
        penalty = self._params.length_penalty
        best_length = float(self._max_tokens if self._params.early_stopping == "never" and penalty > 0 else length)
        return going[0].score / math.pow(best_length, penalty) <= self.hypotheses[-1].score


class BeamDecoding:
    """Beam search: the beams of one request advance together, once all of them have their candidates.

        beam 0   …the  ├─ cat    stays in its place: appends the token
                       └─ dog    takes the place of beam 1: forks the blocks of beam 0
        beam 1   …a              has no child: gives its blocks back

    A step may find fewer continuations than there are beams, if most tokens are masked or end an output. The remaining
    places stay vacant until a later step finds more.

    A waiting beam has computed all its tokens, so it is not scheduled. It takes part even if it loses its blocks in the
    meantime: its candidates are kept here, and its children are recomputed.
    """

    def __init__(self, request: Request, lifecycle: Lifecycle) -> None:
        self._request = request
        self._lifecycle = lifecycle
        self._search = BeamSearch(request)
        self._live = [request.sequences[0]]  # the others start as forks of it, once the prompt is computed
        self._candidates: dict[int, Seq[Candidate]] = {}  # by the index of the sequence
        self._logprobs: dict[int, tuple[TokenLogprobs, ...]] = {0: ()}

    def take(self, seqs: Seq[Sequence], first_draw: int, result: StepResult, updates: list[SequenceUpdate]) -> None:
        """Give one beam the candidates of its draw; the last one of a step advances all of them."""
        self._candidates[seqs[0].index] = result.candidates[first_draw]
        if len(self._candidates) < len(self._live):
            return
        beams = [
            Beam(s.output_token_ids, s.cumulative_logprob, self._logprobs[s.index], self._candidates[s.index])
            for s in self._live
        ]
        self._candidates = {}
        if going := self._search.advance(beams):
            self._go_on(beams, going)
        else:
            self._end(updates)

    def _go_on(self, beams: list[Beam], going: list[Extension]) -> None:
        live = self._live
        stays: dict[int, Extension] = {}
        # The first child of each parent keeps its parent's place.
        leaves = [extension for extension in going if stays.setdefault(extension.parent, extension) is not extension]
        parents = {live[place].index for place in stays}
        vacant = [seq for seq in self._request.sequences if seq.index not in parents]
        self._logprobs = {}
        grown = [(live[extension.parent], extension) for extension in stays.values()]
        for extension in leaves:
            # Fork before the parent itself grows.
            child = vacant.pop()
            self._lifecycle.fork(live[extension.parent], child)
            grown.append((child, extension))
        for seq in vacant:
            self._lifecycle.vacate(seq)
        # Sorted by sequence, because this order breaks ties.
        self._live = sorted((seq for seq, _ in grown), key=lambda seq: seq.index)
        for seq, extension in grown:
            seq.output_token_ids.append(extension.candidate.token_id)
            seq.cumulative_logprob = extension.score
            self._logprobs[seq.index] = beams[extension.parent].logprobs_with(extension.candidate)
            self._lifecycle.resume(seq)

    def _end(self, updates: list[SequenceUpdate]) -> None:
        """End the request, with the best hypotheses as its sequences."""
        request = self._request
        # Fewer hypotheses than requested are found only if nearly every token is masked. The missing outputs are then
        # empty and end with STOP, because no limit was reached.
        nothing = Hypothesis([], 0.0, 0.0, (), FinishReason.STOP, None)
        best = iter(self._search.hypotheses[: request.params.n])
        for seq in request.sequences:
            found = next(best, nothing)
            self._lifecycle.finish(seq, found.finish_reason, found.stop_reason)
            seq.output_token_ids = list(found.token_ids)
            seq.cumulative_logprob = found.cumulative_logprob
            if seq.index < request.params.n:
                update = SequenceUpdate(seq, found.token_ids, found.logprobs, found.cumulative_logprob)
                update.note_end()
                updates.append(update)
        del request.sequences[request.params.n :]


def _extensions(place: int, beam: Beam) -> Iterator[Extension]:
    """Yield the extensions of a beam, best first."""
    for candidate in beam.candidates:
        if candidate.logprob == -math.inf:
            break
        yield Extension(place, candidate, beam.score + candidate.logprob)
