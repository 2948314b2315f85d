"""What the scheduler asks of a sequence."""

from __future__ import annotations

from octavo.request import Sequence, SequenceStatus
from octavo.sequence_state import Place


def num_missing(seq: Sequence) -> int:
    """Return the number of tokens to compute, some of which may turn out to be cached at admission."""
    return seq.num_tokens - seq.num_computed


def place_of(seq: Sequence) -> Place:
    """Return the place of a running sequence."""
    place = seq.state.place
    assert place is not None, "it runs"
    return place


def num_pending_siblings(seq: Sequence) -> int:
    """Return the number of parallel samples or beams that wait for this sequence to compute their prompt."""
    siblings = seq.request.sequences
    if seq.index or len(siblings) == 1:
        return 0
    return sum(sibling.status is SequenceStatus.FORK_PENDING for sibling in siblings)


def is_scored(seq: Sequence) -> bool:
    """Whether log-probabilities of its prompt are still to be computed, which need the logits of every token."""
    request = seq.request
    return request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < seq.num_prompt_tokens - 1


def needs_all_tokens(seq: Sequence) -> bool:
    """Whether all prompt tokens must be computed, because their log-probabilities or an embedding are wanted."""
    pooled = seq.request.pooled
    return is_scored(seq) or (pooled is not None and pooled.next_position < seq.num_prompt_tokens - 1)
