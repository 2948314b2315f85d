"""A request and the sequences it is computed as. Pure state: who changes it is the scheduler alone."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

from octavo.sampling_params import SamplingParams

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)

_sequence_ids = itertools.count(1)


class FinishReason(StrEnum):
    """Why a sequence ended; "stop" and "length" are OpenAI's.

    ABORT: its client gave it up. ERROR: the model gave no usable logits for it.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(Enum):
    WAITING = "waiting"  # in the queue, holds no block
    RUNNING = "running"  # holds blocks; its num_computed chases its num_tokens
    FORK_PENDING = "fork_pending"  # a parallel sample whose prompt its first sibling still computes
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        logprob: of the chosen (or given) token, before temperature and filters.
        rank: that token's place by probability, from 1.
        top: (token id, logprob) of the most likely tokens, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One line of tokens: the unit that is scheduled, holds block tables and is preempted.

    The one scheduling rule: `num_computed` (tokens whose keys and values lie in blocks) chases `num_tokens`.
    """

    request: Request
    index: int
    seed: int
    token_ids: list[int]
    seq_id: SequenceId = field(default_factory=lambda: SequenceId(next(_sequence_ids)))
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of service: higher priority (lower number) first, then earlier arrival, then the smaller id."""
        return (self.request.priority, self.request.arrival_time, self.seq_id)


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what is asked of it; `params.max_tokens` is definite by the time it gets here.

    Attributes:
        priority: lower is served first, as in vLLM; ties by arrival.
        cache_salt: requests share cached blocks only with requests of the same salt.
        seed: of the first sequence; sequence i uses seed + i.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission; None before it.
        prompt_logprobs: collected while the prompt is computed; entry i belongs to prompt token i + 1.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = field(default_factory=time.monotonic)
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    seed: int = 0
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sequences: list[Sequence] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [
            Sequence(
                request=self,
                index=i,
                seed=(self.seed + i) & (2**64 - 1),
                token_ids=list(self.prompt_token_ids),
                status=SequenceStatus.WAITING if i == 0 else SequenceStatus.FORK_PENDING,
            )
            for i in range(self.params.n)
        ]

    @property
    def finished(self) -> bool:
        return all(seq.finished for seq in self.sequences)
