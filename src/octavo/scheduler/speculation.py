"""Speculative decoding: decides which drafted tokens a step verifies.

A drafted token takes a row of the step. It is worth one if the step yields more tokens per second with it: rows are
added in the order of their probability, those of all sequences together, and the number is chosen with which

    expected tokens      number of streams + Σ probability that a row's token and all before it are accepted
    ───────────────  =   ─────────────────────────────────────────────────────────────────────────────────
      step time                          T(rows), from `StepTimeModel.decode_seconds`

is largest. **Probabilities** are learnt by source and length of the match, and relative to these by sequence. A draft
is kept until a token refutes it, and its match grows with each token that comes true, verified or not: so observing
costs no row.

A draft model is asked by the same rule, with the time that it takes in T, where it is more likely to be right than what
was found in text. Its tokens then compete for rows with all others. Where it was not worth asking for long, it is asked
for one token at times, for 0.2 % of the time at most, to learn whether it has become so.

Everything here must cost less than it may gain. The search for drafts may spend the time that recent drafts saved, plus
0.2 % of all time; when that is used up, steps pass without a search. Verified drafts may lose 0.1 % of all time; after
greater losses, only drafts that promise 25 % more tokens per second are verified, until the time is won back. Where no
number of rows could pay, nothing is drafted for some steps; a sequence for which no draft is found is looked at less
often, unless its text is predicted. Under load each row adds as much time as a stream does, so that drafts fade by
themselves. No draft lengthens a step by more than 5 % where a stream has none. Prompts' chunks hide nothing, so a step
with one verifies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.request import Request, Sequence, SequenceId
from octavo.scheduler.acceptance_rates import MODEL, MOST_MATCH, Acceptance, Followed
from octavo.scheduler.draft_model import MOST_LACKING, DraftModel
from octavo.scheduler.drafts import Draft, DraftMethod
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.step_time import MOST_DECODES, StepTimeModel

Clock = Callable[[], tuple[float, float]]
Drafts = dict[SequenceId, tuple[Sequence, tuple[int, ...]]]

_LEAST_GAIN = 0.02
"""A draft must promise so much more tokens per second, or as much as step times err if that is more: the number of rows
that seems best is often one whose time is underrated."""

_MOST_DELAY = 1.05
_KEPT = 32  # tokens of a draft, of which a step verifies the next few
_SAMPLED = 4  # one in so many steps without drafts is observed
_NO_DRAFTS: Drafts = {}

_LOOKING = 0.002  # of the time may be spent on looking for drafts that save nothing
_SAVED_UP, _OVERDRAWN = 2.0, 0.1  # steps' time that may be saved up for looking, and by which it may be overdrawn
_RISKED = 0.001  # of the time may be lost by verifying drafts
_MOST_DEBT = 4.0  # steps' time that count as lost at most, so that drafts are soon tried again
_GAIN_IN_DEBT = 0.25  # that a draft must promise after greater losses
_ASSUMED_RATE = 0.9  # of accepted drafts, where it is asked whether any number of rows could pay
_PAUSE = 32  # steps without drafts once they could not

_TEXT_AHEAD = 0.1  # by which a draft model must be more likely right than text, which costs nothing
_PROBING = 0.002  # of the time may go to asking a draft model that is not worth it, as far as is known
_MOST_CAUGHT_UP = 512  # tokens at a time that a draft model computes to catch up with a sequence
_REPAID = 64  # tokens within which a draft model must repay what it took to catch up

_MOST_SKIPPED = 3  # tokens of a sequence between two looks for a draft
_PATIENCE = 4  # looks without a draft before one more token is skipped


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since the start.

    Attributes:
        num_drafts: drafts that were verified.
        num_draft_tokens, num_accepted_tokens: the tokens in them, and those that were accepted.
        accepted_per_position: the accepted tokens by their position in the draft.
        saved_seconds: the time that the steps would have taken for the same tokens without drafts, less what they and
            drafting took.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    saved_seconds: float = 0.0


class _Base(NamedTuple):
    """The work of a step without drafts: one token per stream, and tokens forced by grammars.

    Attributes:
        num_rows: the number of these tokens.
        context: mean number of tokens of the streams.
    """

    num_streams: int
    num_rows: int
    context: float


class Speculator:
    """Chooses the drafts that steps verify, and measures how many of their tokens are accepted.

    Args:
        method: finds drafts in text.
        model: drafts where that is worth its time; None without a draft model.
        most: maximum number of tokens in a draft.
        max_model_len: maximum number of tokens of a sequence.
        clock: returns seconds, and those that this thread has computed.

    Attributes:
        times: how long steps take.
    """

    def __init__(
        self,
        method: DraftMethod,
        most: int,
        max_model_len: int,
        model: DraftModel | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.counters = SpeculationCounters(accepted_per_position=[0] * most)
        self._method = method
        self._model = model
        self._most = most
        self._max_model_len = max_model_len
        self._clock = _clock if clock is None else clock
        self.times = StepTimeModel()
        self.acceptance = Acceptance()
        self._num_steps = 0
        self._paused: dict[int, int] = {}  # by number of streams, the step until which none of them drafts
        self._last: tuple[int, int] | None = None  # drafted and accepted tokens of the last step; None without drafts
        self._enough = 1.0 + _LEAST_GAIN  # times the tokens per second without drafts
        self._for_looking = 0.0  # seconds that may be spent on looking for drafts
        self._balance = 0.0  # seconds that verified drafts may lose
        self._choosing = 0.0  # seconds that choosing the drafts of the last step took
        self._for_probing = 0.0  # seconds for which a draft model may be asked that is not worth it

    def ended(self, request: Request) -> None:
        """Keep a request's outputs for drafts, unless they are beams."""
        if not request.params.use_beam_search:
            for seq in request.sequences:
                self._method.remember(seq)
                if self._model is not None:
                    self._model.forget(seq.seq_id)

    def forget(self) -> None:
        """Forget the outputs of all requests that have ended, and the draft model's cache."""
        self._method.forget()
        if self._model is not None:
            self._model.forget_all()

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        """Return the drafts to verify in a step that computes the missing tokens of each of these sequences.

        Args:
            most_rows: the maximum number of tokens in the step.
        """
        self._num_steps += 1
        self._choosing = 0.0
        num_known = sum([seq.num_missing for seq in streams])
        if not streams or self._for_looking < 0 or self._paused.get(num_known, 0) > self._num_steps:
            return _NO_DRAFTS
        began, used = self._clock()
        drafting: list[tuple[Sequence, Followed]] = []
        for seq in streams:
            followed: Followed | None = seq.state.followed
            if followed is None:
                followed = seq.state.followed = Followed()
            follows = followed.draft is not None and self.acceptance.compare(seq, followed)
            if follows or (followed.look_at <= seq.num_tokens and self._look(seq, followed)):
                drafting.append((seq, followed))
        chosen = _NO_DRAFTS
        if drafting or self._model is not None:
            chosen = self._choose(streams, num_known, drafting, most_rows - num_known)
        ended, used_now = self._clock()
        self._choosing = ended - began
        self._for_looking -= used_now - used  # in which other processes do not count
        self.counters.saved_seconds -= self._choosing
        return chosen

    def _choose(
        self, streams: Seq[Sequence], num_known: int, drafting: list[tuple[Sequence, Followed]], most_rows: int
    ) -> Drafts:
        """Choose drafts of some streams, with up to `most_rows` tokens beyond the `num_known` of all streams."""
        self._enough = 1.0 + max(_LEAST_GAIN if self._balance >= 0 else _GAIN_IN_DEBT, self.times.decode_error)
        base = _Base(len(streams), num_known, sum([seq.num_tokens for seq in streams]) / len(streams))
        if not (alone := self.times.decode_seconds(num_known, base.context)):
            return _NO_DRAFTS
        if not self._may_pay(base, alone, most_rows):
            self._paused[num_known] = self._num_steps + _PAUSE
            return _NO_DRAFTS
        if self._model is not None:
            drafting = self._ask(self._model, streams, drafting, base, alone)
        acceptance = self.acceptance
        rows: list[tuple[float, int]] = []  # (probability, number) of each drafted token, ascending position
        for number, (seq, followed) in enumerate(drafting):
            rows += [(chance, number) for chance in acceptance.chances(followed, min(self._most, self._num_left(seq)))]
        rows.sort(key=lambda row: -row[0])  # stable, so that tokens of a draft stay in order
        chosen: Drafts = {}
        for number, length in self._best(rows[:most_rows], base, alone).items():
            seq, followed = drafting[number]
            assert followed.draft is not None, "it has a row"
            chosen[seq.seq_id] = seq, followed.draft.token_ids[followed.place : followed.place + length]
        return chosen

    def _may_pay(self, base: _Base, alone: float, most_rows: int) -> bool:
        """Whether some number of rows for drafts promises more tokens per second if most are accepted."""
        count, added = base.num_streams, 1
        while added <= min(most_rows, self._most * count) and base.num_rows + added <= MOST_DECODES:
            seconds = self.times.decode_seconds(base.num_rows + added, base.context)
            if (count + _ASSUMED_RATE * added) * alone > self._enough * count * seconds:
                return True
            added *= 2
        return False

    def _best(self, rows: Seq[tuple[float, int]], base: _Base, alone: float) -> dict[int, int]:
        """Return the length of each draft that is verified, with most tokens per second; drafts are numbers.

        Args:
            rows: (probability, draft) of each token that may have a row, the largest first.
            alone: seconds of a step without drafts.
        """
        count = base.num_streams
        expected, best, num_best = float(count), self._enough * count / alone, 0
        drafting: set[int] = set()
        for added, (chance, number) in enumerate(rows[: max(0, MOST_DECODES - base.num_rows)], start=1):
            expected += chance
            drafting.add(number)
            seconds = self.times.decode_seconds(base.num_rows + added, base.context)
            if len(drafting) < count and seconds > _MOST_DELAY * alone:
                continue
            if expected > best * seconds:
                best, num_best = expected / seconds, added
        lengths: dict[int, int] = {}
        for _, number in rows[:num_best]:
            lengths[number] = lengths.get(number, 0) + 1
        return lengths

    def _ask(
        self,
        model: DraftModel,
        streams: Seq[Sequence],
        drafting: list[tuple[Sequence, Followed]],
        base: _Base,
        alone: float,
    ) -> list[tuple[Sequence, Followed]]:
        """Let a draft model draft where that is worth its time; returns the sequences that have drafts."""
        acceptance = self.acceptance
        asked: list[tuple[float, int, Sequence]] = []  # (chance, tokens that the draft's cache lacks, sequence)
        for seq in streams:
            followed: Followed = seq.state.followed
            if not self._may_draft(seq) or self._num_left(seq) < 1:
                continue
            chance = acceptance.chance(MODEL, MOST_MATCH, followed)
            if followed.draft is not None and next(iter(acceptance.chances(followed, 1)), 0.0) > chance - _TEXT_AHEAD:
                continue
            if lacking := model.num_lacking(seq):
                asked.append((chance, lacking, seq))
        del asked[model.max_num_seqs :]
        if not asked:
            return drafting
        length = self._length(model, asked, base, alone)
        if not length:
            self._for_probing += _PROBING * alone
            length, asked = 1, [min(asked, key=lambda each: each[1])]
            seconds = self._asking_seconds(model, asked, 1, base)
            cost = seconds + self.times.decode_seconds(base.num_rows + 1, base.context) - alone
            if cost > self._for_probing or (base.num_streams > 1 and cost > (_MOST_DELAY - 1) * alone):
                return drafting
            self._for_probing = 0.0
        ready = [seq for _, lacking, seq in asked if lacking <= MOST_LACKING]
        if behind := next(((lacking, seq) for _, lacking, seq in asked if lacking > MOST_LACKING), None):
            count, most = MOST_LACKING // 4, _MOST_CAUGHT_UP
            allowed = alone if base.num_streams == 1 else (_MOST_DELAY - 1) * alone
            while count < most and model.seconds(2 * count, 1, 1, base.context) <= allowed:
                count *= 2
            model.catch_up(behind[1], min(count, behind[0] - 1))
        if ready:
            drafts = model.draft(ready, length)
            for seq, token_ids in zip(ready, drafts, strict=True):
                if token_ids:
                    seq.state.followed.begin(Draft(token_ids, MODEL, MOST_MATCH), seq.num_tokens)
        return [(seq, seq.state.followed) for seq in streams if seq.state.followed.draft is not None]

    def _length(self, model: DraftModel, asked: Seq[tuple[float, int, Sequence]], base: _Base, alone: float) -> int:
        """Return the draft length at which a step yields the most tokens per second; 0 if none pays."""
        count = base.num_streams
        expected, best, best_length = float(count), self._enough * count / alone, 0
        for length in range(1, self._most + 1):
            rows = base.num_rows + length * len(asked)
            if rows > MOST_DECODES:
                break
            expected += sum([chance**length for chance, _, _ in asked])
            seconds = self.times.decode_seconds(rows, base.context) + self._asking_seconds(model, asked, length, base)
            if len(asked) < count and seconds > _MOST_DELAY * alone:
                break
            if expected > best * seconds:
                best, best_length = expected / seconds, length
        return best_length

    def _asking_seconds(
        self, model: DraftModel, asked: Seq[tuple[float, int, Sequence]], length: int, base: _Base
    ) -> float:
        """Predict the time of a model's draft, with its share of catching up with long texts."""
        behind = sum([lacking for _, lacking, _ in asked if lacking > MOST_LACKING])
        lacking = sum([min(lacking, MOST_LACKING) for _, lacking, _ in asked]) if not behind else len(asked)
        seconds = model.seconds(lacking, len(asked), length, base.context)
        return seconds + model.seconds(behind, 1, 1, base.context) / _REPAID if behind else seconds

    @staticmethod
    def _may_draft(seq: Sequence) -> bool:
        request = seq.request
        return bool(seq.output_token_ids) and not request.params.use_beam_search and request.pooled is None

    def _look(self, seq: Sequence, followed: Followed) -> bool:
        """Look for a draft for a sequence; returns whether there is one."""
        if not self._may_draft(seq):
            return False
        if (draft := self._method.draft(seq, _KEPT)) is None:
            followed.misses += 1
            # A prediction resumes at once after text that it did not have, such as a value in JSON.
            skipped = 0 if seq.request.predicted_ids else min(_MOST_SKIPPED, followed.misses // _PATIENCE)
            followed.look_at = seq.num_tokens + 1 + skipped
            return False
        followed.misses = 0
        followed.begin(draft, seq.num_tokens)
        return True

    def _num_left(self, seq: Sequence) -> int:
        """Return how many tokens may be drafted: the last that may be drawn is never computed."""
        return seq.max_num_tokens(self._max_model_len) - seq.num_tokens - 1

    def learn(self, verified: Mapping[SequenceId, tuple[int, ...]], updates: Iterable[SequenceUpdate]) -> None:
        """Count the drafts that a step has verified, by sequence."""
        self._last = None
        if not verified:
            return
        counters, gained = self.counters, 0
        for update in updates:
            if (draft := verified.get(update.seq.seq_id)) is None:
                continue
            # The last token, or those that a grammar forces after it, were not drafted.
            num_accepted = 0
            for token_id, wanted in zip(update.token_ids[:-1], draft, strict=False):
                if token_id != wanted:
                    break
                num_accepted += 1
            gained += num_accepted
            update.seq.request.num_accepted_tokens += num_accepted
            counters.num_drafts += 1
            counters.num_draft_tokens += len(draft)
            for position in range(num_accepted):
                counters.accepted_per_position[position] += 1
        counters.num_accepted_tokens += gained
        self._last = sum(map(len, verified.values())), gained

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the duration of a step of decodes, which `learn` has seen."""
        seconds -= self._choosing  # which is counted already, and says nothing about rows
        self._for_looking += _LOOKING * seconds
        self._balance += _RISKED * seconds
        count, context = plan.num_rows, sum(plan.starts) / plan.num_rows + 1
        if self._last is not None:
            num_drafted, gained = self._last
            if alone := self.times.decode_seconds(plan.num_tokens - num_drafted, context):
                saved = (1 + gained / count) * alone - seconds
                self.counters.saved_seconds += saved
                self._for_looking += max(0.0, saved)
                self._balance += saved
        self._for_looking = min(_SAVED_UP * seconds, max(-_OVERDRAWN * seconds, self._for_looking))
        self._balance = min(_SAVED_UP * seconds, max(-_MOST_DEBT * seconds, self._balance))
        if self._last is not None or not self._num_steps % _SAMPLED:
            self.times.observe_decodes(plan.num_tokens, context, seconds)
