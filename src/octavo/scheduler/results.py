"""Applies a step's result to its sequences: publishes full blocks, appends drawn tokens, and ends sequences.

Plainly sampled sequences append their tokens, and parallel samples fork when their prompt is computed; the beams of a
request advance together (`beam.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.request import FinishReason, Sequence
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.plan import SequenceUpdate, StepResult
from octavo.scheduler.plan_builder import PlannedRows


class ResultApplier:
    """Gives each request the tokens that a step drew for it."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._policy = lifecycle.policy
        self._max_model_len = lifecycle.config.max_model_len

    def apply(self, result: StepResult, rows: PlannedRows) -> list[SequenceUpdate]:
        """Advance the sequence of each row."""
        plan, sequences = rows.plan, rows.sequences
        for scores, logprobs in zip(plan.scores, result.prompt_logprobs, strict=True):
            sequences[scores.row].request.prompt_logprobs.extend(logprobs)
        for pool, total in zip(plan.pools, result.pooled, strict=True):
            if (states := sequences[pool.row].request.pooled) is not None:
                states.add(pool.num_tokens, total)
        updates: list[SequenceUpdate] = []
        forced = result.forced
        for draw, (seq, token_id) in enumerate(zip(sequences[: plan.num_streams], result.token_ids, strict=False)):
            if (place := seq.state.place) is None:
                continue  # it has ended after the step was planned
            computed = seq.num_computed = seq.num_computed + 1
            if computed >= place.publish_at and not self._publish(seq):
                continue
            if computed >= place.more_from or token_id in place.ending_ids or draw in forced:
                self._draw((seq,), draw, result, updates)
            else:  # nearly every stream only gains a token
                seq.output_token_ids.append(token_id)
                updates.append(SequenceUpdate(seq, (token_id,)))
        draw = plan.num_streams
        for row, drawing in enumerate(rows.draws, start=plan.num_streams):
            seq, draft = sequences[row], rows.drafts.get(row, ())
            first, draw = draw, draw + len(draft) + len(drawing)
            if seq.finished:
                continue  # it has ended after the step was planned
            accepted = self._num_accepted(seq, draft, result.token_ids[first : first + len(draft)])
            seq.output_token_ids.extend(draft[:accepted])
            seq.num_computed = plan.starts[row] + plan.lengths[row] - len(draft) + accepted
            self._policy.computed(seq)
            if self._publish(seq) and drawing:
                self._draw(drawing, first, result, updates, accepted)
            if accepted < len(draft):
                self._lifecycle.trim(seq)
        return updates

    def _num_accepted(self, seq: Sequence, draft: Seq[int], drawn: Seq[int]) -> int:
        """Return how many tokens of a draft were drawn too, up to the one that ends the sequence, exclusively."""
        num_output = len(seq.output_token_ids)
        for place, (token_id, wanted) in enumerate(zip(drawn, draft, strict=True)):
            if token_id != wanted or self._ending(seq, token_id, num_output + place + 1) is not None:
                return place
        return len(draft)

    def _publish(self, seq: Sequence) -> bool:
        """Publish the blocks that a sequence has filled; False if that failed, and the request has ended."""
        place, computed, size = seq.state.placed, seq.num_computed, self._kv.spec.block_size
        if computed < place.publish_at:
            return True
        try:
            self._kv.commit(seq)
        except Exception as error:
            self._lifecycle.fail(seq.request, error)
            return False
        place.publish_at = 0 if self._kv.slides else computed - computed % size + size
        return True

    def _draw(
        self,
        seqs: tuple[Sequence, ...],
        draw: int,
        result: StepResult,
        updates: list[SequenceUpdate],
        num_accepted: int = 0,
    ) -> None:
        """Continue a request's sequences, which have the draws from number `draw` on; if that fails, it ends.

        Args:
            num_accepted: draws before the only sequence's last, which it has appended already.
        """
        request = seqs[0].request
        try:
            if request.search is not None:
                request.search.take(seqs, draw, result, updates)
                return
            self._append(seqs, draw, result, updates, num_accepted)
            if not request.params.needs_logprobs and (place := seqs[0].state.place) is not None:
                # The last token's key and value are never computed.
                place.more_from = seqs[0].max_num_tokens(self._max_model_len) - 1
                place.ending_ids = request.ending_ids
        except Exception as error:
            self._lifecycle.fail(request, error)

    def _append(
        self,
        seqs: Seq[Sequence],
        first_draw: int,
        result: StepResult,
        updates: list[SequenceUpdate],
        num_accepted: int,
    ) -> None:
        """Append to each sequence the token it drew, and what its grammar forces after it.

        Args:
            seqs: the one that computed the prompt, whose blocks are committed, and those that are forked from it.
            num_accepted: draws before these, which the only sequence has appended already.
        """
        for sibling in seqs[1:]:
            self._lifecycle.fork(seqs[0], sibling)
        logprobs_of, forced = result.logprobs, result.forced
        for draw, seq in enumerate(seqs, start=first_draw + num_accepted):
            update = SequenceUpdate(seq, result.token_ids[draw - num_accepted : draw + 1])
            update.earlier_logprob = seq.cumulative_logprob
            if draw in logprobs_of:
                update.logprobs = tuple(logprobs_of[i] for i in range(draw - num_accepted, draw + 1))
                for known in update.logprobs:
                    seq.cumulative_logprob += known.logprob
            update.cumulative_logprob = seq.cumulative_logprob
            if draw in forced:
                update.token_ids = (*update.token_ids, *forced[draw])
            for length, token_id in enumerate(update.token_ids[num_accepted:], start=num_accepted + 1):
                seq.output_token_ids.append(token_id)
                if (ending := self._ending(seq, token_id, len(seq.output_token_ids))) is not None:
                    self._lifecycle.finish(seq, *ending)
                    update.token_ids = update.token_ids[:length]
                    update.note_end()
                    break
            updates.append(update)

    def _ending(self, seq: Sequence, token_id: int, num_output: int) -> tuple[FinishReason, int | None] | None:
        """Return the finish and stop reasons of a sequence if its output token number `num_output` ends it."""
        request, params = seq.request, seq.request.params
        # A grammar allows end-of-sequence before `min_tokens` only if no other token fits.
        may_stop = num_output >= params.min_tokens or params.structured_outputs is not None
        if may_stop and token_id in (ending_ids := request.ending_ids):
            return FinishReason.STOP, ending_ids[token_id]
        if num_output >= (params.max_tokens or 1) or seq.num_prompt_tokens + num_output >= self._max_model_len:
            return FinishReason.LENGTH, None
        return None
