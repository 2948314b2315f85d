"""int8: signed bytes and a scale for each token and head.

    code    c = round(x / s), -127 .. 127, ties to even        x ≈ s c
    fields  | s: bfloat16 |      s = max |x| / 127, rounded up

For keys, four dimensions of a token are adjacent, and for values, four tokens of a dimension: the operands of VNNI
instructions.

Read by the C++ kernels (`csrc/level/coded_attention.h`), the Triton kernels and the reference.
"""

from __future__ import annotations

import torch

from octavo.kvcache import formats
from octavo.storage.codec.base import (
    LEAST_SCALE,
    Coded,
    VectorCodec,
    bfloat16_bytes,
    ceil_bfloat16,
    from_bfloat16_bytes,
    padded,
)


class Int8Codec(VectorCodec):
    format = formats.INT8
    unit = 4
    together = 4

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        s = ceil_bfloat16((x.abs().amax(-1) / 127.0).clamp_min(LEAST_SCALE))
        codes = (x / s.unsqueeze(-1)).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
        return Coded(padded(codes, self.format.multiple).view(torch.uint8), (bfloat16_bytes(s),))

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        return coded.codes[..., :dim].contiguous().view(torch.int8).float() * from_bfloat16_bytes(coded.fields[0])


INT8 = Int8Codec()
