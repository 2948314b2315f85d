"""int4: four bits, a scale and a zero point for each token and head, after a randomised Hadamard rotation.

    x' = R x                                             (`hadamard.py`; after RoPE and QK-norm)
    s  = max((max - min) / 15, ε), rounded up            max and min of x' and 0, so that 0 is always in the range
    z  = round(-min / s), 0 .. 15
    code    c = round(x' / s) + z, 0 .. 15               x ≈ Rᵀ s (c - z)
    fields  | s: bfloat16 | z: byte |

    bytes of keys, 8 dimensions per unit    | 0, 4 | 1, 5 | 2, 6 | 3, 7 |      low nibble, high nibble
    bytes of values                         | 0, n/2 | 1, n/2 + 1 | …

For values, bytes of four tokens are adjacent, as in int8.

A kernel need not rotate back what it reads. With q' = R q and Q = Σ q', a score is s (q'·c - z Q). For values, with
A = Σ p s c and b = Σ p s z, the result is Rᵀ (A - b 1).

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
    split_last,
)
from octavo.storage.codec.hadamard import rotate, rotate_back

_CODES = 15


class Int4Codec(VectorCodec):
    """Rotates, then rounds to four bits.

    Args:
        half: distance between the two dimensions in a byte; 0 means half of the dimensions.
    """

    format = formats.INT4
    unit = 4
    together = 4

    def __init__(self, half: int) -> None:
        self._half = half

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        rotated = rotate(x)
        least, most = rotated.amin(-1).clamp_max(0.0), rotated.amax(-1).clamp_min(0.0)
        s = ceil_bfloat16(((most - least) / _CODES).clamp_min(LEAST_SCALE))
        zero = (-least / s).round().clamp(0, _CODES).nan_to_num(0.0)
        codes = ((rotated / s.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, _CODES).nan_to_num(0.0)
        nibbles = padded(codes.to(torch.uint8), self.format.multiple)
        pairs = split_last(nibbles, -1, 2, self._half or nibbles.shape[-1] // 2)
        packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
        return Coded(packed, (bfloat16_bytes(s), zero.to(torch.uint8).unsqueeze(-1)))

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        packed = split_last(coded.codes, -1, self._half or coded.codes.shape[-1])
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-3)[..., :dim]
        s, zero = from_bfloat16_bytes(coded.fields[0]), coded.fields[1].float()
        return rotate_back((nibbles.float() - zero) * s)


INT4_KEYS, INT4_VALUES = Int4Codec(4), Int4Codec(0)
