"""Drafts by an adversary that knows what is going to be drawn: right, wrong, or right up to some token."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from octavo.engine.core import EngineCore
from octavo.request import RequestId, Sequence
from octavo.scheduler.acceptance_rates import Followed
from octavo.scheduler.drafts import Draft, DraftMethod
from octavo.scheduler.speculation import Drafts, Speculator

VOCAB_SIZE = 320
MOST = 6

Outputs = dict[tuple[RequestId, int], Seq[int]]
"""The tokens of each sequence of each request."""


class Adversary(DraftMethod):
    """Drafts as many right tokens as it likes, and then any others.

    Args:
        expected: what is drawn without drafts.
    """

    def __init__(self, expected: Outputs, seed: int) -> None:
        self._expected = expected
        self._rng = random.Random(seed)

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        rng, start = self._rng, seq.num_output_tokens
        expected = self._expected[seq.request.request_id, seq.index]
        assert list(expected[:start]) == seq.output_token_ids
        count = rng.randint(0, min(most, MOST))
        num_right = rng.choice((0, rng.randint(0, count), count))
        token_ids = [*expected[start : start + num_right]]
        token_ids += [rng.randrange(VOCAB_SIZE) for _ in range(count - len(token_ids))]
        return Draft(tuple(token_ids), "adversary", len(token_ids)) if token_ids else None


class VerifyingAll(Speculator):
    """Verifies every draft, whatever it costs."""

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        chosen: Drafts = {}
        most_rows -= sum(seq.num_missing for seq in streams)
        for seq in streams:
            followed = seq.state.followed = Followed()
            if self._look(seq, followed) and followed.draft is not None:
                token_ids = followed.draft.token_ids[: min(self._most, self._num_left(seq))]
                if token_ids and len(token_ids) <= most_rows:
                    most_rows -= len(token_ids)
                    chosen[seq.seq_id] = seq, token_ids
        return chosen


def speculate(core: EngineCore, method: DraftMethod, most: int = MOST) -> Speculator:
    """Let an engine verify everything that a method drafts."""
    scheduler = core.scheduler
    scheduler.speculator = VerifyingAll(method, most, scheduler.config.max_model_len)
    scheduler._composer._speculator = scheduler.speculator
    return scheduler.speculator
