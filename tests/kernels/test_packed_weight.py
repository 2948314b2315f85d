"""Products with packed weights against float64 at every instruction-set level, and their promise about bits."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.kernels import PackedWeight
from octavo.kernels.library import native
from tests.levels import HAS_BOTH_TILES, LEVELS

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]
FLOATS = [torch.bfloat16, torch.float32]
QUANTISED = sorted(kernels.QUANTISED_FORMATS)
# Of the numbers in fp16, in a stored block of types that the gguf package does not quantise to.
HIGH_BYTES = {
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q4_K": (1, 3),
    "Q5_K": (1, 3),
    "Q6_K": (209,),
    "IQ4_NL": (1,),
    "IQ4_XS": (1,),
}
LARGER_THAN_STORED = ("Q3_K", "Q4_K", "Q5_K", "IQ4_XS")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

every_level = pytest.mark.parametrize("level", LEVELS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS)
every_quant = pytest.mark.parametrize("name", QUANTISED)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < TOLERANCE[actual.dtype], error


def stored_blocks(name: Any, outputs: int, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a random weight as a GGUF file holds them, and its exact values in float64."""
    kind = gguf.GGMLQuantizationType[name]
    if name in HIGH_BYTES:  # random blocks with ordinary scales
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, 256, (outputs, inputs // size, block_bytes), dtype=np.uint8)
        for at in HIGH_BYTES[name]:
            drawn[..., at] = rng.integers(0x18, 0x20, drawn.shape[:2], dtype=np.uint8)
        blocks = drawn.reshape(outputs, -1)
    else:
        blocks = gguf.quantize(randn(outputs, inputs, dtype=torch.float32, seed=seed).numpy(), kind)
    return torch.from_numpy(blocks), torch.from_numpy(gguf.dequantize(blocks, kind)).double()


def whole_blocks(name: Any, inputs: int) -> int:
    """`inputs`, or as many more as the format's blocks need."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    return -(-inputs // size) * size


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """See csrc/level/quant.h: 32 activations are integers times 1 / 127 of the largest of them, and where these steps
    are coarse compared with the row's others, remainders are rounded to finer ones.
    """
    groups = x.float().unflatten(-1, (-1, 32))
    rounded = _rounded_groups(groups)
    squares = (groups.abs().amax(-1, keepdim=True) / 127.0) ** 2
    coarse = squares > squares.sum(-2, keepdim=True) * max(0.34, 2.0 / groups.shape[-2])
    rest = _rounded_groups((groups.double() - rounded).float())
    return (rounded + torch.where(coarse, rest, 0.0)).flatten(-2)


def _rounded_groups(groups: torch.Tensor) -> torch.Tensor:
    largest = groups.abs().amax(-1, keepdim=True)
    steps = (groups * torch.where(largest >= 2.0**-90, torch.tensor(127.0) / largest, 0.0)).round()
    return steps.double() * (largest.double() / 127.0)


@every_level
@every_dtype
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 40),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 130),
    with_bias=st.booleans(),
    wide_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_agree_with_float64(
    level: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int, with_bias: bool, wide_out: bool, seed: int
) -> None:
    kernels.force_isa(level)
    out_dtype = torch.float32 if wide_out else dtype
    x, weight = randn(rows, inputs, dtype=dtype, seed=seed), randn(outputs, inputs, dtype=dtype, seed=seed + 1)
    bias = randn(outputs, dtype=out_dtype, seed=seed + 2) if with_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    out = torch.empty(rows, outputs, dtype=out_dtype)
    assert_close(PackedWeight.pack(weight).linear(x, bias, out), expected)


@every_level
@every_dtype
@every_quant
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(0, 20),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 9),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_quantised_products_agree_with_float64(
    level: str, dtype: torch.dtype, name: Any, rows: int, outputs: int, blocks: int, with_bias: bool, seed: int
) -> None:
    kernels.force_isa(level)
    inputs = whole_blocks(name, blocks * 32)
    stored, exact = stored_blocks(name, outputs, inputs, seed)
    weight = PackedWeight.pack_quantised(name, stored, inputs)
    x = randn(rows, inputs, dtype=dtype, seed=seed)
    bias = randn(outputs, dtype=dtype, seed=seed) if with_bias else None
    expected = rounded_to_int8(x) @ exact.T + (0.0 if bias is None else bias.double())
    assert_close(weight.linear(x, bias), expected)


@every_level
@every_quant
def test_the_largest_quants_times_the_largest_activations_do_not_overflow(level: str, name: Any) -> None:
    kernels.force_isa(level)
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    x = torch.ones(4, 256)
    x[1], x[2, ::2], x[3, 128:] = -1, -1, -1
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        drawn = np.full((32, 256 // size, block_bytes), byte, dtype=np.uint8)
        for at in HIGH_BYTES.get(name, (1, 3) if name.endswith("_1") else (1,)):
            if name != "MXFP4":
                drawn[..., at] = 0x20
        if name == "MXFP4":
            drawn[..., 0] = 120
        blocks = drawn.reshape(32, -1)
        values = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])).double()
        out = PackedWeight.pack_quantised(name, torch.from_numpy(blocks), 256).linear(x)
        assert_close(out, x.double() @ values.T)


@every_level
@every_dtype
@every_quant
def test_blocks_of_a_row_keep_their_precision_beside_larger_ones(level: str, dtype: torch.dtype, name: Any) -> None:
    kernels.force_isa(level)
    inputs = whole_blocks(name, 32 * 6)
    stored, exact = stored_blocks(name, 40, inputs, seed=3)
    weight = PackedWeight.pack_quantised(name, stored, inputs)
    x = randn(9, inputs, dtype=torch.float32, seed=4)
    scale = torch.tensor([1.0, 2.0**-3, 1e-4, 1e4, 0.0, 2.0**-30, 0.0, 0.0]).repeat_interleave(32)[:inputs]
    x = (x * scale).to(dtype)
    x[8] = 0.0
    x[7] *= 1e-30
    got = weight.linear(x)
    assert_close(got, rounded_to_int8(x) @ exact.T)
    assert torch.equal(got[8], torch.zeros_like(got[8]))
    for block in range(4):
        alone = torch.zeros_like(x)
        alone[:, block * 32 : block * 32 + 32] = x[:, block * 32 : block * 32 + 32]
        close = (weight.linear(alone).double() - alone.double() @ exact.T).norm() / (alone.double() @ exact.T).norm()
        assert close < 0.02, close


@every_level
@every_quant
def test_numbers_keep_their_precision_beside_outliers_of_other_rows_and_their_own(level: str, name: Any) -> None:
    kernels.force_isa(level)
    inputs = whole_blocks(name, 32 * 9)
    stored, exact = stored_blocks(name, 40, inputs, seed=3)
    weight = PackedWeight.pack_quantised(name, stored, inputs)
    x = randn(9, inputs, dtype=torch.float32, seed=4)
    outliers = torch.zeros_like(x)
    outliers[0, 5], outliers[3, 5], outliers[3, 70], outliers[4, 200] = 100.0, -100.0, 90.0, -90.0
    got = weight.linear(x + outliers)
    error = (got.double() - (x.double() + outliers) @ exact.T).norm(dim=1) / (x.double() @ exact.T).norm(dim=1)
    assert error.max() < 0.02  # where an outlier's group has its step alone, 0.07 and more
    for row in range(9):
        assert torch.equal(weight.linear((x + outliers)[row : row + 1])[0], got[row])


@every_level
@every_dtype
@every_quant
def test_a_row_with_no_number_spoils_itself_alone(level: str, dtype: torch.dtype, name: Any) -> None:
    kernels.force_isa(level)
    inputs = whole_blocks(name, 96)
    weight = PackedWeight.pack_quantised(name, stored_blocks(name, 40, inputs, seed=3)[0], inputs)
    x = randn(11, inputs, dtype=dtype, seed=4)
    sound = weight.linear(x)
    for poison, place in itertools.product((math.nan, math.inf, -math.inf), (0, 17, 95)):
        x[5] = 1.0
        x[5, place] = poison
        got = weight.linear(x)
        assert got[5].isnan().all()
        assert torch.equal(got[:5], sound[:5])
        assert torch.equal(got[6:], sound[6:])


@every_level
@every_dtype
@pytest.mark.parametrize("name", ["own", *QUANTISED])
def test_a_gated_product_has_the_bits_of_a_product_and_a_gate(level: str, dtype: torch.dtype, name: Any) -> None:
    kernels.force_isa(level)
    if name == "own":
        name, inputs = kernels.FLOAT_FORMATS[dtype], 64
        gate, up = (randn(48, inputs, dtype=dtype, seed=seed) for seed in (1, 2))
    else:
        inputs = whole_blocks(name, 64)
        gate, up = (stored_blocks(name, 48, inputs, seed)[0] for seed in (1, 2))
    fused = PackedWeight.empty(name, 96, inputs)
    fused.put(gate, 0, 2)
    fused.put(up, 16, 2)
    plain = PackedWeight.empty(name, 96, inputs)
    plain.put(torch.cat([gate, up]))
    x, bias = randn(30, inputs, dtype=dtype, seed=0), randn(96, dtype=dtype, seed=3)
    interleaved = bias.view(2, 3, 16).transpose(0, 1).reshape(-1)
    activations: list[Any] = ["silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2"]
    for activation in activations:
        assert torch.equal(fused.linear(x, activation=activation), kernels.gate(plain.linear(x), activation))
        with_bias = fused.linear(x, interleaved, activation=activation)
        assert torch.equal(with_bias, kernels.gate(plain.linear(x, bias), activation))


@every_level
def test_a_rows_products_have_the_same_bits_in_any_batch_and_thread_count(level: str) -> None:
    kernels.force_isa(level)
    x = randn(210, 256, dtype=torch.bfloat16, seed=0)
    weights = [PackedWeight.pack(randn(300, 256, dtype=torch.bfloat16, seed=1))]
    weights += [PackedWeight.pack_quantised(name, stored_blocks(name, 300, 256, 2)[0], 256) for name in QUANTISED]
    cases = [(weight, x) for weight in weights]
    cases.append((PackedWeight.pack(randn(300, 256, dtype=torch.float32, seed=1)), x.float()))
    for weight, inputs in cases:
        kernels.set_num_threads(1)
        whole = weight.linear(inputs)
        for threads in (1, 2, 3, 6):  # up to four, each packs rows for itself
            kernels.set_num_threads(threads)
            assert torch.equal(weight.linear(inputs), whole)
            for start, stop in ((0, 1), (69, 70), (3, 5), (5, 10), (1, 8), (8, 20), (20, 33), (6, 70), (1, 200)):
                part = weight.linear(inputs[start:stop])
                assert torch.equal(part, whole[start:stop]), (weight.format, threads, start, stop)


@every_dtype
@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=4), inputs=st.integers(1, 70))
def test_rows_come_back_as_they_were_put_wherever_they_lie(dtype: torch.dtype, parts: list[int], inputs: int) -> None:
    whole = randn(sum(parts), inputs, dtype=dtype, seed=0)
    weight, first = PackedWeight.empty(kernels.FLOAT_FORMATS[dtype], len(whole), inputs), 0
    for part in whole.split(parts):
        weight.put(part, first)
        first += len(part)
    ids = torch.randperm(len(whole))
    assert torch.equal(weight.rows(ids, dtype), whole[ids])
    assert torch.equal(weight.packed, PackedWeight.pack(whole).packed)


@every_dtype
@every_quant
def test_quantised_rows_come_back_dequantised(dtype: torch.dtype, name: Any) -> None:
    inputs = whole_blocks(name, 96)
    stored, exact = stored_blocks(name, 50, inputs, seed=0)
    weight = PackedWeight.pack_quantised(name, stored, inputs)
    assert torch.equal(weight.rows(torch.arange(50), dtype), exact.float().to(dtype))


@every_quant
def test_a_quantised_weight_is_as_large_as_in_its_file_or_a_few_hundredths_larger(name: Any) -> None:
    inputs = whole_blocks(name, 96)
    stored, _ = stored_blocks(name, 64, inputs, seed=0)
    weight = PackedWeight.pack_quantised(name, stored, inputs)
    if name == "MXFP4":  # of three blocks the last has a header of its own
        assert weight.nbytes == stored.nbytes + 64 // 32 * 32
    elif name in LARGER_THAN_STORED:
        assert stored.nbytes < weight.nbytes < 1.04 * stored.nbytes
    else:
        assert weight.nbytes == stored.nbytes


def test_strided_and_unaligned_rows_multiply_alike() -> None:
    wide = randn(9, 201, dtype=torch.bfloat16, seed=0)
    weight = PackedWeight.pack(randn(40, 64, dtype=torch.bfloat16, seed=1))
    out = torch.zeros(9, 100, dtype=torch.bfloat16)
    weight.linear(wide[:, 3:67], out=out[:, 5:45])
    assert torch.equal(out[:, 5:45], weight.linear(wide[:, 3:67].contiguous()))
    assert not out[:, :5].any()
    assert not out[:, 45:].any()
    assert torch.equal(weight.linear(wide[2:3, 3:67]), out[2:3, 5:45])


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedWeight.pack(bf16(8, 4)).linear(bf16(1, 5)), r"packed must have shape \[384\], got"),
        (lambda: PackedWeight.pack(bf16(8, 4)).linear(torch.zeros(1, 4)), "x must have the weight's dtype, bfloat16"),
        (lambda: PackedWeight.pack(bf16(8, 4)).linear(bf16(1, 4), bf16(7)), r"bias must have shape \[8\]"),
        (lambda: PackedWeight.pack(bf16(8, 4)).linear(bf16(1, 4), out=bf16(1, 9)), r"out must have shape \[1, 8\]"),
        (lambda: PackedWeight.pack(bf16(8, 4)).linear(bf16(1, 4), activation="silu"), "a multiple of 32 outputs"),
        (lambda: PackedWeight.pack(bf16(32, 4)).linear(bf16(1, 4), activation="snake"), "'snake' is not one of silu"),  # type: ignore[arg-type]
        (lambda: PackedWeight.pack(bf16(8, 4)).rows(torch.tensor([8]), torch.bfloat16), r"ids\[0\] is 8, must be in"),
        (lambda: PackedWeight.pack(bf16(8, 4)).put(bf16(3, 4), 6), "rows end at output 8 of 8"),
        (lambda: PackedWeight.pack(bf16(8, 4)).put(bf16(2, 4), 2**63 - 1), "2 rows from output 9223372036854775807"),
        (lambda: PackedWeight.pack(bf16(64, 4)).put(bf16(32, 4), 2**63 - 32, 2), "32 rows from output 92233720368"),
        (lambda: PackedWeight.pack(bf16(8, 1)).put(bf16(1, 1).expand(2**58, 1), 0, 64), "rows from output 0 do not"),
        (lambda: PackedWeight.pack(bf16(8, 4)).put(bf16(1, 4), 3, 2), "cannot be placed from output 3 in steps of 2"),
        (lambda: PackedWeight.pack(bf16(8, 4).half()), "must be bfloat16 or float32, got torch.float16"),
        (lambda: PackedWeight.pack_quantised("Q4_0", torch.zeros(2, 35).byte(), 64), "rows must have shape"),
        (lambda: PackedWeight.pack_quantised("Q4_0", torch.zeros(2, 36).byte(), 60), "a multiple of 32, got 60"),
        (lambda: PackedWeight.pack_quantised("Q5_K", torch.zeros(2, 36).byte(), 64), "a multiple of 256, got 64"),
        (lambda: PackedWeight.pack_quantised("Q8_K", torch.zeros(2, 36).byte(), 64), "'Q8_K' is not one of bfloat16"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_bad_argument_is_a_value_error_with_the_numbers(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("base", "num_escapes"), [(-1, 0), (241, 0), (120, -1), (120, 2**61 - 8), (120, 8 * 4 + 1)])
def test_a_plan_of_compression_that_no_weight_can_have_is_refused(base: int, num_escapes: int) -> None:
    weight = PackedWeight.pack(bf16(8, 4))
    _, _, nbytes = native.plan_compression(weight.packed, 8, 4)
    # The bytes that the plan asks for, in 64 bits that wrap around.
    out = torch.zeros((nbytes + num_escapes * 8) % 2**64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"cannot be compressed from exponent {base} with {num_escapes} escapes"):
        native.compress(weight.packed, 8, 4, base, num_escapes, out)


tiles = pytest.mark.parametrize("level", [level for level in LEVELS if level.startswith("amx")])


@tiles
@every_quant
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(64, 90),
    outputs=st.integers(1, 100),
    blocks=st.integers(1, 9),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_many_rows_times_dequantised_tiles_agree_with_float64(
    level: str, name: Any, rows: int, outputs: int, blocks: int, with_bias: bool, seed: int
) -> None:
    kernels.force_isa(level)
    inputs = whole_blocks(name, blocks * 32)
    stored, exact = stored_blocks(name, outputs, inputs, seed)
    weight = PackedWeight.pack_quantised(name, stored, inputs)
    x = randn(rows, inputs, dtype=torch.bfloat16, seed=seed)
    bias = randn(outputs, dtype=torch.bfloat16, seed=seed) if with_bias else None
    expected = x.double() @ exact.float().bfloat16().double().T + (0.0 if bias is None else bias.double())
    assert_close(weight.linear(x, bias, exact=False), expected)


@pytest.mark.skipif(not HAS_BOTH_TILES, reason="this CPU has no AMX, or the emulation is not built")
@pytest.mark.parametrize("inputs", [33, 64, 96, 576])
def test_emulated_tiles_have_the_bits_of_the_processors(inputs: int) -> None:
    stored = [PackedWeight.pack_quantised(name, stored_blocks(name, 70, 256, 1)[0], 256) for name in QUANTISED]
    floats = PackedWeight.pack(randn(70, inputs, dtype=torch.bfloat16, seed=1))
    for weight in (floats, floats.compressed(), *stored):
        for rows in (1, 15, 16, 17, 33, 70):
            x = randn(rows, weight.inputs, dtype=torch.bfloat16, seed=rows)
            x[rows // 2, 3] = 1e-39  # subnormal
            results = []
            for level in ("amx", "amx_emulated"):
                kernels.force_isa(level)
                out = torch.empty(rows, 70, dtype=torch.float32)
                results.append(weight.linear(x, out=out, exact=rows < 64))
            if weight.format in ("bfloat16", "compressed bfloat16") or rows >= 64:
                assert torch.equal(*results), (weight.format, rows)


@every_quant
@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_damaged_scale_is_refused_when_it_is_packed(name: Any, scale: float) -> None:
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    stored, _ = stored_blocks(name, 40, 3 * size, seed=0)
    if name == "MXFP4":
        stored[33, block_bytes] = 255  # E8M0 has no other number that is none
    else:
        at = block_bytes + HIGH_BYTES.get(name, (1,))[0] - 1
        stored[33, at : at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match="row 33 has a scale in block 1 that is infinite or not a number"):
        PackedWeight.pack_quantised(name, stored, 3 * size)


@every_level
def test_flushing_subnormals_in_the_calling_thread_changes_no_bits(level: str) -> None:
    kernels.force_isa(level)
    weight = PackedWeight.pack(randn(300, 64, dtype=torch.float32, seed=1) * 1e-20)
    x = randn(40, 64, dtype=torch.float32, seed=2) * 1e-20
    kernels.set_num_threads(2)
    expected = weight.linear(x)
    assert torch.count_nonzero(expected)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    try:
        got = weight.linear(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, expected)


def test_flushing_subnormals_in_the_calling_thread_leaves_rows_with_a_subnormal_scale() -> None:
    blocks = torch.ones(8, 34, dtype=torch.uint8)
    blocks[:, :2] = torch.tensor([1, 0], dtype=torch.uint8)  # a scale of 2^-24 in float16
    weight = PackedWeight.pack_quantised("Q8_0", blocks, 32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    try:
        rows = weight.rows(torch.tensor([3]), torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(rows, torch.full((1, 32), 2.0**-24))


@pytest.mark.slow
def test_a_product_never_takes_the_activations_of_another_kind_of_weight() -> None:
    # In a process of its own, where both kinds of product have been called equally often.
    program = """
import torch
from octavo.kernels import PackedWeight

blocks = torch.zeros(64, 2, 34, dtype=torch.uint8)
blocks[:, :, :2] = torch.tensor([0, 60], dtype=torch.uint8)  # a scale of 1 in float16
for i in range(64):
    blocks[i, i // 32, 2 + i % 32] = 1
whole = PackedWeight.pack(torch.eye(64))
quantised = PackedWeight.pack_quantised("Q8_0", blocks.flatten(1), 64)
ones, twos = torch.full((4, 64), 1.0), torch.full((4, 64), 2.0)
for _ in range(3):
    assert torch.equal(whole.linear(ones), ones)
    assert torch.allclose(quantised.linear(twos), twos)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
