"""Splitting a decode's attention over its context among a GPU's programs: for the kernels, and the plan of memory.

    context   | split 0 | split 1 | … |       each of `SPLIT` tokens, or of a multiple if there would be too many

The splits of a sequence depend on its own length alone, so its result does not depend on the rest of the batch. There
are enough of them that one sequence occupies the largest GPU, and not more, because each leaves a partial result.
"""

from __future__ import annotations

SPLIT = 256
# Programs of one sequence that occupy any GPU: an H200 runs four or so on each of its 132 multiprocessors.
_PROGRAMS = 512


def most_splits(num_kv_heads: int) -> int:
    """Return the maximum number of splits of a sequence; each is a program for each KV head."""
    return max(16, _PROGRAMS // num_kv_heads)


def max_splits(
    num_seqs: int, max_context_len: int, total_context_len: int, window: int | None, num_kv_heads: int
) -> int:
    """Return an upper bound of the splits of all sequences together.

    Args:
        total_context_len: sum of the contexts.
        window: tokens that are attended to; None for all.
    """
    # A window may begin within a split.
    begun = 1 if window is None else 2
    span = max_context_len if window is None else min(max_context_len, window)
    of_each = min(-(-span // SPLIT), most_splits(num_kv_heads)) + begun - 1
    total = total_context_len if window is None else min(total_context_len, num_seqs * window)
    return min(num_seqs * of_each, total // SPLIT + num_seqs * begun)


def partial_bytes(num_splits: int, num_heads: int, value_dim: int) -> int:
    """Return the bytes of the partial results of all query heads: float32 values, a maximum and a total of each."""
    return num_splits * num_heads * (value_dim + 2) * 4
