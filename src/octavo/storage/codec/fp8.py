"""The two 8-bit floating types of the OCP specification (Micikevicius et al. 2022), saturating.

A number is its code times the head's scale. Numbers beyond the largest code are clipped to it. NaN is stored as the
largest code too: the token for which it was computed has no finite logits either.
"""

from __future__ import annotations

import torch

from octavo.kvcache.formats import CodeFormat
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
