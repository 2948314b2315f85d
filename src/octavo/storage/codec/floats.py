"""Keys and values as floats: bfloat16, float16 and float32.

The bytes of an element, little-endian. In blocks they lie in pairs (`storage/arena.py` has that drawing), which is
what the instructions for bfloat16 read, and not in the order of coded layers.
"""

from __future__ import annotations

import torch

from octavo.kvcache.formats import FLOATS
from octavo.storage.codec.base import Coded, VectorCodec


class FloatCodec(VectorCodec):
    """Rounds to a floating type."""

    def __init__(self, name: str) -> None:
        self.format = FLOATS[name]
        self.dtype: torch.dtype = getattr(torch, name)

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        return Coded(x.to(self.dtype).contiguous().view(torch.uint8), ())

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        return coded.codes.contiguous().view(self.dtype).float()
