"""Copies whole blocks on a GPU with one Triton kernel, without a temporary copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = 2048  # int64 a program: 16 KiB


@triton.jit
def _copy(blocks, pairs, words, stride, COUNT: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair)
    destination = tl.load(pairs + 2 * pair + 1)
    place = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    values = tl.load(blocks + source * stride + place, mask=place < words)
    tl.store(blocks + destination * stride + place, values, mask=place < words)


def copy_blocks(blocks: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy rows of uint8 [num_blocks, block_bytes], (source, destination) pairs of which no row is both.

    block_bytes is a multiple of 8.
    """
    words = blocks.view(torch.int64)
    pairs = torch.tensor(copies, dtype=torch.int64).to(blocks.device, non_blocking=True)
    count = words.shape[1]
    _copy[(len(copies), -(-count // _WORDS))](words, pairs, count, words.stride(0), COUNT=_WORDS)
