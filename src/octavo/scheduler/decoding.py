"""Continues a request from its samples: as independent sequences, or by beam search."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.request import FinishReason, Request, Sequence, SequenceStatus, TokenLogprobs
from octavo.scheduler.beam import Beam, BeamSearch, Extension, Hypothesis
from octavo.scheduler.plan import Candidate, SampleResult, SequenceUpdate


class SequenceMoves(Protocol):
    """The operations of the scheduler on sequences that a `Decoding` may use."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Fork `child` from `parent` over the same blocks; blocks that the child held are released."""

    def resume(self, seq: Sequence) -> None:
        """Resume a sequence with a next token to compute: queue it if it holds no blocks."""

    def vacate(self, seq: Sequence) -> None:
        """Suspend a sequence without a next token: release its blocks and its place among the running.

        Unlike a finished sequence, it can be the child of a later fork.
        """

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence and free its blocks."""


class Decoding(Protocol):
    """Continues a request after a step that computed the last token of one of its sequences."""

    def drawing(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Return the sequences that draw the token after the last one of `seq`, with `seq` first."""

    def take(
        self, seqs: Seq[Sequence], samples: Seq[SampleResult], moves: SequenceMoves, updates: list[SequenceUpdate]
    ) -> None:
        """Process the samples of the sequences from `drawing`, and append the results to `updates`.

        All blocks of the first sequence must be computed and committed before.
        """


class Sampling:
    """Plain sampling: each sequence appends the token it drew; parallel samples fork when their prompt is computed."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def drawing(self, seq: Sequence) -> tuple[Sequence, ...]:
        siblings = seq.request.sequences
        if len(siblings) == 1:
            return (seq,)
        return (seq, *(s for s in siblings if s.status is SequenceStatus.FORK_PENDING))

    def take(
        self, seqs: Seq[Sequence], samples: Seq[SampleResult], moves: SequenceMoves, updates: list[SequenceUpdate]
    ) -> None:
        for sibling in seqs[1:]:
            moves.fork(seqs[0], sibling)
        for seq, sample in zip(seqs, samples, strict=True):
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sample.logprobs is not None:
                logprobs = (sample.logprobs,)
                seq.cumulative_logprob += sample.logprobs.logprob
            token_ids = (sample.token_id, *sample.forced)
            for length, token_id in enumerate(token_ids, start=1):
                if self.append(seq, token_id, moves):
                    token_ids = token_ids[:length]
                    break
            update = SequenceUpdate(seq, token_ids, logprobs, seq.cumulative_logprob)
            updates.append(update)
            update.note_end()

    def append(self, seq: Sequence, token_id: int, moves: SequenceMoves) -> bool:
        """Append a token; returns whether the sequence has ended with it."""
        seq.output_token_ids.append(token_id)
        self._check_end(seq, token_id, moves)
        return seq.status is SequenceStatus.FINISHED

    def _check_end(self, seq: Sequence, token_id: int, moves: SequenceMoves) -> None:
        params = seq.request.params
        num_output = len(seq.output_token_ids)
        # A grammar allows end-of-sequence before `min_tokens` or despite `ignore_eos` only if no other token fits.
        is_structured = params.structured_outputs is not None
        if num_output >= params.min_tokens or is_structured:
            if token_id in seq.request.eos_token_ids and (is_structured or not params.ignore_eos):
                return moves.finish(seq, FinishReason.STOP)
            if token_id in params.stop_token_ids:
                return moves.finish(seq, FinishReason.STOP, token_id)
        if num_output >= (params.max_tokens or 1) or seq.num_tokens >= self._max_model_len:
            moves.finish(seq, FinishReason.LENGTH)


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

    def __init__(self, request: Request) -> None:
        self._request = request
        self._search = BeamSearch.of(request)
        self._live = [request.sequences[0]]  # the others start as forks of it, once the prompt is computed
        self._candidates: dict[int, Seq[Candidate]] = {}  # by the index of the sequence
        self._logprobs: dict[int, tuple[TokenLogprobs, ...]] = {0: ()}

    def drawing(self, seq: Sequence) -> tuple[Sequence, ...]:
        return (seq,)

    def take(
        self, seqs: Seq[Sequence], samples: Seq[SampleResult], moves: SequenceMoves, updates: list[SequenceUpdate]
    ) -> None:
        self._candidates[seqs[0].index] = samples[0].candidates
        if len(self._candidates) < len(self._live):
            return
        beams = [
            Beam(s.output_token_ids, s.cumulative_logprob, self._logprobs[s.index], self._candidates[s.index])
            for s in self._live
        ]
        self._candidates = {}
        if going := self._search.advance(beams):
            self._go_on(beams, going, moves)
        else:
            self._end(moves, updates)

    def _go_on(self, beams: list[Beam], going: list[Extension], moves: SequenceMoves) -> None:
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
            moves.fork(live[extension.parent], child)
            grown.append((child, extension))
        for seq in vacant:
            moves.vacate(seq)
        # Sorted by sequence, because this order breaks ties.
        self._live = sorted((seq for seq, _ in grown), key=lambda seq: seq.index)
        for seq, extension in grown:
            seq.append_token(extension.candidate.token_id)
            seq.cumulative_logprob = extension.score
            self._logprobs[seq.index] = beams[extension.parent].logprobs_with(extension.candidate)
            moves.resume(seq)

    def _end(self, moves: SequenceMoves, updates: list[SequenceUpdate]) -> None:
        """End the request, with the best hypotheses as its sequences."""
        request = self._request
        # Fewer hypotheses than requested are found only if nearly every token is masked. The missing outputs are then
        # empty and end with STOP, because no limit was reached.
        nothing = Hypothesis([], 0.0, 0.0, (), FinishReason.STOP, None)
        best = iter(self._search.hypotheses[: request.params.n])
        for seq in request.sequences:
            found = next(best, nothing)
            moves.finish(seq, found.finish_reason, found.stop_reason)
            seq.output_token_ids = list(found.token_ids)
            seq.cumulative_logprob = found.cumulative_logprob
            if seq.index < request.params.n:
                update = SequenceUpdate(seq, found.token_ids, found.logprobs, found.cumulative_logprob)
                update.note_end()
                updates.append(update)
        del request.sequences[request.params.n :]
