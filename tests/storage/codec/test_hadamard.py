"""The rotation is orthogonal and block-diagonal, and spreads a single large dimension."""

from __future__ import annotations

import pytest
import torch

from octavo.storage.codec.hadamard import powers_of_two, rotate, rotate_back


@pytest.mark.parametrize("dim", [1, 2, 8, 16, 24, 64, 80, 96, 112, 128, 256])
def test_a_rotation_keeps_lengths_and_is_undone(dim: int) -> None:
    x, y = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(dim))
    assert torch.allclose(rotate_back(rotate(x)), x, atol=1e-5)
    assert torch.allclose((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1), atol=1e-4)


def test_one_large_dimension_is_spread_over_its_power_of_two() -> None:
    x = torch.zeros(80)
    x[3], x[70] = 8.0, 4.0
    rotated = rotate(x).abs()
    assert torch.allclose(rotated[:64], torch.ones(64))
    assert torch.allclose(rotated[64:], torch.ones(16))
    assert list(powers_of_two(80)) == [64, 16]
