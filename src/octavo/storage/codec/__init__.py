"""The codecs of keys and values, and the layout of their bytes in a block. Their sizes are in `kvcache/formats.py`.

A codec encodes one vector at a time, the key or the value of one token and head, as codes and additional fields (a
scale, a zero point). A coded layer's part of a block, in which tokens form groups of 16 lanes, the width of the
kernels' registers (a block whose size is not a multiple of 16 is one group):

    | codes of keys | codes of values | fields of keys | fields of values | padding to 64 bytes |

    codes of keys      [kv_heads][block_size / lanes][code_bytes / unit][lanes][unit]     tokens adjacent, so that a
                       register holds the same dimensions of 16 tokens; `unit` bytes of one token are adjacent
    codes of values    [kv_heads][block_size / together][code_bytes][together]            a token's dimensions adjacent,
                       or bytes of `together` tokens: the operand of an integer sum over tokens
    each field         [kv_heads][block_size][bytes of the field]

For a GPU's kernels tokens are stored one after the other, with one token per group and `together` = 1
(`BlockLayout.TOKENS`). In blocks whose size is not a multiple of 16, values are always stored like that.

No two tokens share a byte, so different threads may write tokens of one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from octavo.kvcache import formats
from octavo.kvcache.formats import KV_FORMATS, CodeFormat, KVFormat
from octavo.storage.codec.hadamard import rotate, rotate_back

LANES = 16
_INT4_CODES = 15
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MOST_FP4, _MOST_E4M3 = 6.0, 448.0
# The midpoints between the values. A tie goes to the even code, which is the upper one if the code below is odd.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LEAST_SCALE = 2.0**-100
"""The minimum scale, so that dividing by it cannot overflow; vectors this small are stored as zeros."""


class Coded(NamedTuple):
    """Encoded vectors: codes uint8 [..., code_bytes], and fields uint8 [..., bytes of the field] each."""

    codes: torch.Tensor
    fields: tuple[torch.Tensor, ...]


class VectorCodec(ABC):
    """Encodes and decodes vectors, slowly in plain torch, as the reference for the kernels.

    Attributes:
        format: the sizes.
        unit: for keys, how many bytes of a token's codes are adjacent.
        together: for values, how many tokens have adjacent bytes.
        largest: for a calibrated format, the largest code in units of the scale: a vector's largest element divided by
            this is the smallest scale that clips nothing.
    """

    format: CodeFormat
    unit: int = 1
    together: int = 1
    largest: float = 1.0

    @abstractmethod
    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        """Encode float32 [..., heads, dim].

        Args:
            scale: float32 [heads], for calibrated formats; others ignore it.
        """

    @abstractmethod
    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        """Decode the output of `encode` to float32 [..., heads, dim]."""


def split_last(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return `x` with its last dimension split into `sizes`, one of which may be -1."""
    return x.reshape(*x.shape[:-1], *sizes)


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `x` with its last dimension padded with zeros to a multiple."""
    short = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, short)) if short else x


def ceil_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round `x` >= 0 up to bfloat16, returned as float32; infinities and NaN are unchanged.

    With a scale that is rounded up, no element exceeds the last code.
    """
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), (bits + 0xFFFF) & -0x10000, bits).view(torch.float32)


def bfloat16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes, uint8 [..., 2], of numbers [...] that are exact in bfloat16."""
    return x.to(torch.bfloat16).unsqueeze(-1).view(torch.uint8)


def from_bfloat16_bytes(field: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., 1] from bfloat16 bytes, uint8 [..., 2]."""
    return field.contiguous().view(torch.bfloat16).float()


class FloatCodec(VectorCodec):
    """Rounds to a floating type, without fields. The codes are the bytes of the elements, little-endian:

        bfloat16    | s eeeeeeee mmmmmmm |    the upper half of a float32
        float16     | s eeeee mmmmmmmmmm |    IEEE 754 binary16, which overflows beyond 65504
        float32     | s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm |    IEEE 754 binary32

    bfloat16 and float32 are read by the C++ kernels (for models of the same type), the Triton kernels and the
    reference, float16 by the last two. In blocks of floats, elements are in pairs as the instructions for bfloat16
    require (see `storage/arena.py`), and not in the order of coded layers.
    """

    def __init__(self, name: str) -> None:
        self.format = formats.FLOATS[name]
        self.dtype: torch.dtype = getattr(torch, name)

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        return Coded(x.to(self.dtype).contiguous().view(torch.uint8), ())

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        return coded.codes.contiguous().view(self.dtype).float()


class Float8Codec(VectorCodec):
    """The 8-bit floating types of the OCP specification (Micikevicius et al. 2022), saturating.

        fp8_e4m3    | s eeee mmm |    2^(e-7) (1 + m/8); e = 0: 2^-6 m/8       up to 448: `float8_e4m3fn`, not `fnuz`
        fp8_e5m2    | s eeeee mm |    2^(e-15) (1 + m/4); e = 0: 2^-14 m/4     up to 57344: the upper half of a float16

    There are no fields: each head has one float32 scale, outside the blocks. A number is its code times the head's
    scale, rounded to nearest, ties to even. Numbers beyond the largest code are clipped to it. NaN is stored as the
    largest code too: the token for which it was computed has no finite logits either.
    """

    def __init__(self, format: CodeFormat, dtype: torch.dtype) -> None:
        self.format = format
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        scaled = torch.nan_to_num(x / scale[:, None], nan=self.largest).clamp(-self.largest, self.largest)
        return Coded(scaled.to(self.dtype).view(torch.uint8), ())

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        return coded.codes.contiguous().view(self.dtype).float() * scale[:, None]


