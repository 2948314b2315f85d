"""Keys and values as floats, without fields. The codes are the bytes of the elements, little-endian:

    bfloat16    | s eeeeeeee mmmmmmm |    the upper half of a float32
    float16     | s eeeee mmmmmmmmmm |    IEEE 754 binary16, which overflows beyond 65504
    float32     | s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm |    IEEE 754 binary32

bfloat16 and float32 are read by the C++ kernels (for models of the same type), the Triton kernels and the reference,
float16 by the last two. In blocks of floats, elements are in pairs as the instructions for bfloat16 require
(see `storage/arena.py`), and not in the order of coded layers.
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


BF16, FP16, FP32 = map(FloatCodec, ("bfloat16", "float16", "float32"))
