"""Step plans and results: immutable plain values that can be pickled.

A plan names sequences by id. The runner, in this process or another, keeps a state for each sequence that it has been
sent, and a plan contains only what has changed since the previous one:

    scheduler                                      runner
    live sequences, block tables                   by id: table rows, sampling parameters, token counts
      │                                              │
      │  changes     [fork 9 from 7] [drop 3] …      │  1. in this order, as they happened
      │  new         [id, parameters]                │  2. admitted, or resumed after a preemption
      │  tables      [row, first, blocks]            │  3. a row's entries from `first` on: it is new, or has changed
      │  token_ids   | row 0 | row 1 | …             │  4. only the tokens to compute
      ├────────────── StepPlan ─────────────────────>│
      │<───────────── StepResult ────────────────────┤  one token per draw, in the order of the rows
      │
      │  abandon: the runner's state is unknown      │
      ├──────── StepPlan(reset=True) ───────────────>│  forget all; each sequence is sent again when scheduled

A fork refers to its parent, so its size does not depend on the parent's length. A failed step leaves the runner in an
unknown state, so the next plan has `reset` set, and the sequences it schedules are sent in full.

A plan may be made while the previous one is still being computed. It then has `ahead` set, and where a row computes the
token that its sequence draws in the previous plan, that token is `DRAWN`.

The order of effects is fixed: blocks to the host, copies, blocks from the host, then the new tokens' keys and values,
then the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.kvcache.attended import Masses
from octavo.kvcache.block import BlockCopy, BlockId, BlockTransfer
from octavo.logprobs import TokenLogprobs
from octavo.request import FinishReason, RequestId, Sequence, SequenceId
from octavo.sampling_params import SamplingParams

DRAWN = -1
"""Stands in a plan made ahead for the id of the token that the sequence draws in the previous plan."""

MOST_FORCED = 32
"""The maximum number of tokens that a grammar forces after one drawn token. If it forces more, they follow later."""


@dataclass(frozen=True, slots=True)
class SamplingSnapshot:
    """The inputs of sampling a sequence, apart from its logits and its tokens.

    Attributes:
        seed: together with the index of the output token, the only source of a draw's randomness.
        eos_token_ids: end-of-sequence tokens, which `min_tokens` keeps from being drawn.
        bad_word_ids: token sequences that a drawn token must not complete.
        num_candidates: for a beam, the number of most likely tokens to return; 0 if a token is drawn.
    """

    request_id: RequestId
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    num_candidates: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class SequenceForked(NamedTuple):
    """`child` gets a copy of the state of `parent` at this point, with its own seed."""

    child: SequenceId
    parent: SequenceId
    seed: int


class SequenceDropped(NamedTuple):
    """A sequence to forget: later plans do not mention it, or introduce it again as new."""

    seq_id: SequenceId


class NewSequence(NamedTuple):
    """A sequence that the runner does not know; the same plan has its tables.

    Attributes:
        token_ids: all its tokens so far, int32 in native byte order, if penalties count them or a grammar follows
            them; else empty.
    """

    seq_id: SequenceId
    sampling: SamplingSnapshot
    token_ids: bytes = b""


class TableDelta(NamedTuple):
    """The entries of a row's block tables from `first` to the end, for each group.

    Attributes:
        num_let_go: for each group, the blocks that attention has decided against, which are left out; () if there are
            none. Blocks go from tables that are sent whole only, so `first` is 0 then.
    """

    row: int
    first: int
    blocks: tuple[tuple[BlockId, ...], ...]
    num_let_go: tuple[int, ...] = ()


class PromptScores(NamedTuple):
    """Positions `first .. first + len(targets)` of a row's sequence, whose logits score the prompt token after each.

    Attributes:
        targets: the scored prompt tokens.
        num_top: number of most likely tokens to report with each.
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


_NO_SEEDS: Mapping[int, tuple[int, ...]] = {}


