"""Warm-up steps before the engine serves, so that no request waits for one-time work.

On a GPU this is the compilation of kernels, seconds each, and the initialisation of libraries at their first product.
Each kind of step has its own kernels:

    a long prompt alone                          one chunk, stored by programs of several tokens
    two short prompts with its decode            several chunks, and a decode
    three decodes                                contexts in several splits
    two decodes, and one, of the short ones      contexts in one split
    one decode of the long one

After that, decodes are recorded as graphs (`graphs.py`), which compiles next to nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress

from octavo.errors import LogitsError
from octavo.kvcache.block import BlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import RequestId, SequenceId
from octavo.runner.runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import NewSequence, SamplingSnapshot, StepPlan, TableDelta

# Lengths above and below those of a split of a decode, and those up to which tokens are stored one by one.
_LONG, _SHORT = 300, 20
_MOST_DECODES = 5  # upper bound for any of the sequences

_SAMPLING = SamplingSnapshot(RequestId("warming up"), SamplingParams(), seed=0, num_prompt_tokens=1)


def warm_up(runner: ModelRunner, spec: KVCacheSpec, num_blocks: int, *, max_num_seqs: int, max_tokens: int) -> None:
    """Execute a step of each kind, as far as the cache has room; a `reset` makes the runner forget them.

    Args:
        num_blocks: number of blocks in the cache, including the null block. Values written to them are never read.
        max_tokens: maximum number of tokens in a step, and in a sequence.
    """
    for plan in plans(spec, num_blocks, max_num_seqs=max_num_seqs, max_tokens=max_tokens):
        # The logits of such tokens may not be a distribution, but they have been computed.
        with suppress(LogitsError):
            runner.execute(plan)


def plans(spec: KVCacheSpec, num_blocks: int, *, max_num_seqs: int, max_tokens: int) -> Iterator[StepPlan]:
    """Yield the steps of a warm-up; none if the cache has no room for a short sequence."""
    blocks_each = (num_blocks - 1) // len(spec.groups)
    most = min(max_tokens, blocks_each * spec.block_size) - _MOST_DECODES
    if most < 1:
        return
    long = min(_LONG, most)
    computed = [0, 0, 0]
    needed = [spec.blocks_for_tokens(length + _MOST_DECODES) for length in (long, _SHORT, _SHORT)]
    has_others = max_num_seqs >= 3 and max_tokens > 2 * _SHORT and sum(needed) <= blocks_each
    ids, steps = itertools.count(1), itertools.count(1)

    def plan(rows: Seq[tuple[int, int]], new: Seq[int] = ()) -> StepPlan:
        """Return a step of (sequence, tokens) rows; decodes must come first."""
        step = next(steps)
        starts = tuple(computed[index] for index, _ in rows)
        for index, length in rows:
            computed[index] += length
        return StepPlan(
            step=step,
            seq_ids=tuple(SequenceId(index) for index, _ in rows),
            starts=starts,
            lengths=tuple(length for _, length in rows),
            draws=(1,) * len(rows),
            token_ids=(0,) * sum(length for _, length in rows),
            reset=step == 1,
            new=tuple(NewSequence(SequenceId(index), _SAMPLING) for index in new),
            tables=tuple(
                TableDelta(row, 0, tuple(tuple(BlockId(next(ids)) for _ in range(needed[index])) for _ in spec.groups))
                for row, (index, _) in enumerate(rows)
                if index in new
            ),
            num_streams=sum(start > 0 for start in starts),
        )

    yield plan([(0, long)], new=[0])
    if has_others:
        yield plan([(0, 1), (1, _SHORT), (2, _SHORT)], new=[1, 2])
        for decodes in ([0, 1, 2], [1, 2], [1]):
            yield plan([(index, 1) for index in decodes])
    yield plan([(0, 1)])
