"""bf16 weights in twelve bits: what comes back, what it multiplies to, and when it is worth it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.kernels import PackedWeight, packed_weight
from octavo.kernels.library import native
from octavo.storage import arena
from tests.levels import LEVELS

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]
every_level = pytest.mark.parametrize("level", LEVELS)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def random_bits(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    """Any bf16, NaN and infinities too: nearly all are escapes."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**15), 2**15, (outputs, inputs), dtype=torch.int16, generator=generator)
    return words.view(torch.bfloat16)


def trained(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    """Normal, as trained weights nearly are, with a few far outside: zeros, subnormals, large and tiny ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    for index, odd in enumerate((0.0, -0.0, 1e-39, 1e-30, -3e4, 1e20)):
        weight.view(-1)[index * 7 % weight.numel()] = odd
    return weight.bfloat16()


@pytest.mark.parametrize("make", [random_bits, trained])
@settings(max_examples=40, deadline=None)
@given(outputs=st.integers(1, 100), inputs=st.integers(1, 70), seed=st.integers(0, 99))
def test_every_bit_comes_back(make: Callable[..., Any], outputs: int, inputs: int, seed: int) -> None:
    weight = make(outputs, inputs, seed)
    compressed = PackedWeight.pack(weight).compressed()
    ids = torch.arange(outputs).flip(0)
    assert torch.equal(bits(compressed.rows(ids, torch.bfloat16)), bits(weight.flip(0)))


@every_level
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 40),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 130),
    with_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_products_have_the_bits_of_the_plain_weight(
    level: str, rows: int, outputs: int, inputs: int, with_bias: bool, threads: int, seed: int
) -> None:
    kernels.force_isa(level)
    kernels.set_num_threads(threads)
    plain = PackedWeight.pack(trained(outputs, inputs, seed))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
    assert torch.equal(bits(plain.compressed().linear(x, bias)), bits(plain.linear(x, bias)))


@every_level
@pytest.mark.parametrize("rows", [1, 30])
def test_a_gated_product_has_them_too(level: str, rows: int) -> None:
    kernels.force_isa(level)
    plain = PackedWeight.empty("bfloat16", 96, 64)
    plain.put(trained(48, 64, 1), 0, 2)
    plain.put(trained(48, 64, 2), 16, 2)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(
        bits(plain.compressed().linear(x, activation="silu")),
        bits(plain.linear(x, activation="silu")),
    )


def test_a_weight_is_compressed_where_that_pays() -> None:
    kernels.force_isa(kernels.supported_isas()[-1])
    normal = PackedWeight.pack(torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16())
    compact = normal.compact()
    if kernels.isa().startswith("avx512"):
        assert compact.format == "compressed bfloat16"
        assert 0.75 * normal.nbytes < compact.nbytes < 0.76 * normal.nbytes
    else:
        assert compact is normal
    assert (floats := PackedWeight.pack(torch.randn(32, 32))).compact() is floats
    kernels.force_isa("portable")
    assert normal.compact() is normal


def test_a_weight_that_is_not_compressed_moves_to_huge_pages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx512_bf16" not in kernels.supported_isas():
        pytest.skip("this processor has no level whose weights are compressed")
    kernels.force_isa("avx512_bf16")
    wide = PackedWeight.pack(random_bits(256, 512, 0))
    mapped: list[int] = []

    def zero_pages(nbytes: int, purpose: str) -> torch.Tensor:
        mapped.append(nbytes)
        return arena.zero_pages(nbytes, purpose)

    monkeypatch.setattr(packed_weight, "_slab", None)
    monkeypatch.setattr(packed_weight, "zero_pages", zero_pages)
    kept = wide.compact()
    assert kept.format == "bfloat16"
    assert torch.equal(kept.packed, wide.packed)
    assert len(mapped) == 1


def test_what_is_not_bf16_or_not_compressed_is_refused() -> None:
    with pytest.raises(ValueError, match="only a bfloat16 weight is compressed, this one is float32"):
        PackedWeight.pack(torch.ones(4, 4)).compressed()
    compressed = PackedWeight.pack(torch.ones(40, 8).bfloat16()).compressed()
    with pytest.raises(ValueError, match=f"compressed weight of 40 x 8 does not have {compressed.nbytes - 8} bytes"):
        PackedWeight(compressed.format, 40, 8, compressed.packed[:-8]).rows(torch.tensor([0]), torch.bfloat16)
    plain = PackedWeight.pack(trained(40, 8, 0))
    base, num_escapes, nbytes = native.plan_compression(plain.packed, 40, 8)
    assert num_escapes > 0
    with pytest.raises(ValueError, match=f"the weight has [0-9]+ escapes, not {num_escapes}"):
        plain._compress(base - 9, num_escapes, nbytes)
    with pytest.raises(ValueError, match="rows are put into a bfloat16 weight"):
        compressed.put(torch.ones(4, 8).bfloat16())
    with pytest.raises(ValueError, match="how large a compressed weight is depends on what it holds"):
        PackedWeight.empty("compressed bfloat16", 4, 4)
