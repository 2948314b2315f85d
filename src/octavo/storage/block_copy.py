"""Copies whole blocks on a GPU with one Triton kernel: within the arena, to separate rows, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from octavo.storage.device_copy import to_device

_WORDS = 2048  # int64 per program: 16 KiB


# Sizes that change between steps must not be specialised, because each compilation takes seconds.
@triton.jit(do_not_specialize=["pieces"])
def _copy(source, target, pairs, words, source_stride, target_stride, pieces, COUNT: tl.constexpr):
    # One dimension, since a block of gigabytes (`--block-size max`) has more pieces than the second one may have.
    pair = tl.program_id(0) // pieces
    from_row = tl.load(pairs + 2 * pair)
    to_row = tl.load(pairs + 2 * pair + 1)
    place = (tl.program_id(0) % pieces).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    values = tl.load(source + from_row * source_stride + place, mask=place < words)
    tl.store(target + to_row * target_stride + place, values, mask=place < words)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy rows of uint8 [n, block_bytes] to rows of [m, block_bytes], as (row of source, row of target) pairs.

    If both are the same tensor, no row may be both read and written. block_bytes must be a multiple of 8.
    """
    if not copies:
        return
    source, target = source.view(torch.int64), target.view(torch.int64)
    pairs = to_device(np.array(copies, dtype=np.int64).reshape(-1, 2), source.device)
    words = source.shape[1]
    pieces = -(-words // _WORDS)
    _copy[(len(copies) * pieces,)](
        source, target, pairs, words, source.stride(0), target.stride(0), pieces, COUNT=_WORDS
    )
