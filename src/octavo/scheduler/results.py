"""Applies a step's result to its sequences: publishes full blocks, appends drawn tokens, and ends sequences.

A request's decoding says which sequences draw from its logits, and what becomes of the draws:

    Sampling        each sequence appends its token; parallel samples fork when their prompt is computed
    BeamDecoding    the beams of a request advance together, once all of them have their candidates
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, RequestId, Sequence, SequenceStatus, TokenLogprobs
from octavo.scheduler.beam import Beam, BeamSearch, Extension, Hypothesis
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.plan import Candidate, SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.policy import Policy
from octavo.scheduler.sequences import place_of
from octavo.sequence_state import Place


class ResultApplier:
    """Gives each request the tokens that a step drew for it.

    Args:
        lifecycle: forks, suspends, resumes and ends sequences; ends a request whose own update raised.
        policy: informed of computed tokens.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        lifecycle: Lifecycle,
        policy: Policy,
        max_model_len: int,
    ) -> None:
        self._kv = kv
        self._lifecycle = lifecycle
        self._policy = policy
        self._max_model_len = max_model_len
        self._sampling = Sampling(lifecycle, max_model_len)
        self._searches: dict[RequestId, BeamDecoding] = {}  # by request that uses beam search

    def begin(self, request: Request) -> None:
        """Start following a queued request."""
        if request.params.use_beam_search:
            self._searches[request.request_id] = BeamDecoding(request, self._lifecycle)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._searches.pop(request.request_id, None)

    def drawing(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Return the sequences that draw the token after the last one of `seq`, with `seq` first."""
        siblings = seq.request.sequences
        if len(siblings) == 1 or seq.request.params.use_beam_search:
            return (seq,)
        return (seq, *(s for s in siblings if s.status is SequenceStatus.FORK_PENDING))

    def apply(
        self,
        plan: StepPlan,
        result: StepResult,
        sequences: Seq[Sequence],
        draws: Seq[tuple[Sequence, ...]],
    ) -> list[SequenceUpdate]:
        """Advance the sequence of each row; `draws` holds the drawing sequences of each row after the streams."""
        for scores, logprobs in zip(plan.scores, result.prompt_logprobs, strict=True):
            sequences[scores.row].request.prompt_logprobs.extend(logprobs)
        for pool, total in zip(plan.pools, result.pooled, strict=True):
            if (states := sequences[pool.row].request.pooled) is not None:
                states.add(pool.num_tokens, total)
        updates: list[SequenceUpdate] = []
        forced = result.forced
        # Nearly every row only gains a token; `attend_at` and `ending_ids` identify those that need more.
        streams = sequences[: plan.num_streams]
        for draw, (seq, token_id) in enumerate(zip(streams, result.token_ids, strict=False)):
            computed, place = seq.num_computed + 1, seq.state.place
            if place is None or computed >= place.attend_at or token_id in place.ending_ids or draw in forced:
                self._advance(seq, computed, (seq,), draw, result, updates)
            else:
                seq.num_computed = computed
                seq.output_token_ids.append(token_id)
                updates.append(SequenceUpdate(seq, (token_id,)))
        draw = plan.num_streams
        for row, drawing in enumerate(draws, start=plan.num_streams):
            self._advance(sequences[row], plan.starts[row] + plan.lengths[row], drawing, draw, result, updates)
            draw += len(drawing)
        return updates

    def _advance(
        self,
        seq: Sequence,
        num_computed: int,
        drawing: tuple[Sequence, ...],
        draw: int,
        result: StepResult,
        updates: list[SequenceUpdate],
    ) -> None:
        """Advance any row: the sequences in `drawing` get the draws from number `draw` on."""
        if seq.status is SequenceStatus.FINISHED:
            return  # it was ended when the update of a sibling failed, or after the step was planned
        request = seq.request
        try:
            seq.num_computed = num_computed
            place = place_of(seq)
            self._policy.computed(seq)
            self._publish(seq, place)
            search = self._searches.get(request.request_id)
            if drawing:
                (search or self._sampling).take(drawing, draw, result, updates)
            if search is None and not request.params.needs_logprobs:
                # The last token's key and value are never computed.
                place.attend_at = min(place.publish_at, seq.max_num_tokens(self._max_model_len) - 1)
                place.ending_ids = request.ending_ids
        except Exception as error:
            self._lifecycle.fail(request, error)

    def _publish(self, seq: Sequence, place: Place) -> None:
        """Commit computed tokens to the cache, if that changes the cache."""
        if (computed := seq.num_computed) >= place.publish_at:
            self._kv.commit(seq)
            size = self._kv.spec.block_size
            place.publish_at = 0 if self._kv.slides else computed - computed % size + size


class Sampling:
    """Plain sampling: each sequence appends the token it drew, and what its grammar forces after it."""

    def __init__(self, lifecycle: Lifecycle, max_model_len: int) -> None:
        self._lifecycle = lifecycle
        self._max_model_len = max_model_len

    def take(self, seqs: Seq[Sequence], first_draw: int, result: StepResult, updates: list[SequenceUpdate]) -> None:
        """Continue sequences with the draws from `first_draw` on; the blocks of the first one are committed."""
        for sibling in seqs[1:]:
            self._lifecycle.fork(seqs[0], sibling)
        logprobs_of, forced = result.logprobs, result.forced
        for draw, seq in enumerate(seqs, start=first_draw):
            update = SequenceUpdate(seq, (result.token_ids[draw],))
            if draw in logprobs_of:
                update.logprobs = (logprobs_of[draw],)
                seq.cumulative_logprob += logprobs_of[draw].logprob
            update.cumulative_logprob = seq.cumulative_logprob
            if draw in forced:
                update.token_ids = (*update.token_ids, *forced[draw])
            for length, token_id in enumerate(update.token_ids, start=1):
                seq.output_token_ids.append(token_id)
                if self._ends(seq, token_id):
                    update.token_ids = update.token_ids[:length]
                    update.note_end()
                    break
            updates.append(update)

    def _ends(self, seq: Sequence, token_id: int) -> bool:
        """End a sequence if its last token does; returns whether it has ended."""
        params = seq.request.params
        num_output = len(seq.output_token_ids)
        # A grammar allows end-of-sequence before `min_tokens` or despite `ignore_eos` only if no other token fits.
        is_structured = params.structured_outputs is not None
        finish = self._lifecycle.finish
        if num_output >= params.min_tokens or is_structured:
            if token_id in seq.request.eos_token_ids and (is_structured or not params.ignore_eos):
                finish(seq, FinishReason.STOP)
            elif token_id in params.stop_token_ids:
                finish(seq, FinishReason.STOP, token_id)
        if num_output >= (params.max_tokens or 1) or seq.num_tokens >= self._max_model_len:
            finish(seq, FinishReason.LENGTH)
        return seq.status is SequenceStatus.FINISHED


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
        self._search = BeamSearch.of(request)
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
