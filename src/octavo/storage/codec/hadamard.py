"""A randomised Hadamard rotation, which spreads outliers over all dimensions (QuaRot, Ashkboos et al. 2024).

    R = 1/√n H D        D: fixed random signs        H: Sylvester's matrix of n = 2^k, H[i][j] = (-1)^popcount(i & j)

A head size that is not a power of two gets one matrix for each power of two in it, 80 = 64 + 16. R is orthogonal, so
rotated queries and keys have the same scores as plain ones, and a sum of rotated values is rotated back once.

The order of additions is part of the definition, so that the kernels give the same bits: sixteen adjacent elements one
after the other, as a register of sixteen lanes adds them, then butterflies over 16, 32, 64, …, and finally the factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

_ADJACENT = 16
# Bit i is the sign of dimension i. The bits were drawn once and must not change; csrc/level/hadamard.h has the same.
SIGN_BITS = (0x8A5CD789, 0xD4E9AC3F, 0x2D1B7F46, 0x61E80B95, 0xB7A39E12, 0x0C5D48F6, 0x93F2616B, 0x4E879AD0)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return R x for float32 [..., dim]."""
    return _transform(x * _signs(x.shape[-1], x.device))


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Return Rᵀ x."""
    return _transform(x) * _signs(x.shape[-1], x.device)


def _transform(x: torch.Tensor) -> torch.Tensor:
    parts, start = [], 0
    for size in powers_of_two(x.shape[-1]):
        parts.append(_hadamard(x[..., start : start + size]) * torch.tensor(1 / math.sqrt(size), dtype=torch.float32))
        start += size
    return torch.cat(parts, dim=-1)


def powers_of_two(dim: int) -> Iterator[int]:
    """Yield the powers of two that add up to `dim`, largest first: 80 -> 64, 16."""
    while dim:
        size = 1 << (dim.bit_length() - 1)
        yield size
        dim -= size


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    width = min(size, _ADJACENT)
    rows = _matrix(width).to(x.device)
    adjacent = x.reshape(*x.shape[:-1], size // width, width)
    total = adjacent[..., :1] * rows[0]
    for j in range(1, width):
        total = total + adjacent[..., j : j + 1] * rows[j]
    stride = 1  # in groups of `width`
    while stride < size // width:
        pairs = total.reshape(*x.shape[:-1], -1, 2, stride, width)
        low, high = pairs[..., 0, :, :], pairs[..., 1, :, :]
        total = torch.stack((low + high, low - high), dim=-3).flatten(-4, -2)
        stride *= 2
    return total.flatten(-2)


@cache
def _matrix(size: int) -> torch.Tensor:
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


@cache
def _signs(dim: int, device: torch.device) -> torch.Tensor:
    bits = [SIGN_BITS[i // 32 % len(SIGN_BITS)] >> (i % 32) & 1 for i in range(dim)]
    return torch.tensor([-1.0 if bit else 1.0 for bit in bits], device=device)
