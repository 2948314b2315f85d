"""Step plans and results: frozen plain values that survive pickling.

A plan names sequences by id. Whoever executes plans (the runner, in this process or another) keeps a state for each
sequence it has been told of, and a plan says only what has changed since the one before:

    scheduler                                      runner
    live sequences, block tables                   by id: table rows, sampling parameters, token counts
      │                                              │
      │  changes     [fork 9 from 7] [drop 3] …      │  1. in this order, as they happened
      │  new         [id, parameters, tables]        │  2. whole: admitted, or resumed after a preemption
      │  tables      [row, first, blocks]            │  3. a row's entries from `first` on: it grew, or was copied
      │  token_ids   | row 0 | row 1 | …             │  4. the tokens to compute, and nothing of what was computed
      ├────────────── StepPlan ─────────────────────>│
      │<───────────── StepResult ────────────────────┤  one token per draw, in the order of the rows
      │
      │  abandon: nothing is known of the runner     │
      ├──────── StepPlan(reset=True) ───────────────>│  forget all; every sequence comes anew when it is scheduled

A fork refers to its parent, whatever the parent's length. A step that failed leaves the runner in an unknown state, so
the next plan says `reset`, and what it schedules is sent whole.

A plan may be made while the one before it is still being computed (`scheduler/ahead.py`): it then says `ahead`, and
that each row computes the token which its sequence draws in that plan.

The order of effects is fixed: blocks to the host, copies, blocks from the host, then the new tokens' keys and values,
then the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.kvcache.block import BlockCopy, BlockId
from octavo.kvcache.host_memory import BlockTransfer
from octavo.request import FinishReason, RequestId, Sequence, SequenceId, TokenLogprobs
from octavo.sampling_params import SamplingParams

DRAWN = -1
"""In place of a token's id, in a plan made ahead: the one that its sequence draws in the plan before."""


@dataclass(frozen=True, slots=True)
class SamplingSnapshot:
    """The inputs of sampling a sequence besides its logits and its tokens.

    Attributes:
        seed: with the number of the output token, all that a draw's randomness comes from.
        eos_token_ids: which `min_tokens` keeps from being drawn.
        bad_word_ids: token sequences that must not be completed by what is drawn.
        num_candidates: of a beam: how many of the most likely tokens are wanted; 0 where a token is drawn.
    """

    request_id: RequestId
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    num_candidates: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class SequenceForked(NamedTuple):
    """`child` has the state of `parent` as it is at this point, and a seed of its own."""

    child: SequenceId
    parent: SequenceId
    seed: int


class SequenceDropped(NamedTuple):
    """A sequence that later plans do not mention, or introduce anew."""

    seq_id: SequenceId


class NewSequence(NamedTuple):
    """A sequence that the runner does not know.

    Attributes:
        tables: one block table per group, an array of its own.
        token_ids: all its tokens so far, int32 in the machine's byte order, where penalties count them or a grammar
            follows them; else empty.
    """

    seq_id: SequenceId
    sampling: SamplingSnapshot
    tables: tuple[Seq[BlockId], ...]
    token_ids: bytes = b""


class TableDelta(NamedTuple):
    """Entries `first ..` of a row's block tables, one run per group, up to their ends."""

    row: int
    first: int
    blocks: tuple[tuple[BlockId, ...], ...]


class PromptScores(NamedTuple):
    """Positions `first .. first + len(targets)` of a row's sequence, whose logits score the prompt token after each.

    Attributes:
        targets: those prompt tokens.
        num_top: how many of the most likely tokens to report beside each.
    """

    row: int
    first: int
    targets: tuple[int, ...]
    num_top: int


class PromptPool(NamedTuple):
    """Positions `first .. first + num_tokens` of a row's sequence, whose hidden states are summed for an embedding."""

    row: int
    first: int
    num_tokens: int


