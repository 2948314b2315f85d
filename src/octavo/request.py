"""Requests and their sequences: pure state, changed only by the scheduler."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from hashlib import blake2b
from typing import Any, NewType

from octavo.logprobs import TokenLogprobs
from octavo.pooling import PooledStates, Pooling
from octavo.sampling_params import SamplingParams
from octavo.sequence_state import SequenceState

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)

TokenIdSeq = Seq[int]
"""A prompt. `engine/input_processor.py` makes it an `array("i")`, which takes 4 MB for a million tokens, without an
object per token: garbage collection has nothing to inspect, and it is freed at once."""

_sequence_ids = itertools.count(1)


class FinishReason(StrEnum):
    """The reason a sequence ended; "stop" and "length" are OpenAI's.

    ABORT: its caller aborted it. ERROR: the model gave no usable logits for it, or computing or reporting it failed.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(Enum):
    WAITING = "waiting"  # in the queue, without blocks
    RUNNING = "running"  # holds blocks, and is computed until its num_computed reaches its num_tokens
    FORK_PENDING = "fork_pending"  # a parallel sample or beam whose prompt is still being computed by its first sibling
    PARKED = "parked"  # a beam without blocks or work: it waits for its siblings, or is vacant
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A request to keep the first `num_tokens` of the prompt cached for `ttl_seconds`, once they are computed."""

    num_tokens: int
    ttl_seconds: float


@dataclass(eq=False, slots=True, kw_only=True)
class RequestTerms:
    """A request's attributes apart from its prompt and sampling parameters, unchanged from arrival to end.

    Attributes:
        priority: lower is served first, as in vLLM; ties by arrival.
        cache_salt: restricts the sharing of cached blocks, within its tenant or group, to requests with the same salt.
        tenant: the tenant that the request is accounted to; empty if no API key is required.
        cache_group: group of tenants that share cached blocks; None if its tenant shares them with no other.
        weight: share of service of its tenant relative to others.
        traceparent: the trace that the request is part of (W3C Trace Context), for its spans.
        pins: prefixes of the prompt to pin once they are computed.
        predicted_ids: tokens that the output may contain (OpenAI's `prediction`, or an outline with `GAP` for unknown
            ones), from which drafts are made.
        kv_hint: address of a neighbour (`--kv-neighbours`) that has more of the prompt cached, as a router knows.
    """

    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    cache_group: str | None = None
    weight: float = 1.0
    traceparent: str | None = None
    pins: tuple[PinRequest, ...] = ()
    predicted_ids: tuple[int, ...] = ()
    kv_hint: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestContext(RequestTerms):
    """The context in which a request is made.

    Attributes:
        request_id: the request's id; None to let the engine assign one.
        max_waiting_requests, max_waiting_tokens: limits of its tenant's requests that wait for their first step, and of
            their prompt tokens; None for its share of the whole queue.
        pooling: how to pool the prompt into an embedding, without generating; None to generate.
    """

    request_id: str | None = None
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    pooling: Pooling | None = None


DEFAULT_CONTEXT = RequestContext()

GAP = -1
"""Stands for any tokens in a prediction of an output."""


@dataclass(frozen=True, slots=True)
class PinReceipt:
    """The result of a `PinRequest`. Only full blocks can be pinned, and only within the budget.

    Attributes:
        pin_id: id of the pin that was made or renewed; None if nothing could be pinned.
        num_requested_tokens: length of the prefix that was to be pinned.
        num_pinned_tokens: length of the prefix that is pinned now.
        ttl_seconds: the requested time to live.
    """

    pin_id: str | None
    num_requested_tokens: int
    num_pinned_tokens: int
    ttl_seconds: float


class CacheOutcome(StrEnum):
    """Why tokens of a prompt did not come from the prefix cache."""

    COMPLETE = "complete"  # all that can come from a cache did: the full blocks before the last token
    TOO_SHORT = "too_short"  # the prompt has no full block before its last token
    COLD = "cold"  # these tokens were never computed before, as far as is remembered
    DIVERGED = "diverged"  # another sequence begins in the same way, but continues differently
    EVICTED = "evicted"  # they were cached, but have been evicted
    SALT = "salt"  # they are cached, but for another tenant or with another salt
    BYPASSED = "bypassed"  # caching is off, or the request needs every prompt token's logits


def cache_scope(tenant: str, cache_group: str | None, cache_salt: str) -> str:
    """Return the name of the part of the prefix cache that a request may see; blocks are only shared within a scope.

    Each tenant has its own scope, and the tenants of one `cache_group` share one. A salt can only narrow a scope: the
    parts are length-prefixed and hashed, so that no salt chosen by a client yields the scope of another tenant or
    group. Without tenant, group and salt (offline, or on a server without keys) the scope is empty.
    """
    kind, name = ("tenant", tenant) if cache_group is None else ("group", cache_group)
    if not name and not cache_salt:
        return ""
    digest = blake2b(digest_size=16, person=b"octavo-scope")
    for part in (kind if name else "", name, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The effect of the prefix cache on a prompt at its first admission, for the server's operator.

    Attributes:
        outcome: why the tokens after the cached ones were not cached.
        diverged_at: index of the first prompt token that differs, if the outcome is DIVERGED.
        diverged_from: the request that computed the different continuation.
        evicted_seconds_ago: time between the eviction and the admission, if the outcome is EVICTED.
        owner: tenant of the sequence, block or eviction that the outcome refers to; None if it refers to none.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    outcome: CacheOutcome
    diverged_at: int | None = None
    diverged_from: RequestId | None = None
    evicted_seconds_ago: float | None = None
    owner: str | None = None

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens

    def visible_to(self, tenant: str) -> CacheReport:
        """Return the report for the client: what would reveal another tenant's or salt's cache is reported as cold."""
        if self.outcome is CacheOutcome.SALT or self.owner not in (None, tenant):
            return CacheReport(self.num_prompt_tokens, self.num_cached_tokens, CacheOutcome.COLD)
        return self


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of tokens: the unit that is scheduled, holds block tables and is preempted.

    There is one scheduling rule: `num_computed` (tokens whose keys and values are in blocks) chases `num_tokens`.

    Its tokens are the request's prompt, which all sequences of the request share, and its own output:

        prompt (request.prompt_token_ids)   output_token_ids
        0 ……………………………… num_prompt_tokens   …… num_tokens

    Attributes:
        output_token_ids: the output so far.
        cumulative_logprob: sum of the output tokens' logprobs, as far as they are known; a beam's running score.
        last_token_time: when it got its last token, as `Request.arrival_time`; None before its first.
        state: what the scheduler keeps of it between steps.
    """

    request: Request
    index: int
    seed: int
    num_prompt_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    seq_id: SequenceId = field(default_factory=lambda: SequenceId(next(_sequence_ids)))
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_preemptions: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None
    state: SequenceState = field(default_factory=SequenceState)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_missing(self) -> int:
        """The number of tokens to compute, some of which may turn out to be cached at admission."""
        return self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed

    @property
    def num_pending_siblings(self) -> int:
        """The number of parallel samples or beams that wait for this sequence to compute their prompt."""
        siblings = self.request.sequences
        if self.index or len(siblings) == 1:
            return 0
        return sum(sibling.status is SequenceStatus.FORK_PENDING for sibling in siblings)

    @property
    def has_evicted(self) -> bool:
        """Whether it has let go of tokens under its budget."""
        budget = self.request.params.kv_budget
        return (
            budget is not None
            and budget.evicts
            and (self.num_computed >= budget.first_eviction(self.num_prompt_tokens))
        )

    @property
    def measured_from(self) -> int | None:
        """The first position whose attention is measured, because a budget decides by it; None if none is."""
        params = self.request.params
        if params.kv_budget is None:
            return None
        return params.kv_budget.measured_from(self.num_prompt_tokens, params.max_tokens or 1)

    def tokens_until_eviction(self, start: int, block_size: int) -> int:
        """Return how many tokens from position `start` on a step may compute (`KVBudget.tokens_until_eviction`)."""
        if (budget := self.request.params.kv_budget) is None:
            return sys.maxsize
        return budget.tokens_until_eviction(start, self.num_prompt_tokens, block_size)

    def max_num_tokens(self, max_model_len: int) -> int:
        """Return the maximum number of tokens: the least of what its request and the model allow."""
        return min(self.num_prompt_tokens + (self.request.params.max_tokens or 1), max_model_len)

    @property
    def token_ids(self) -> Seq[int]:
        """A copy of all tokens, in O(n); the step loop uses `tokens(start, end)` instead."""
        return [*self.request.prompt_token_ids, *self.output_token_ids]

    def tokens(self, start: int, end: int) -> Seq[int]:
        """Return tokens `start` to `end` (exclusive), in O(end - start)."""
        split = self.num_prompt_tokens
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        head = self.request.prompt_token_ids[start:end]
        return head if end <= split else [*head, *self.output_token_ids[: end - split]]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def become_child_of(self, parent: Sequence) -> None:
        """Take over the parent's output, with a new id and a fresh state: nothing known of it before holds any more."""
        self.seq_id = SequenceId(next(_sequence_ids))
        self.state = SequenceState()
        self.last_token_time = None
        self.output_token_ids = parent.output_token_ids.copy()
        self.cumulative_logprob = parent.cumulative_logprob
        self.num_computed = parent.num_computed
        # If the parent was preempted, this sequence must not count as new either.
        self.num_preemptions = max(self.num_preemptions, parent.num_preemptions)

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of service: higher priority (lower number) first, then earlier arrival, then the smaller id.

        If priorities age, the request's `due_time` decides instead.
        """
        request = self.request
        if request.due_time is None:
            return (request.priority, request.arrival_time, self.seq_id)
        return (0, request.due_time, self.seq_id)


def sibling_seed(seed: int, index: int) -> int:
    """Return the seed of a request's sequence `index`: its own for the first, so that `n` of 1 is the first of several.

    The others are hashed, because `seed + index` would be the first sequence of the request with the next seed.
    """
    if index == 0:
        return seed & (2**64 - 1)
    digest = blake2b(f"{seed} {index}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


@dataclass(eq=False, slots=True)
class Request(RequestTerms):
    """One prompt and its parameters, in which `params.max_tokens` has been set.

    Attributes:
        prompt_token_ids: the prompt, shared by all sequences and never changed.
        full_blocks: the prompt packed and hashed, which `Holdings.hash_prompt` stores for its own use.
        due_time: position in the order of service if priorities age, set by the scheduler; otherwise None.
        cache_scope: derived from tenant, group and salt; cached blocks are only shared within one scope.
        grammar: the compiled structured output, kept as long as the request; None before it is compiled.
        search: the scheduler's beam search; None if its sequences are sampled.
        stop_readers: detokenizers of its sequences, which find stop strings as tokens are drawn; None if it has none.
        seed: seed of the first sequence; those of the others are derived from it (`sibling_seed`).
        bad_word_ids: the token sequences that spell `params.bad_words`.
        quoted_ids: beginnings of strings that the output may quote from the prompt, each followed by `GAP`, from which
            drafts are made.
        pin_receipts: results of the pins.
        was_admitted: whether it was ever admitted, as far as the scheduler has reported.
        uncomputed_charge: prompt tokens that were charged to its tenant, but are not computed yet.
        admitted_time, first_token_time: as `arrival_time`, of its first step and of its first token; None before.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission; None before it.
        cached_by_tier: these tokens by the tier where they were found: "device", "host", "disk", "neighbour", "remote".
        cache_report: why there were not more; None before first admission.
        prompt_logprobs: log-probabilities collected while the prompt is computed; entry i is of prompt token i + 1.
        num_accepted_tokens: drafted output tokens that were accepted.
        pooled: hidden states collected while the prompt is computed; None if no embedding is wanted.
    """

    request_id: RequestId
    prompt_token_ids: TokenIdSeq
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = field(default_factory=time.monotonic)
    due_time: float | None = None
    seed: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    quoted_ids: tuple[int, ...] = ()
    full_blocks: object = None
    grammar: object = None
    search: Any = None
    stop_readers: list[Any] | None = None
    was_admitted: bool = False
    uncomputed_charge: int = 0
    admitted_time: float | None = None
    first_token_time: float | None = None
    num_cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    cache_report: CacheReport | None = None
    pin_receipts: list[PinReceipt] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_accepted_tokens: int = 0
    pooled: PooledStates | None = None
    cache_scope: str = field(init=False)
    sequences: list[Sequence] = field(init=False)
    _num_ended: int = field(init=False, default=0)  # at least this many of the first sequences have ended

    def __post_init__(self) -> None:
        self.cache_scope = cache_scope(self.tenant, self.cache_group, self.cache_salt)
        self.sequences = [
            Sequence(
                request=self,
                index=i,
                seed=sibling_seed(self.seed, i),
                num_prompt_tokens=len(self.prompt_token_ids),
                status=SequenceStatus.WAITING if i == 0 else SequenceStatus.FORK_PENDING,
            )
            for i in range(self.params.num_sequences)
        ]

    @property
    def ending_ids(self) -> dict[int, int | None]:
        """The tokens that may end an output, with the stop reason to report for each: None for end-of-sequence."""
        params = self.params
        found: dict[int, int | None] = {token_id: token_id for token_id in params.stop_token_ids}
        # A complete structured output ends even with `ignore_eos`, because nothing could follow it.
        if not params.ignore_eos or params.structured_outputs is not None:
            found.update(dict.fromkeys(self.eos_token_ids))
        return found

    @property
    def most_output_tokens(self) -> int:
        """The maximum number of output tokens; the token drawn after an embedding's prompt does not count."""
        return 0 if self.pooled is not None else self.params.max_tokens or 1

    def drawing(self, seq: Sequence) -> tuple[Sequence, ...]:
        """Return the sequences that draw the token after the last one of `seq`, with `seq` first."""
        if len(self.sequences) == 1 or self.params.use_beam_search:
            return (seq,)
        return (seq, *(other for other in self.sequences if other.status is SequenceStatus.FORK_PENDING))

    @property
    def num_candidates(self) -> int:
        """The number of candidates for its next token that each beam needs; 0 if tokens are drawn."""
        return self.params.num_sequences + len(self.ending_ids) if self.params.use_beam_search else 0

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed, which need the logits of every token."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def needs_all_tokens(self) -> bool:
        """Whether all prompt tokens must be computed, because their log-probabilities or an embedding are wanted."""
        pooled = self.pooled
        return self.is_scored or (pooled is not None and pooled.next_position < len(self.prompt_token_ids) - 1)

    @property
    def finished(self) -> bool:
        sequences = self.sequences
        # The fast path, because this is checked for every token, and most requests have one sequence.
        if len(sequences) == 1:
            return sequences[0].status is SequenceStatus.FINISHED
        # Ended sequences stay ended, so each of many sequences that end one after the other is counted only once.
        while self._num_ended < len(sequences) and sequences[self._num_ended].status is SequenceStatus.FINISHED:
            self._num_ended += 1
        return self._num_ended >= len(sequences)
