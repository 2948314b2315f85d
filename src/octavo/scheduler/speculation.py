"""Speculative decoding: decides which drafted tokens a step verifies.

A drafted token takes a row of the step. It is worth one if the step yields more tokens per second with it: rows are
added in the order of their probability, those of all sequences together, and the number is chosen with which

    expected tokens      number of streams + Σ probability that a row's token and all before it are accepted
    ───────────────  =   ─────────────────────────────────────────────────────────────────────────────────
      step time                                       T(rows)

is largest. Both are measured while serving, and nothing is verified until they promise a gain:

- **Probabilities** by source, length of the match and position in the draft, and by sequence. Whether or not a draft is
  verified, it is compared with the tokens that come, so that observing costs no row.
- **Step times** by number of rows, `StepCosts`. A number of rows that was never measured counts as cheap at first.

Under load each row adds as much time as a stream does, so that drafts fade by themselves. No draft lengthens a step by
more than 5 % where a stream has none. Prompts' chunks hide nothing, so a step with one verifies nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from octavo.request import Sequence, SequenceId
from octavo.scheduler.drafts import Draft, DraftMethod
from octavo.scheduler.plan import SequenceUpdate

Drafts = dict[SequenceId, tuple[Sequence, tuple[int, ...]]]

_LEAST_GAIN = 1.03
"""A draft must promise this many times the tokens per second: predictions err."""

_MOST_DELAY = 1.05
_OBSERVED_FIRST = 2.0  # weight of a sequence's tokens that are only compared: the first three
_PRIOR = 8.0  # tokens that the acceptance of all sequences counts as, in addition to a sequence's own
_FORGETTING = 0.95  # of a sequence's tokens
_MOST_TRIED = 1000.0
_MOST_ADDED = 64


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since the start.

    Attributes:
        num_drafts: drafts that were verified.
        num_draft_tokens, num_accepted_tokens: the tokens in them, and those that were accepted.
        accepted_per_position: the accepted tokens by their position in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Rate:
    """How many of the tried tokens were accepted, the latest counting most."""

    accepted: float = 0.0
    tried: float = 0.0

    def count(self, *, accepted: bool, forgetting: float = 1.0) -> None:
        self.accepted = self.accepted * forgetting + accepted
        self.tried = self.tried * forgetting + 1.0
        if self.tried > _MOST_TRIED:
            self.accepted, self.tried = self.accepted / 2, self.tried / 2


@dataclass(slots=True)
class Followed:
    """The draft that is compared with a sequence's tokens as they come, and how its drafts fared so far.

    Attributes:
        draft: None once it is used up or refuted.
        place: how many of its tokens have come.
    """

    draft: Draft | None = None
    place: int = 0
    rate: _Rate = field(default_factory=_Rate)


class StepCosts:
    """Seconds per step by number of rows, for steps without prompts, as measured.

    Steps whose sequences are together about equally long share a table. In a table the times of all numbers of rows are
    kept relative to a level that follows the machine, so that what slows down every step makes none of them stale.
    """

    def __init__(self) -> None:
        self._tables: dict[int, _CostTable] = {}

    def table(self, context: int) -> _CostTable:
        """Return the table for sequences of `context` tokens together."""
        size = max(context, 256).bit_length() // 2  # a factor of 4
        return self._tables.setdefault(size, _CostTable())


class _CostTable:
    _KEPT = 9  # measurements of one number of rows
    _ENOUGH = 3
    _PER_ROW = 0.02  # of a step, while nothing else is known
    _STALE = 512  # steps after which a number of rows loses a measurement, and may be tried again

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._known: dict[int, float] = {}  # medians of those with enough measurements
        self._level = 1.0
        self._num_steps = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Note how long a step took."""
        self._num_steps += 1
        times = self._times.setdefault(rows, deque(maxlen=self._KEPT))
        if (usual := self._known.get(rows)) is not None:
            self._level *= min(2.0, max(0.5, seconds / (usual * self._level))) ** 0.05
        times.append(seconds / self._level)
        self._last[rows] = self._num_steps
        if len(times) >= self._ENOUGH:
            self._known[rows] = median(times)

    def may_pay(self, count: int, most_rows: int) -> bool:
        """Whether some number of rows for drafts promises more tokens per second if all are accepted."""
        if (alone := self.seconds(count)) <= 0:
            return False
        added = 1
        while added <= most_rows and added <= _MOST_ADDED:
            if (count + added) * alone > _LEAST_GAIN * count * self.seconds(count + added):
                return True
            added *= 2
        return False

    def seconds(self, rows: int) -> float:
        """Return the time of a step; 0 if no step was measured enough yet."""
        if self._num_steps - self._last.get(rows, self._num_steps) > self._STALE:
            self._last[rows] = self._num_steps
            times = self._times[rows]
            times.popleft()
            if len(times) < self._ENOUGH:
                self._known.pop(rows, None)
            if not times:
                del self._times[rows], self._last[rows]
        if (known := self._known.get(rows)) is not None:
            return self._level * known
        below = max((known for known in self._known if known < rows), default=None)
        if below is None:
            return 0.0
        return self._level * self._known[below] * (1 + self._PER_ROW * (rows - below))


