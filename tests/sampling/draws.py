"""Sequences that draw their next tokens, for tests of the sampler; imports nothing that a GPU machine may lack."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from octavo.request import Request, RequestId, Sequence
from octavo.sampling.batch import SamplingBatch, SamplingState
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SamplingSnapshot

_ids = itertools.count()


def make_sequence(
    prompt: Seq[int] = (0,),
    output: Seq[int] = (),
    *,
    seed: int = 0,
    eos: Seq[int] = (),
    request_id: str | None = None,
    **params: Any,
) -> Sequence:
    request = Request(
        RequestId(request_id or f"r{next(_ids)}"), list(prompt), SamplingParams(**params), frozenset(eos), seed=seed
    )
    [seq] = request.sequences
    seq.output_token_ids += output
    return seq


def batch_of(sequences: Iterable[Sequence]) -> SamplingBatch:
    """The draws of these sequences' next tokens."""
    sequences = list(sequences)
    states = []
    for seq in sequences:
        request = seq.request
        snapshot = SamplingSnapshot(
            request.request_id, request.params, seq.seed, seq.num_prompt_tokens, request.eos_token_ids
        )
        states.append(SamplingState.of(snapshot, np.array(seq.token_ids)))
    return SamplingBatch.of(states, [seq.num_output_tokens for seq in sequences])
