"""Keys and values as floats: bfloat16, float16 and float32.

The codes are the bytes of the elements, little-endian. In blocks of floats, elements are in pairs as the instructions
for bfloat16 require (see `storage/arena.py`), and not in the order of coded layers.
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