class Speculator:
    """Chooses the drafts that steps verify, and learns from what becomes of them.

    Args:
        method: finds the drafts.
        most: maximum number of tokens in a draft.
        max_model_len: maximum number of tokens of a sequence.
    """

    def __init__(self, method: DraftMethod, most: int, max_model_len: int) -> None:
        self.counters = SpeculationCounters(accepted_per_position=[0] * most)
        self._method = method
        self._most = most
        self._max_model_len = max_model_len
        self._rates: dict[tuple[str, int, int], _Rate] = {}
        self._costs = StepCosts()

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        """Return the drafts to verify in a step that computes a token of each of these sequences.

        Args:
            most_rows: the number of tokens that the step may have in addition.
        """
        costs = self._costs.table(sum(seq.num_tokens for seq in streams))
        if not costs.may_pay(len(streams), most_rows):
            return {}
        rows: list[tuple[float, int]] = []  # (probability, stream) of each drafted token, ascending position
        drafts: list[Draft | None] = []
        for number, seq in enumerate(streams):
            draft = self._draft(seq)
            drafts.append(draft)
            if draft is not None:
                followed = seq.state.followed
                if followed is None or followed.draft is None:
                    followed = self._follow(seq, draft)
                if followed.rate.tried >= _OBSERVED_FIRST:
                    rows += [(chance, number) for chance in self._chances(draft, followed)]
        rows.sort(key=lambda row: -row[0])  # stable, so that tokens of a draft stay in order
        chosen: Drafts = {}
        for number, length in self._best(costs, rows[:most_rows], len(streams)).items():
            seq, draft = streams[number], drafts[number]
            assert draft is not None, "it has a row"
            self._follow(seq, draft)
            chosen[seq.seq_id] = seq, draft.token_ids[:length]
        return chosen

    @staticmethod
    def _best(costs: _CostTable, rows: Seq[tuple[float, int]], count: int) -> dict[int, int]:
        """Return the length of the draft of each of `count` streams that has one, with most tokens per second."""
        alone = costs.seconds(count)
        expected, best, num_best = float(count), _LEAST_GAIN * count / alone, 0
        drafting: set[int] = set()
        for added, (chance, number) in enumerate(rows, start=1):
            expected += chance
            drafting.add(number)
            seconds = costs.seconds(count + added)
            if len(drafting) < count and seconds > _MOST_DELAY * alone:
                continue
            if expected > best * seconds:
                best, num_best = expected / seconds, added
        lengths: dict[int, int] = {}
        for _, number in rows[:num_best]:
            lengths[number] = lengths.get(number, 0) + 1
        return lengths

    @staticmethod
    def _follow(seq: Sequence, draft: Draft) -> Followed:
        """Compare a draft with the tokens to come."""
        followed: Followed = seq.state.followed or Followed()
        followed.draft, followed.place = draft, 0
        seq.state.followed = followed
        return followed

    def _draft(self, seq: Sequence) -> Draft | None:
        """Return what may follow a sequence; None if nothing is known, or nothing may be verified."""
        request = seq.request
        if not seq.output_token_ids or request.params.awaits_tokens or request.pooled is not None:
            return None
        # The last token that it may draw is never computed.
        most = min(self._most, seq.max_num_tokens(self._max_model_len) - seq.num_tokens - 1)
        return self._method.draft(seq, most) if most > 0 else None

    def _chances(self, draft: Draft, followed: Followed) -> Iterable[float]:
        """Return for each token of a draft the probability that it and all before it are accepted, with caution."""
        chance = 1.0
        for position in range(len(draft.token_ids)):
            own, every = followed.rate, self._rate(draft, position)
            prior = (every.accepted + 1) / (every.tried + 2)
            weight = min(_PRIOR, every.tried + 1)
            tried = own.tried + weight
            mean = (own.accepted + weight * prior) / tried
            chance *= max(0.0, mean - sqrt(mean * (1 - mean) / tried))
            yield chance

    def _rate(self, draft: Draft, position: int) -> _Rate:
        return self._rates.setdefault((draft.source, draft.match, position), _Rate())

    def learn(self, drafts: Iterable[tuple[Sequence, int]], updates: Iterable[SequenceUpdate]) -> None:
        """Compare the tokens that came with the drafts of their sequences.

        Args:
            drafts: the sequences that have verified a draft, and its length.
        """
        verified = {seq.seq_id: length for seq, length in drafts}
        for update in updates:
            seq = update.seq
            if (followed := seq.state.followed) is None:
                continue
            if (length := verified.get(seq.seq_id)) is not None:
                num_accepted = len(update.token_ids) - 1
                self._count(length, num_accepted)
                seq.request.num_accepted_tokens += num_accepted
            for token_id in update.token_ids:
                if (draft := followed.draft) is None:
                    break
                accepted = token_id == draft.token_ids[followed.place]
                self._rate(draft, followed.place).count(accepted=accepted)
                followed.rate.count(accepted=accepted, forgetting=_FORGETTING)
                followed.place += 1
                if not accepted or followed.place == len(draft.token_ids):
                    followed.draft = None

    def _count(self, num_drafted: int, num_accepted: int) -> None:
        counters = self.counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafted
        counters.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            counters.accepted_per_position[position] += 1

    def observe(self, num_rows: int, context: int, seconds: float) -> None:
        """Learn from the duration of a step without prompts.

        Args:
            context: the number of tokens of its sequences together.
        """
        self._costs.table(context).observe(num_rows, seconds)
