"""nvfp4: NVIDIA's 4-bit floating type, with an e4m3 scale per 16 elements and a float32 scale per head.

    code    | s ee m |       0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; a byte has dimensions i and n/2 + i
    fields  | t: e4m3 | for each 16 dimensions      t = max |x| / (6 scale)
            x ≈ scale t code

Read by the Triton kernels and the reference.
"""

from __future__ import annotations

import torch

from octavo.kvcache import formats
from octavo.storage.codec.base import Coded, VectorCodec, padded, split_last

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MOST, _MOST_SCALE = 6.0, 448.0
# The midpoints between the values. A tie goes to the even code, which is the upper one if the code below is odd.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Nvfp4Codec(VectorCodec):
    format = formats.NVFP4
    largest = _MOST * _MOST_SCALE

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        x = padded(x / scale[:, None], self.format.multiple)
        groups = split_last(x, -1, 16)
        t = (groups.abs().amax(-1) / _MOST).nan_to_num(_MOST_SCALE).clamp_max(_MOST_SCALE).to(torch.float8_e4m3fn)
        steps = t.float().unsqueeze(-1)
        magnitudes = torch.where(steps > 0, groups.abs() / steps, 0.0).nan_to_num(0.0).flatten(-2)
        codes = sum(
            (magnitudes >= middle if below % 2 else magnitudes > middle).to(torch.uint8)
            for below, middle in enumerate(_MIDDLES)
        )
        assert isinstance(codes, torch.Tensor)
        codes = codes | (x < 0).to(torch.uint8) << 3
        half = codes.shape[-1] // 2
        return Coded(codes[..., :half] | codes[..., half:] << 4, (t.view(torch.uint8),))

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        codes = torch.cat((coded.codes & 15, coded.codes >> 4), dim=-1)
        table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
        t = coded.fields[0].contiguous().view(torch.float8_e4m3fn).float()
        values = split_last(table[codes.long()], -1, 16) * t.unsqueeze(-1)
        return values.flatten(-2)[..., :dim] * scale[:, None]


NVFP4 = Nvfp4Codec()
