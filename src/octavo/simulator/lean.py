"""The scheduler without what only a runner and a client need: token ids, block tables, an update for every token.

What is decided is decided by the very code that serves. These parts tell others of it, and their work is most of a
decode step's, so the simulator has lighter ones.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq

from octavo.request import Sequence, SequenceId
from octavo.scheduler.advancing import Advancing
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.running import RunningSet
from octavo.scheduler.scheduler import Scheduler


class LoadBuilder(PlanBuilder):
    """Plans that say how much each sequence computes, and nothing of what."""

    def add(self, seq: Sequence, num_new: int, draws: tuple[Sequence, ...], *, copied: bool = False) -> None:
        """See `PlanBuilder.add`."""
        self.sequences.append(seq)
        self.draws.append(draws)
        self._starts.append(seq.num_computed)
        self._lengths.append(num_new)
        self.num_tokens += num_new

    def add_streams(self, seqs: Iterable[Sequence], copied: Container[SequenceId]) -> list[Sequence]:
        """See `PlanBuilder.add_streams`."""
        streams = list(seqs)
        new = [seq for seq in streams if not seq.output_token_ids]
        if new:
            streams = [seq for seq in streams if seq.output_token_ids]
        self.sequences = streams
        self._starts = [seq.num_computed for seq in streams]
        self.num_streams = self.num_tokens = len(streams)
        self._lengths = [1] * self.num_streams
        return new

    def drop(self, seq: Sequence) -> None:
        """See `PlanBuilder.drop`."""


class QuietAdvancing(Advancing):
    """Advances streams by tokens that say nothing, and tells only of those that ended."""

    def advance(
        self,
        plan: StepPlan,
        result: StepResult,
        sequences: Seq[Sequence],
        draws: Seq[tuple[Sequence, ...]],
        running: RunningSet,
    ) -> list[SequenceUpdate]:
        """See `Advancing.advance`: every token is drawn by a lone sequence, and none of them ends it by what it is."""
        updates: list[SequenceUpdate] = []
        places = running.places
        for draw, (seq, token_id) in enumerate(zip(sequences[: plan.num_streams], result.token_ids, strict=False)):
            computed, place = seq.num_computed + 1, places[seq.seq_id]
            if computed < place.attend_at:
                seq.num_computed = computed
                seq.output_token_ids.append(token_id)
            elif place.attend_at and computed + 1 < (longest := self._longest(seq)):
                # A block is full, and more tokens follow.
                seq.num_computed = computed
                if self._turns is not None:
                    self._turns.computed(seq)
                self._publish(seq, place)
                seq.output_token_ids.append(token_id)
                place.attend_at = min(place.publish_at, longest - 1)
            else:
                self._advance(seq, computed, (seq,), draw, result, running, updates)
        draw = plan.num_streams
        for row, drawing in enumerate(draws, start=plan.num_streams):
            self._advance(sequences[row], plan.starts[row] + plan.lengths[row], drawing, draw, result, running, updates)
            draw += len(drawing)
        return updates


class SimulatedScheduler(Scheduler):
    """The scheduler that serves, with lighter plans and results."""

    builder_type = LoadBuilder
    advancing_type = QuietAdvancing
