"""Outputs for callers, with the field names of vLLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from octavo.errors import OctavoError
from octavo.logprobs import TokenLogprobs
from octavo.request import CacheReport, FinishReason, PinReceipt, Request, RequestId, TokenIdSeq
from octavo.scheduler.plan import SequenceUpdate

UNUSABLE_LOGITS = "unusable_logits"
STEP_FAILED = "step_failed"
RANK_LOST = "rank_lost"
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"


class OutputKind(Enum):
    """Which outputs each `RequestOutput` of a request contains."""

    DELTA = "delta"  # what is new since the previous output
    FINAL = "final"  # a single output, at the end


@dataclass(slots=True)
class CompletionOutput:
    """One completion, or the new part of it.

    Attributes:
        index: which of the request's `n` completions.
        token_ids: generated ids; a stop or end-of-sequence token is included, as in vLLM.
        text: text without the stop string, and with complete characters only.
        cumulative_logprob: sum over all tokens so far, if logprobs were requested or completions were chosen by it:
            `best_of`, and beam search (there after penalties and biases).
        logprobs: one entry per token of `token_ids`, if requested.
        finish_reason: None until it ends.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request was first computed, and got its first token, by `time.monotonic`."""

    admitted: float
    first_token: float


@dataclass(slots=True)
class RequestOutput:
    """One request's completions, or the new parts of them.

    Attributes:
        prompt: the prompt's text; None if it was given as token ids.
        prompt_ids: the prompt's token ids, shared with the engine: read-only.
        prompt_logprobs: None for the first prompt token, then one entry per token; only if requested.
        outputs: all `n` completions (FINAL), or those with something new (DELTA).
        num_cached_tokens: number of prompt tokens that came from the prefix cache.
        cached_by_tier: the same number by tier: "device", "host", "disk", "neighbour", "remote".
        finished: whether this is the last output.
        cache_report: why no more of the prompt came from the cache, as far as its tenant may know; set when finished.
        error: code of the failure if the request failed: `UNUSABLE_LOGITS`, `STEP_FAILED`, `RANK_LOST` or
            `GRAMMAR_TOO_COMPLEX`.
        error_reason: explanation of the failure that the client may see.
        pins: results for the prefixes to be pinned; set when finished.
        embedding: embedding of the prompt, if requested; set when finished.
        times: set when finished, if it got a token.
        num_accepted_tokens: drafted tokens of all its completions so far that were accepted.
    """

    request_id: RequestId
    prompt: str | None
    prompt_ids: TokenIdSeq
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
    times: RequestTimes | None = None
    num_accepted_tokens: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids as a list, built on each access because few callers need it."""
        return list(self.prompt_ids)


class Stream(asyncio.Queue["RequestOutput | OctavoError"]):
    """The queue of one request's outputs for its caller.

    Attributes:
        unread: unread tokens and alternatives in the queue.
    """

    unread = 0

    def hand_over(self, output: RequestOutput) -> None:
        self.unread += _num_objects(output)
        self.put_nowait(output)

    async def next(self) -> RequestOutput:
        """Return the next output; raises if an error was queued instead."""
        output = await self.get()
        if isinstance(output, OctavoError):
            raise output
        self.unread -= _num_objects(output)
        return output


def _num_objects(output: RequestOutput) -> int:
    count = 0
    for completion in output.outputs:
        count += 1 + len(completion.token_ids)
        if completion.logprobs:
            count += sum(len(entry.top) for entry in completion.logprobs)
    return count


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's embedding: a unit vector of `hidden_size` numbers."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for a prompt.

    Attributes:
        num_cached_tokens: number of prompt tokens that came from the prefix cache; 0 if the states of all tokens are
            pooled.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended between two steps: aborted by its client, or failed with the code `error`."""

    request: Request
    error: str | None = None
    error_reason: str | None = None


@dataclass(slots=True)
class StepNews:
    """The results of a step, from which outputs are made (`engine/processor.py`).

    Attributes:
        updates: tokens that sequences have gained.
        ended: requests that ended without new tokens.
    """

    updates: list[SequenceUpdate] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.updates or self.ended)

    def take(self, most: int) -> StepNews:
        """Remove and return the first results, in order: of at most `most` sequences, or of one request."""
        updates, self.updates = self.updates[:most], self.updates[most:]
        left, count = most - len(updates), 0
        for ended in self.ended:
            left -= len(ended.request.sequences)
            if left < 0 and (updates or count):
                break
            count += 1
        ended_first, self.ended = self.ended[:count], self.ended[count:]
        return StepNews(updates, ended_first)

    def let_go(self, outputs: Iterable[RequestOutput]) -> None:
        """Break the reference cycles between the requests that have ended with these outputs and their sequences.

        Otherwise only a full garbage collection would free them, and a busy server defers it.
        """
        finished = {output.request_id for output in outputs if output.finished and output.error is None}
        requests = [update.seq.request for update in self.updates if update.seq.request.request_id in finished]
        for request in (*requests, *(ended.request for ended in self.ended)):
            request.sequences.clear()
