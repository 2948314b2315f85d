"""What one step computes: data, decided by the scheduler, carried out by the runner.

The order of effects is fixed: blocks to the host, copies, blocks from the host, then the new tokens' keys and values,
then the samples.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.kvcache.block import BlockCopy, BlockId
from octavo.kvcache.host_pool import BlockSwap
from octavo.request import Sequence, TokenLogprobs


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: tokens `start .. start + num_tokens` of `seq.token_ids`.

    Attributes:
        fresh: the first step since admission: what is remembered of its tables from an earlier step is void.
        block_tables: one list of block ids per group, as they are after allocation. Views: read, never written.
        samples: the sequences that draw a next token from the last computed token's logits: none while a prompt
            is unfinished, the sequence itself, or all of a request's parallel samples when its prompt ends.
        prompt_logprobs: (first, last + 1) positions of the chunk whose logits score the prompt token after them.
    """

    seq: Sequence
    start: int
    num_tokens: int
    block_tables: list[list[BlockId]]
    fresh: bool = False
    samples: tuple[Sequence, ...] = ()
    prompt_logprobs: tuple[int, int] | None = None


@dataclass(slots=True)
class StepPlan:
    """One step. To all that follows, each list has happened whole, in this order, before anything is computed:

    swap_out   device -> host      a block that leaves may be written again by all that follows; the runner may still
                                   be storing it while it computes, and is done when the step is
    copies     device -> device    all sources are read before any destination is written
    swap_in    host -> device
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    swap_out: Seq[BlockSwap] = ()
    copies: list[BlockCopy] = field(default_factory=list)
    swap_in: Seq[BlockSwap] = ()
    num_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.scheduled)


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


@dataclass(slots=True)
class SampleResult:
    """One drawn token; `logprobs` only where the request asked for them.

    Attributes:
        candidates: where the request searches with beams, the most likely tokens, best first; `token_id` is the first.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(slots=True)
class SequenceUpdate:
    """Tokens that a sequence has just gained: one of a sample, all of a beam search's result.

    Attributes:
        logprobs: one entry per token where they are known, else none.
    """

    seq: Sequence
    token_ids: Seq[int]
    logprobs: Seq[TokenLogprobs]


@dataclass(slots=True)
class StepResult:
    """What the runner gives back: for each scheduled sequence, in the plan's order.

    Attributes:
        samples: one result per entry of `ScheduledSequence.samples`.
        prompt_logprobs: one entry per position of `ScheduledSequence.prompt_logprobs`, keyed by the index in the plan.
    """

    samples: list[list[SampleResult]]
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