class Int8Codec(VectorCodec):
    """Signed bytes and a scale for each token and head.

        code    c = round(x / s), -127 .. 127, ties to even        x ≈ s c
        fields  | s: bfloat16 |      s = max |x| / 127, rounded up

    For keys, four dimensions of a token are adjacent, and for values, four tokens of a dimension: the operands of VNNI
    instructions.
    """

    format = formats.INT8
    unit = 4
    together = 4

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        s = ceil_bfloat16((x.abs().amax(-1) / 127.0).clamp_min(LEAST_SCALE))
        codes = (x / s.unsqueeze(-1)).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
        return Coded(padded(codes, self.format.multiple).view(torch.uint8), (bfloat16_bytes(s),))

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        return coded.codes[..., :dim].contiguous().view(torch.int8).float() * from_bfloat16_bytes(coded.fields[0])


class Int4Codec(VectorCodec):
    """Four bits, a scale and a zero point for each token and head, after a randomised Hadamard rotation.

        x' = R x                                             (`hadamard.py`; after RoPE and QK-norm)
        s  = max((max - min) / 15, ε), rounded up            max and min of x' and 0, so that 0 is always in the range
        z  = round(-min / s), 0 .. 15
        code    c = round(x' / s) + z, 0 .. 15               x ≈ Rᵀ s (c - z)
        fields  | s: bfloat16 | z: byte |

        bytes of keys, 8 dimensions per unit    | 0, 4 | 1, 5 | 2, 6 | 3, 7 |      low nibble, high nibble
        bytes of values                         | 0, n/2 | 1, n/2 + 1 | …          four tokens adjacent, as in int8

    A kernel need not rotate back what it reads. With q' = R q and Q = Σ q', a score is s (q'·c - z Q). For values, with
    A = Σ p s c and b = Σ p s z, the result is Rᵀ (A - b 1).

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
        s = ceil_bfloat16(((most - least) / _INT4_CODES).clamp_min(LEAST_SCALE))
        zero = (-least / s).round().clamp(0, _INT4_CODES).nan_to_num(0.0)
        codes = ((rotated / s.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, _INT4_CODES).nan_to_num(0.0)
        nibbles = padded(codes.to(torch.uint8), self.format.multiple)
        pairs = split_last(nibbles, -1, 2, self._half or nibbles.shape[-1] // 2)
        packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
        return Coded(packed, (bfloat16_bytes(s), zero.to(torch.uint8).unsqueeze(-1)))

    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        packed = split_last(coded.codes, -1, self._half or coded.codes.shape[-1])
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-3)[..., :dim]
        s, zero = from_bfloat16_bytes(coded.fields[0]), coded.fields[1].float()
        return rotate_back((nibbles.float() - zero) * s)


class Nvfp4Codec(VectorCodec):
    """NVIDIA's 4-bit floating type, with an e4m3 scale per 16 elements and a float32 scale per head, not for C++.

    code    | s ee m |       0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; a byte has dimensions i and n/2 + i
    fields  | t: e4m3 | for each 16 dimensions      t = max |x| / (6 scale)
            x ≈ scale t code
    """

    format = formats.NVFP4
    largest = _MOST_FP4 * _MOST_E4M3

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        x = padded(x / scale[:, None], self.format.multiple)
        groups = split_last(x, -1, 16)
        t = (groups.abs().amax(-1) / _MOST_FP4).nan_to_num(_MOST_E4M3).clamp_max(_MOST_E4M3).to(torch.float8_e4m3fn)
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
        table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], device=codes.device)
        t = coded.fields[0].contiguous().view(torch.float8_e4m3fn).float()
        values = split_last(table[codes.long()], -1, 16) * t.unsqueeze(-1)
        return values.flatten(-2)[..., :dim] * scale[:, None]


_INT4_VALUES = Int4Codec(0)
_CODECS: dict[str, VectorCodec] = {
    **{name: FloatCodec(name) for name in formats.FLOATS},
    "fp8_e4m3": Float8Codec(formats.E4M3, torch.float8_e4m3fn),
    "fp8_e5m2": Float8Codec(formats.E5M2, torch.float8_e5m2),
    "int8": Int8Codec(),
    "int4": Int4Codec(4),  # of keys
    "nvfp4": Nvfp4Codec(),
}


def codecs_of(format: KVFormat) -> tuple[VectorCodec, VectorCodec]:
    """Return the codecs of keys and of values."""
    values = format.values.name
    return _CODECS[format.keys.name], _INT4_VALUES if values == "int4" else _CODECS[values]


CODECS = {name: codecs_of(format) for name, format in KV_FORMATS.items()}
"""The codecs of keys and of values, by the names in `kvcache.formats.KV_FORMATS`."""
