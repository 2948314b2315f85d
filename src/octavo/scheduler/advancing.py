"""Advances sequences by a step's result: publishes their full blocks and appends the tokens that were drawn."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.decoding import BeamDecoding, Decoding, Sampling, SequenceMoves
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.running import Place, RunningSet


class Advancing:
    """Gives each request's `Decoding` the tokens that a step drew for it.

    Args:
        moves: the scheduler's operations on sequences.
        turns: informed of computed tokens if tenants take turns; else None.
        fail: ends a request whose own update raised.
        tells_all: if False, no update is returned for a stream's token that is merely appended.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        moves: SequenceMoves,
        turns: VirtualTokenCounter | None,
        max_model_len: int,
        fail: Callable[[Request, Exception], None],
        *,
        tells_all: bool = True,
    ) -> None:
        self._kv = kv
        self._moves = moves
        self._turns = turns
        self._max_model_len = max_model_len
        self._fail = fail
        self._tells_all = tells_all
        self._sampling = Sampling(max_model_len)
        self._searches: dict[RequestId, BeamDecoding] = {}  # by request that uses beam search

    def begin(self, request: Request) -> None:
        """Start following a queued request."""
        if request.params.use_beam_search:
            self._searches[request.request_id] = BeamDecoding(request)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._searches.pop(request.request_id, None)

    def decoding(self, seq: Sequence) -> Decoding:
        """Return the decoding of a sequence's request."""
        return self._searches.get(seq.request.request_id, self._sampling)

    def advance(
        self,
        plan: StepPlan,
        result: StepResult,
        sequences: Seq[Sequence],
        draws: Seq[tuple[Sequence, ...]],
        running: RunningSet,
    ) -> list[SequenceUpdate]:
        """Advance the sequence of each row; `draws` holds the drawing sequences of each row after the streams."""
        for scores, logprobs in zip(plan.scores, result.prompt_logprobs, strict=True):
            sequences[scores.row].request.prompt_logprobs.extend(logprobs)
        for pool, total in zip(plan.pools, result.pooled, strict=True):
            if (states := sequences[pool.row].request.pooled) is not None:
                states.add(pool.num_tokens, total)
        updates: list[SequenceUpdate] = []
        places, forced, tells_all = running.places, result.forced, self._tells_all
        # Nearly every row only gains a token; `attend_at` and `ending_ids` identify those that need more.
        streams = sequences[: plan.num_streams]
        for draw, (seq, token_id) in enumerate(zip(streams, result.token_ids, strict=False)):
            computed, place = seq.num_computed + 1, places.get(seq.seq_id)
            if place is None or not place.attend_at or draw in forced:
                self._advance(seq, computed, (seq,), draw, result, running, updates)
            elif computed >= place.attend_at or token_id in place.ending_ids:
                self._advance_stream(seq, computed, token_id, place, updates)
            else:
                seq.num_computed = computed
                seq.output_token_ids.append(token_id)
                if tells_all:
                    updates.append(SequenceUpdate(seq, (token_id,)))
        draw = plan.num_streams
        for row, drawing in enumerate(draws, start=plan.num_streams):
            self._advance(sequences[row], plan.starts[row] + plan.lengths[row], drawing, draw, result, running, updates)
            draw += len(drawing)
        return updates

    def _advance_stream(
        self, seq: Sequence, num_computed: int, token_id: int, place: Place, updates: list[SequenceUpdate]
    ) -> None:
        """Advance a row of plain sampling without log-probabilities: a shorter `_advance`."""
        try:
            seq.num_computed = num_computed
            if self._turns is not None:
                self._turns.computed(seq)
            self._publish(seq, place)
            update = SequenceUpdate(seq, (token_id,))
            updates.append(update)
            if self._sampling.append(seq, token_id, self._moves):
                update.note_end()
            else:
                place.attend_at = min(place.publish_at, seq.max_num_tokens(self._max_model_len) - 1)
        except Exception as error:
            self._fail(seq.request, error)

    def _advance(
        self,
        seq: Sequence,
        num_computed: int,
        drawing: tuple[Sequence, ...],
        draw: int,
        result: StepResult,
        running: RunningSet,
        updates: list[SequenceUpdate],
    ) -> None:
        """Advance any row: the sequences in `drawing` get the samples from number `draw` on."""
        if seq.status is SequenceStatus.FINISHED:
            return  # it was ended when the update of a sibling failed
        try:
            seq.num_computed = num_computed
            place = running.places[seq.seq_id]
            if self._turns is not None:
                self._turns.computed(seq)
            self._publish(seq, place)
            if drawing:
                samples = [result.sample(draw + i) for i in range(len(drawing))]
                self.decoding(seq).take(drawing, samples, self._moves, updates)
            request = seq.request
            if request.request_id not in self._searches and not request.params.needs_logprobs:
                # The last token's key and value are never computed.
                place.attend_at = min(place.publish_at, seq.max_num_tokens(self._max_model_len) - 1)
                place.ending_ids = request.ending_ids
        except Exception as error:
            self._fail(seq.request, error)

    def _publish(self, seq: Sequence, place: Place) -> None:
        """Commit computed tokens to the cache, if that changes the cache."""
        if (computed := seq.num_computed) >= place.publish_at:
            self._kv.commit(seq)
            size = self._kv.spec.block_size
            place.publish_at = 0 if self._kv.slides else computed - computed % size + size
