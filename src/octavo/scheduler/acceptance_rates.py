"""Acceptance rates of drafted tokens, estimated from those that were verified."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from octavo.request import Sequence
from octavo.scheduler.drafts import Draft

MODEL = "draft_model"
MOST_MATCH = 32  # longer matches count as equally long
_CAUTION = 0.5  # standard errors by which a probability is taken to be lower; more lose on edits and gain on nothing
_PRIOR = 8.0  # tokens that the acceptance of all sequences counts as, in addition to a sequence's own
_PRIOR_REFUTED = 4.0  # of them, where a sequence's refuted tokens are compared with those that were to be expected
_FORGETTING = 0.95  # of a sequence's tokens
_MODEL_FORGETTING = 0.99  # of the tokens that count for a draft model's acceptance
_MOST_TRIED = 1000.0


class Rate:
    """The share of verified tokens that were accepted, weighted towards the latest."""

    __slots__ = ("accepted", "tried")

    def __init__(self, accepted: float = 0.0, tried: float = 0.0) -> None:
        self.accepted, self.tried = accepted, tried

    def count(self, *, accepted: bool, forgetting: float = 1.0) -> None:
        self.accepted = self.accepted * forgetting + accepted
        self.tried = self.tried * forgetting + 1.0
        if self.tried > _MOST_TRIED:
            self.accepted, self.tried = self.accepted / 2, self.tried / 2


class Followed:
    """A draft compared with a sequence's tokens as they arrive, and the acceptance of its drafts so far.

    Attributes:
        draft: None once it is used up or refuted.
        place: how many of its tokens have come.
        start: number of tokens that the sequence had before the first of them.
        look_at: number of tokens of the sequence from which another may be looked for.
        misses: looks in a row that found none.
        rate: how many of its own tokens were accepted.
        expected: how many of these were to be expected by the rates of all sequences.
    """

    __slots__ = ("draft", "expected", "look_at", "misses", "place", "rate", "start")

    def __init__(self) -> None:
        self.draft: Draft | None = None
        self.place = self.start = self.look_at = self.misses = 0
        self.rate, self.expected = Rate(), 0.0

    def begin(self, draft: Draft, num_tokens: int) -> None:
        """Follow a draft, of a sequence that has so many tokens."""
        self.draft, self.place, self.start = draft, 0, num_tokens


class Acceptance:
    """Acceptance rates by source and length of the match, and by sequence."""

    def __init__(self) -> None:
        self.rates: dict[str, list[Rate]] = {}

    def compare(self, seq: Sequence, followed: Followed) -> bool:
        """Compare new tokens with a draft; returns whether the draft continues."""
        draft = followed.draft
        assert draft is not None
        rates = self.rates_of(draft.source)
        for token_id in seq.tokens(followed.start + followed.place, seq.num_tokens):
            accepted = token_id == draft.token_ids[followed.place]
            forgetting = _MODEL_FORGETTING if draft.source == MODEL else 1.0
            every = rates[min(draft.match + followed.place, MOST_MATCH)]
            followed.expected = followed.expected * _FORGETTING + every.accepted / every.tried
            every.count(accepted=accepted, forgetting=forgetting)
            followed.rate.count(accepted=accepted, forgetting=_FORGETTING)
            followed.place += 1
            if not accepted or followed.place == len(draft.token_ids):
                followed.draft = None
                return False
        return True

    def chances(self, followed: Followed, most: int) -> Iterable[float]:
        """Return for each of up to `most` next tokens the probability that it and all before it are accepted.

        A draft is no longer than its match.
        """
        assert followed.draft is not None
        (token_ids, source, match), place = followed.draft, followed.place
        match, chance = match + place, 1.0
        for position in range(match, match + min(most, match, len(token_ids) - place)):
            chance *= self.chance(source, position, followed)
            yield chance

    def chance(self, source: str, match: int, followed: Followed) -> float:
        """Return a cautious estimate of the probability that the token after a match is accepted.

        It is refuted as often as those of all sequences, times how much more often the sequence's own were refuted than
        was to be expected of their sources and matches.
        """
        every, own = self.rates_of(source)[min(match, MOST_MATCH)], followed.rate
        refuted, expected = own.tried - own.accepted, own.tried - followed.expected
        worse = (refuted + _PRIOR_REFUTED) / (expected + _PRIOR_REFUTED)
        mean = max(0.0, 1 - (1 - every.accepted / every.tried) * worse)
        tried = own.tried + min(_PRIOR, every.tried)
        return max(0.0, mean - _CAUTION * sqrt(mean * (1 - mean) / tried))

    def rates_of(self, source: str) -> list[Rate]:
        """Return the rates of a source by length of the match.

        Before any token came, a token after a match of m tokens is accepted with probability m / (m + 1).
        """
        if (rates := self.rates.get(source)) is None:
            rates = self.rates[source] = [Rate(2 * m / (m + 1), 2.0) for m in range(MOST_MATCH + 1)]
        return rates
