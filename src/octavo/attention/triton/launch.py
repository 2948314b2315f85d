"""What all launches share: whether kernels are interpreted, and sizes of tiles."""

from __future__ import annotations

import torch
import triton

from octavo.attention.triton.interpreter import let_loops_end_at_tensors
from octavo.storage.arena import FloatKV

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter on a CPU: decided by TRITON_INTERPRET when triton is first imported."""

if INTERPRETED:
    let_loops_end_at_tensors()

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # the least rows and columns of a tensor-core product


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`, at least `least`: what `tl.arange` takes."""
    return max(least, 1 << (size - 1).bit_length())


def computes_in_float32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype must be upcast: Triton 3.6's interpreter multiplies bfloat16 wrongly."""
    return INTERPRETED and dtype is torch.bfloat16


def kv_strides(kv: FloatKV) -> tuple[int, ...]:
    """Strides of keys (block, head, dimension, token) and of values (block, head, token, dimension), in elements."""
    return (*kv.key.stride()[:4], *kv.value.stride()[:4])


def tile_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile of keys or values whose heads are padded to `head_dim`: two stages of both fit shared memory."""
    if INTERPRETED:
        return 128  # few, large steps: each costs the interpreter the same
    return 64 if head_dim * dtype.itemsize <= 512 else 32
