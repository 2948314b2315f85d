"""Plans for the simulator, without the token ids and block tables that only a runner needs.

Scheduling decisions come from the same code as when serving; describing them to a runner is most of the work of
planning a decode step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from octavo.request import Sequence, SequenceId
from octavo.scheduler.plan_builder import PlanBuilder


class LoadBuilder(PlanBuilder):
    """Builds plans that hold how many tokens each sequence computes, but not which."""

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
