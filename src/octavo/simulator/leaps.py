"""Consecutive steps that only a new request could change, simulated as one in which each stream draws a token per step.

The scheduler sees streams that verify accepted drafts: blocks are taken, filled and published as in single steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, Sequence, SequenceId
from octavo.scheduler.drafts import DraftMethod
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.speculation import Drafts, Speculator
from octavo.simulator.acceptance import RIGHT

MOST_STEPS = 64


class Leaps(Speculator):
    """A speculator whose drafts are always accepted.

    Attributes:
        num_steps: number of steps that the next plan of decodes alone represents.
    """

    def __init__(self, kv: KVCacheManager, max_model_len: int, max_num_batched_tokens: int) -> None:
        super().__init__(DraftMethod(1, 1), 1, max_model_len)
        self.num_steps = 1
        self._kv = kv
        self._most_rows = max_num_batched_tokens

    def most(self, streams: Seq[Sequence]) -> int:
        """Return how many steps these streams can compute before one ends, or the cache might be full."""
        if not streams or any(seq.num_missing != 1 for seq in streams):
            return 0
        left = min((seq.request.params.max_tokens or 0) - len(seq.output_token_ids) for seq in streams)
        room = self._kv.spec.block_size * (self._kv.pool.num_available // len(streams) - 1)
        return min(MOST_STEPS, self._most_rows // len(streams), left, room)

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        """See `Speculator.choose`."""
        if self.num_steps < 2:
            return {}
        return {seq.seq_id: (seq, (RIGHT,) * (self.num_steps - 1)) for seq in streams}

    def learn(self, verified: Mapping[SequenceId, tuple[int, ...]], updates: Iterable[SequenceUpdate]) -> None:
        """There is nothing to learn."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """There is nothing to learn."""

    def ended(self, request: Request) -> None:
        """Nothing is kept."""
