"""The contract of a codec, and where its bytes lie in a block.

A codec knows one vector: the key or the value of one token and head. It makes codes of it, and fields (a scale, a zero
point) beside them. A coded layer's part of a block, with the tokens of a block in groups of 16 lanes, the width of the
kernels' registers (a block that is no multiple of 16 is one group):

    | codes of keys | codes of values | fields of keys | fields of values | padding to 64 bytes |

    codes of keys      [kv_heads][block_size / lanes][code_bytes / unit][lanes][unit]     tokens adjacent, so that a
                       register holds the same dimensions of 16 tokens; `unit` bytes of one token lie together
    codes of values    [kv_heads][block_size / together][code_bytes][together]            a token's dimensions adjacent,
                       or bytes of `together` tokens: the operand of a sum over tokens in integers
    each field         [kv_heads][block_size][bytes of the field]

A GPU's kernels read one token after the other, as if a group were one token and none lay together
(`BlockLayout.TOKENS`). So does everybody in blocks of a size that is no multiple of 16, of values.

No two tokens share a byte, so that tokens of one block may be written by different threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from octavo.kvcache.formats import CodeFormat

LANES = 16
LEAST_SCALE = 2.0**-100
"""A scale is never less, so that dividing by it overflows nothing; vectors that small are stored as zeros."""


class Coded(NamedTuple):
    """Encoded vectors: codes uint8 [..., code_bytes], and each field uint8 [..., its bytes]."""

    codes: torch.Tensor
    fields: tuple[torch.Tensor, ...]


class VectorCodec(ABC):
    """Makes bytes of vectors and vectors of bytes: slowly, in plain torch, as the oracle of the kernels.

    Attributes:
        format: the sizes.
        unit: bytes of codes that lie together for one token among keys.
        together: tokens whose bytes lie together among values.
        largest: the code's largest multiple of the scale, where the format is calibrated: a vector's largest element
            over this is the scale that cuts nothing off.
    """

    format: CodeFormat
    unit: int = 1
    together: int = 1
    largest: float = 1.0

    @abstractmethod
    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        """Encode float32 [..., heads, dim].

        Args:
            scale: float32 [heads], of a calibrated format; others leave it unread.
        """

    @abstractmethod
    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        """float32 [..., heads, dim] of what `encode` made."""


def split_last(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """`x` with its last dimension cut into `sizes`, one of which may be -1."""
    return x.reshape(*x.shape[:-1], *sizes)


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """`x` with zeros behind its last dimension, up to a multiple."""
    short = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, short)) if short else x


def ceil_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 that is at least `x`, as float32; `x` is not negative. Infinities and NaN stay what they are.

    A scale that is rounded up leaves no element beyond the last code.
    """
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), (bits + 0xFFFF) & -0x10000, bits).view(torch.float32)


def bfloat16_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] of numbers [...] that are bfloat16 already."""
    return x.to(torch.bfloat16).unsqueeze(-1).view(torch.uint8)


def from_bfloat16_bytes(field: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1] of uint8 [..., 2]."""
    return field.contiguous().view(torch.bfloat16).float()
