"""Outputs for callers, with the field names of vLLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from octavo.request import CacheReport, FinishReason, PinReceipt, Request, RequestId, TokenIds, TokenLogprobs
from octavo.scheduler.plan import SequenceUpdate

UNUSABLE_LOGITS = "unusable_logits"
STEP_FAILED = "step_failed"
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"


class OutputKind(Enum):
    """What each `RequestOutput` of a request holds."""

    DELTA = "delta"  # only what is new since the one before
    FINAL = "final"  # one output, when all is done


@dataclass(slots=True)
class CompletionOutput:
    """One completion, or what is new of it.

    Attributes:
        index: which of the request's `n` completions.
        token_ids: generated ids; a stop or end-of-sequence token is included, as in vLLM.
        text: without the stop string, never half a character.
        cumulative_logprob: sum over all chosen tokens so far, where logprobs were asked for, and where completions were
            chosen by it: `best_of`, beam search (there after penalties and biases).
        logprobs: one entry per token of `token_ids`, where asked for.
        finish_reason: None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request's completions, or what is new of them.

    Attributes:
        prompt: the text, where the prompt came as text.
        prompt_ids: its token ids, as the engine has them; to read, not to change.
        prompt_logprobs: None for the first prompt token, then one entry per token; only where asked for.
        outputs: all `n` completions (FINAL), or those that have something new (DELTA).
        num_cached_tokens: prompt tokens that came from the prefix cache.
        cached_by_tier: the same by where they were: "device", "host", "disk", "remote".
        finished: nothing follows.
        cache_report: why no more of the prompt came from the cache, as its tenant may know; once finished.
        error: where a request failed, the code of why: `UNUSABLE_LOGITS`, `STEP_FAILED` or `GRAMMAR_TOO_COMPLEX`.
        error_reason: what its client may be told of that beside the code.
        pins: what became of the prefixes that were to be pinned; once finished.
        embedding: of the prompt, where it was asked for; once finished.
    """

    request_id: RequestId
    prompt: str | None
    prompt_ids: TokenIds
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cache_report: CacheReport | None = None
    pins: list[PinReceipt] = field(default_factory=list)
    error: str | None = None
    error_reason: str | None = None
    embedding: list[float] | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids as a list, made anew each time: few callers look at them."""
        return list(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's embedding: `hidden_size` numbers, of length 1 together."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for a prompt.

    Attributes:
        num_cached_tokens: prompt tokens that came from the prefix cache: none where all tokens' states are pooled.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was ended between two steps: given up by its client, or failed with the code `error`."""

    request: Request
    error: str | None = None
    error_reason: str | None = None


@dataclass(slots=True)
class StepNews:
    """What a step has brought, before outputs are made of it (`engine/processor.py`).

    Attributes:
        updates: tokens that sequences have gained.
        ended: requests whose last tokens were in the news before.
    """

    updates: list[SequenceUpdate] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.updates or self.ended)

    def take(self, most: int) -> StepNews:
        """Remove and return the first of them, in their order: news of at most `most` sequences, or of one request."""
        updates, self.updates = self.updates[:most], self.updates[most:]
        left, count = most - len(updates), 0
        for ended in self.ended:
            left -= len(ended.request.sequences)
            if left < 0 and (updates or count):
                break
            count += 1
        ended_first, self.ended = self.ended[:count], self.ended[count:]
        return StepNews(updates, ended_first)