class PlannedRow(NamedTuple):
    """One row of a plan, as `StepPlan.rows` gives it."""

    seq_id: SequenceId
    start: int
    num_tokens: int
    num_draws: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Row i computes tokens `starts[i] .. starts[i] + lengths[i]` of sequence `seq_ids[i]`.

    Of the transfers each list has happened whole, in this order, before anything is computed:

    stores     device -> host      a block that leaves may be written again by all that follows; the runner may still
                                   be storing it while it computes, and is done when the step is
    copies     device -> device    all sources are read before any destination is written
    loads      host -> device      also of what the same plan stores

    Attributes:
        step: the plan's number, rising from 1.
        token_ids: of all rows, one after the other.
        draws: how many tokens are drawn from the logits of the row's last token: 0 while a prompt is unfinished, 1, or
            one for each of a request's parallel samples when its prompt ends.
        sibling_seeds: by row, the seeds of its draws after the first.
        scores: of rows whose prompt's log-probabilities are wanted.
        pools: of rows whose prompt's embedding is wanted.
        reset: forget every sequence before reading on.
        num_streams: at least so many of the first rows compute one token and draw one.
        ahead: made before the result of the plan before was known, and carried out right after that plan. Its
            sequences are among those of that plan; each computes one token, `DRAWN`, and draws one. It moves no blocks.
    """

    step: int = 0
    seq_ids: tuple[SequenceId, ...] = ()
    starts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    sibling_seeds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    scores: tuple[PromptScores, ...] = ()
    pools: tuple[PromptPool, ...] = ()
    reset: bool = False
    changes: tuple[SequenceForked | SequenceDropped, ...] = ()
    new: tuple[NewSequence, ...] = ()
    tables: tuple[TableDelta, ...] = ()
    stores: tuple[BlockTransfer, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockTransfer, ...] = ()
    num_streams: int = 0
    ahead: bool = False

    def __bool__(self) -> bool:
        return bool(self.seq_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_draws(self) -> int:
        return sum(self.draws)

    def rows(self) -> Iterator[PlannedRow]:
        """Row by row, for whoever would rather read than compute."""
        first = 0
        for seq_id, start, length, draws in zip(self.seq_ids, self.starts, self.lengths, self.draws, strict=True):
            yield PlannedRow(seq_id, start, length, draws, self.token_ids[first : first + length])
            first += length


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could come next.

    Attributes:
        logprob: after penalties and biases: what a beam search adds up.
        logprobs: the model's own, only where the request asked for them.
    """

    token_id: int
    logprob: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One drawn token; `logprobs` only where the request asked for them.

    Attributes:
        candidates: where the request searches with beams, the most likely tokens, best first; `token_id` is the first.
        forced: the tokens that must follow it, by the request's grammar.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[Candidate, ...] = ()
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What executing a plan gave.

    Attributes:
        token_ids: one per draw, in the order of the plan's rows.
        logprobs: by the number of the draw, where the request asked for them.
        candidates: by the number of the draw, where the request searches with beams.
        prompt_logprobs: one list for each of `StepPlan.scores`.
        forced: by the number of the draw, the tokens that a grammar lets follow it one way only.
        pooled: for each of `StepPlan.pools` the sum of its hidden states, float64 in the machine's byte order.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pooled: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[SampleResult], prompt_logprobs: Iterable[Iterable[TokenLogprobs]] = ()) -> StepResult:
        """A result of samples one by one, in the order of the draws."""
        samples = list(samples)
        return cls(
            tuple(sample.token_id for sample in samples),
            {i: sample.logprobs for i, sample in enumerate(samples) if sample.logprobs is not None},
            {i: sample.candidates for i, sample in enumerate(samples) if sample.candidates},
            tuple(map(tuple, prompt_logprobs)),
            {i: sample.forced for i, sample in enumerate(samples) if sample.forced},
        )

    def sample(self, draw: int) -> SampleResult:
        return SampleResult(
            self.token_ids[draw], self.logprobs.get(draw), self.candidates.get(draw, ()), self.forced.get(draw, ())
        )

    @property
    def samples(self) -> list[SampleResult]:
        return [self.sample(draw) for draw in range(len(self.token_ids))]


@dataclass(slots=True)
class SequenceUpdate:
    """Tokens that a sequence has just gained: one of a sample, all of a beam search's result.

    Its sequence goes on meanwhile: what is said of its end is as of this step.

    Attributes:
        logprobs: one entry per token where they are known, else none.
        cumulative_logprob: of the sequence up to these tokens, as far as logprobs are known.
        finish_reason: where these tokens are its last.
        text: what they add to its text, where that has been found out already (`engine/stopping.py`).
    """

    seq: Sequence
    token_ids: Seq[int]
    logprobs: Seq[TokenLogprobs] = ()
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None

    def note_end(self) -> None:
        """Take over what its sequence says of its end, if it has ended."""
        self.finish_reason, self.stop_reason = self.seq.finish_reason, self.seq.stop_reason
