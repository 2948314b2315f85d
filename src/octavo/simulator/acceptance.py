"""Drafts in a simulation: which are found and how many of their tokens are accepted, as recorded by a server.

A simulated output has no text, so each follows one of the outputs in a recording. Where that one verified a draft,
so does this one, if the speculator decides to, and as many tokens are accepted:

    recorded     | drawn | draft of 4, the third refuted | drawn | drawn | draft of 2, both accepted |
    known        |   .   |  1   1   0   0                |   .   |   .   |  1   1                    |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from octavo.request import Sequence, SequenceId
from octavo.scheduler.drafts import Draft, DraftMethod
from octavo.scheduler.plan_log import RecordedStep

RIGHT, WRONG = 1, 0
"""Token ids: all simulated tokens are equal, and a refuted one is another."""

_MATCH = 32  # of every draft: recordings do not say how long a match was


class KnownText(NamedTuple):
    """Tokens of an output that were drafted.

    Attributes:
        start, end: the output's tokens that were right.
        num_wrong: tokens drafted after them, none of which was.
    """

    start: int
    end: int
    num_wrong: int


Output = tuple[KnownText, ...]
"""The drafts of one output, in order."""


def outputs_of(steps: Iterable[RecordedStep]) -> list[Output]:
    """Return the drafts of each output in a recording.

    The acceptance of an output's last draft is not recorded. An output that was preempted counts twice.
    """
    found: dict[SequenceId | int, list[KnownText]] = {}
    prompts: dict[int, int] = {}  # by sequence, the number of its tokens when it first drew
    last: dict[int, tuple[int, int]] = {}  # by sequence, its known tokens in its last step, and those it verified
    for step in steps:
        for seq_id, start, length, draws in zip(step.seq_ids, step.starts, step.lengths, step.draws, strict=True):
            if (before := last.pop(seq_id, None)) is not None:
                known, drafted = before
                accepted = start - known
                if 0 <= accepted <= drafted:
                    first = known - prompts[seq_id]
                    _add(found[seq_id], KnownText(first, first + accepted, drafted - accepted))
            if not draws:
                continue
            if seq_id not in prompts:
                prompts[seq_id], found[seq_id] = start + length, []
            elif draws > 1:
                last[seq_id] = start + length - draws + 1, draws - 1
    return [tuple(texts) for texts in found.values()]


def _add(texts: list[KnownText], text: KnownText) -> None:
    """Append known text, joined to the last if only the token between them, which was drawn too, divides them."""
    if texts and not texts[-1].num_wrong and texts[-1].end + 1 == text.start:
        texts[-1] = KnownText(texts[-1].start, text.end, text.num_wrong)
    else:
        texts.append(text)


class RecordedDrafts(DraftMethod):
    """Drafts as in a recording: the simulated requests follow its outputs in turn."""

    def __init__(self, outputs: list[Output]) -> None:
        super().__init__(2, 8)
        self._recorded = outputs
        self._num_begun = 0

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        """Return what was known of the text that a sequence follows, from its next token on."""
        texts: Output | None = seq.state.token_index
        if texts is None:
            texts = seq.state.token_index = self._recorded[self._num_begun % len(self._recorded)]
            self._num_begun += 1
        place = seq.num_output_tokens
        number = bisect_right(texts, place, key=lambda text: text.start) - 1
        if number < 0 or place >= (text := texts[number]).end + (place == text.start and text.num_wrong > 0):
            return None
        token_ids = (RIGHT,) * (text.end - place) + (WRONG,) * text.num_wrong
        return Draft(token_ids[:most], "recorded", _MATCH)