class StepPlan(NamedTuple):
    """The plan of one step. Row i computes tokens `starts[i] .. starts[i] + lengths[i]` of sequence `seq_ids[i]`.

    A named tuple, because it is made in every step: a frozen dataclass takes ten times as long.

    The lists of transfers take effect one after the other, in this order, before anything is computed:

    stores     device -> host      what follows may overwrite a stored block; the runner may overlap the transfer with
                                   the computation, but completes it within the step
    copies     device -> device    all sources are read before any destination is written
    loads      host -> device      including blocks that the same plan stores

    Attributes:
        step: the plan's number, counted from 1.
        token_ids: the tokens of all rows, concatenated.
        draws: by row, the number of tokens that it draws: one after each of its last positions, and one after the very
            last for each of `sibling_seeds`. 0 while a prompt is unfinished. A row that draws at several positions
            verifies a draft: its tokens after the first of these are unverified.
        sibling_seeds: by row, the seeds of draws for the request's other parallel samples, when their prompt ends.
        scores: positions to score, of rows whose prompt's log-probabilities are wanted.
        pools: positions to sum, of rows whose prompt's embedding is wanted.
        reset: whether to forget every sequence before applying the rest of the plan.
        num_streams: at least this many of the first rows compute one token and draw one.
        num_decodes: this many of the first rows, the streams among them, continue outputs, by tokens that a grammar
            forced or that are unverified too. Each of their tokens is computed by itself, as in a decode, so that it is
            rounded as it would be if it was drawn. The other rows are chunks of prompts.
        ahead: whether the plan was made before the result of the previous plan was known; it is executed right after
            that one. It moves no blocks.
    """

    step: int = 0
    seq_ids: tuple[SequenceId, ...] = ()
    starts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    draws: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    sibling_seeds: Mapping[int, tuple[int, ...]] = _NO_SEEDS
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
    num_decodes: int = 0
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

    @property
    def is_decodes(self) -> bool:
        """Whether it has no chunk of a prompt."""
        return max(self.num_streams, self.num_decodes) == len(self.seq_ids)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for the next token of a beam.

    Attributes:
        logprob: log-probability after penalties and biases, which beam search adds up.
        logprobs: the model's own log-probabilities, if the request asked for them.
    """

    token_id: int
    logprob: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of executing a plan.

    Attributes:
        token_ids: one per draw, in the order of the plan's rows.
        logprobs: by index of the draw, if the request asked for them.
        candidates: by index of the draw, if the request uses beam search: the most likely tokens, best first; its
            token is the first.
        prompt_logprobs: one tuple for each of `StepPlan.scores`.
        forced: by index of the draw, the tokens that must follow it according to the request's grammar.
        pooled: for each of `StepPlan.pools`, the sum of its hidden states, float64 in native byte order.
        mass: by row whose attention is measured, the mass of its blocks: in all of its tokens, or each of them if it
            continues an output.
        load_seconds, store_seconds: how long the plan's loads and stores took. Of loads on a GPU, only until they were
            queued.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pooled: tuple[bytes, ...] = ()
    mass: Mapping[int, tuple[Masses, ...]] = field(default_factory=dict)
    load_seconds: float = 0.0
    store_seconds: float = 0.0


@dataclass(slots=True)
class SequenceUpdate:
    """Tokens that a sequence has just gained: those of a sample, or the entire output of a beam search.

    The sequence may have advanced since; the fields describe the end of this step.

    Attributes:
        logprobs: one entry per token if they are known, else empty.
        cumulative_logprob: sum of the known log-probabilities of the sequence up to these tokens.
        earlier_logprob: the same sum before these tokens.
        finish_reason: None unless these tokens are its last.
        text: the text that the tokens add, if already detokenized (`engine/processor.py`).
    """

    seq: Sequence
    token_ids: Seq[int]
    logprobs: Seq[TokenLogprobs] = ()
    cumulative_logprob: float = 0.0
    earlier_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None

    def cut(self, count: int) -> None:
        """Take all tokens but the first `count` back from the sequence, because it ends before them."""
        if count == len(self.token_ids):
            return
        request, num_cut = self.seq.request, len(self.token_ids) - count
        # All of an update's tokens but the last were drafted, if any was.
        request.num_accepted_tokens = max(0, request.num_accepted_tokens - num_cut + 1)
        del self.seq.output_token_ids[-num_cut:]
        self.token_ids, self.logprobs = self.token_ids[:count], self.logprobs[:count]
        if self.logprobs:
            self.cumulative_logprob = self.earlier_logprob
            for known in self.logprobs:
                self.cumulative_logprob += known.logprob
            self.seq.cumulative_logprob = self.cumulative_logprob
        self.finish_reason = self.stop_reason = None

    def note_end(self) -> None:
        """Copy the finish and stop reasons of the sequence, if it has ended."""
        self.finish_reason, self.stop_reason = self.seq.finish_reason, self.seq.stop_reason
