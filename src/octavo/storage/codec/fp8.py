"""The two 8-bit floating types of the OCP specification (Micikevicius et al. 2022), saturating.

    fp8_e4m3    | s eeee mmm |    2^(e-7) (1 + m/8); e = 0: 2^-6 m/8       up to 448: `float8_e4m3fn`, not its `fnuz`
    fp8_e5m2    | s eeeee mm |    2^(e-15) (1 + m/4); e = 0: 2^-14 m/4     up to 57344: the upper half of a float16

There are no fields: each head has one float32 scale, outside the blocks. Both are read by the C++ kernels
(`csrc/level/coded_attention.h`), the Triton kernels and the reference.

A number is its code times the head's scale. Numbers beyond the largest code are clipped to it. NaN is stored as the
largest code too: the token for which it was computed has no finite logits either.
"""

from __future__ import annotations

import torch

from octavo.kvcache.formats import E4M3, E5M2, CodeFormat
from octavo.storage.codec.base import Coded, VectorCodec


class Float8Codec(VectorCodec):
    """Divides by the head's scale and rounds to nearest, ties to even."""

    def __init__(self, format: CodeFormat, dtype: torch.dtype) -> None:
        self.format = format
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        scaled = torch.nan_to_num(x / scale[:, None], nan=self.largest).clamp(-self.largest, self.largest)
        return Coded(scaled.to(self.dtype).view(torch.uint8), ())

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        return coded.codes.contiguous().view(self.dtype).float() * scale[:, None]


FP8_E4M3 = Float8Codec(E4M3, torch.float8_e4m3fn)
FP8_E5M2 = Float8Codec(E5M2, torch.float8_e5m2)
