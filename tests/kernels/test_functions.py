"""The row-wise kernels against float64 at every instruction-set level; loading, threads and bad arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.models.ops import ACTIVATIONS
from octavo.storage.arena import KVArena
from tests.levels import LEVELS

compiled = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _restore_level_and_threads() -> Iterator[None]:
    if not kernels.available():
        yield
        return
    level, threads = kernels.isa(), kernels.num_threads()
    yield
    kernels.force_isa(level)
    kernels.set_num_threads(threads)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < TOLERANCE[actual.dtype], error


shapes = given(rows=st.integers(0, 70), width=st.integers(1, 700), seed=st.integers(0, 99))
every_level = pytest.mark.parametrize("level", LEVELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
few_examples = settings(max_examples=20, deadline=None)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@compiled
@every_level
@every_dtype
@few_examples
@shapes
def test_rms_norm_agrees_with_float64_with_and_without_a_residual(
    level: str, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    kernels.force_isa(level)
    x, residual = randn(rows, width, dtype=dtype, seed=seed), randn(rows, width, dtype=dtype, seed=seed + 1)
    weight = randn(width, dtype=dtype, seed=seed + 2)

    def exact(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_close(kernels.rms_norm(x, weight, 1e-5), exact(x.double()))
    total = x.clone()
    normal = kernels.add_rms_norm(total, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normal, exact(total.double()))


@compiled
def test_rms_norm_rounds_where_transformers_does() -> None:
    x, weight = randn(64, 576, dtype=torch.bfloat16, seed=0), randn(576, dtype=torch.bfloat16, seed=1)
    wide = x.double()
    normal = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).float().bfloat16()
    assert (kernels.rms_norm(x, weight, 1e-5) == weight * normal).float().mean() > 0.999
    precise = weight.float() + 1e-3  # of float32, so that the row is rounded after it, and only then
    once = (precise.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).float().bfloat16()
    assert (kernels.rms_norm(x, precise, 1e-5) == once).float().mean() > 0.999


@compiled
@every_level
@every_dtype
@few_examples
@shapes
def test_gated_activations_agree_with_float64(level: str, dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    kernels.force_isa(level)
    gate_up = randn(rows, 2 * width, dtype=dtype, seed=seed) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    for name, activation in ACTIVATIONS.items():
        expected = activation(gate) * up
        # Relative to what is multiplied too: far below zero the activation itself is nothing, in float32 exactly so.
        scale = torch.maximum((gate * up).norm(), expected.norm()).clamp_min(1e-30)
        assert (kernels.gate(gate_up, cast(Any, name)).double() - expected).norm() / scale < TOLERANCE[dtype]


@compiled
@every_level
def test_activations_saturate_without_nan(level: str) -> None:
    kernels.force_isa(level)
    gate_up = torch.tensor([[-1e30, -200.0, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for name, activation in ACTIVATIONS.items():
        expected = activation(gate_up[:, :6].double()).float()
        torch.testing.assert_close(kernels.gate(gate_up, cast(Any, name)), expected, atol=1e-7, rtol=1e-6)


@compiled
@every_level
@every_dtype
@few_examples
@given(rows=st.integers(0, 5), width=st.integers(1, 40_000), threads=st.integers(1, 3), data=st.data())
def test_argmax_is_the_first_of_the_largest(
    level: str, dtype: torch.dtype, rows: int, width: int, threads: int, data: st.DataObject
) -> None:
    kernels.force_isa(level)
    kernels.set_num_threads(threads)
    logits = randn(rows, width, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    logits[:, data.draw(st.integers(0, width - 1))] = 9.0
    logits[:, data.draw(st.integers(0, width - 1))] = 9.0
    logits[:, data.draw(st.integers(0, width - 1))] = float("-inf")
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert kernels.argmax(logits).tolist() == expected


@compiled
@every_level
@pytest.mark.parametrize("threads", [1, 3])
def test_argmax_is_the_first_nan(level: str, threads: int) -> None:
    kernels.force_isa(level)
    kernels.set_num_threads(threads)
    logits = torch.zeros(4, 40_000)
    logits[0, 70] = 5.0
    logits[0, 86] = float("nan")
    logits[0, 30_000] = float("nan")
    logits[1, 33_001] = float("nan")
    logits[1, 33_002] = float("inf")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    assert kernels.argmax(logits).tolist() == [86, 33_001, 0, 0]
    assert kernels.argmax(logits[:1]).tolist() == [86]
    assert kernels.argmax(logits[1:2]).tolist() == [33_001]


@compiled
@every_level
@pytest.mark.parametrize("width", [100, 100_000])
@pytest.mark.parametrize("largest", [5, -1])
def test_argmax_finds_a_subnormal_number_where_the_calling_thread_flushes_them(
    level: str, width: int, largest: int
) -> None:
    kernels.force_isa(level)
    kernels.set_num_threads(2)
    logits = torch.zeros(1, width)
    logits[0, largest] = 1e-40
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    try:
        found = kernels.argmax(logits).item()
    finally:
        torch.set_flush_denormal(False)
    assert found == largest % width


def layer_cache(dtype: torch.dtype, kv_heads: int, key_dim: int, value_dim: int, block_size: int = 16) -> KVArena:
    spec = KVCacheSpec.build([LayerKVSpec(kv_heads, key_dim, value_dim)], block_size, str(dtype).removeprefix("torch."))
    return KVArena(spec, num_blocks=9)


@compiled
@every_level
@every_dtype
@pytest.mark.parametrize("with_norm", [False, True])
@few_examples
@given(
    tokens=st.integers(1, 60),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 4),
    dims=st.sampled_from([(64, 64, 64), (32, 48, 32), (80, 80, 40), (128, 64, 20)]),
    seed=st.integers(0, 99),
)
def test_rope_write_rotates_and_stores(
    level: str,
    dtype: torch.dtype,
    with_norm: bool,
    tokens: int,
    kv_heads: int,
    share: int,
    dims: tuple[int, int, int],
    seed: int,
) -> None:
    kernels.force_isa(level)
    key_dim, value_dim, rotary_dim = dims
    arena = layer_cache(dtype, kv_heads, key_dim, value_dim)
    kv = arena.float_layers[0]
    heads, generator = kv_heads * share, torch.Generator().manual_seed(seed)
    qkv = randn(tokens, heads * key_dim + kv_heads * (key_dim + value_dim), dtype=dtype, seed=seed)
    angles = torch.rand(100, rotary_dim // 2, generator=generator) * 6
    positions = torch.randint(100, (tokens,), generator=generator)
    slots = torch.randperm(arena.num_blocks * 16, generator=generator)[:tokens]
    norms: dict[str, Any] = {
        "query_norm": randn(key_dim, dtype=dtype, seed=1),
        "key_norm": randn(key_dim, dtype=dtype, seed=2),
    }
    query, key, value = qkv.clone().split([heads * key_dim, kv_heads * key_dim, kv_heads * value_dim], dim=-1)

    def exact(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = heads.reshape(tokens, -1, key_dim).double()
        if with_norm:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        cos, sin = angles[positions].double().cos()[:, None], angles[positions].double().sin()[:, None]
        first, second = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]), dim=-1)

    chosen = norms if with_norm else {}
    kernels.rope_write(qkv, *kv.for_kernels, angles.cos(), angles.sin(), positions, slots, eps=1e-6, **chosen)
    assert_close(qkv[:, : heads * key_dim].view(tokens, heads, key_dim), exact(query, norms["query_norm"]))
    stored_key, stored_value = kv.gather(torch.arange(arena.num_blocks), arena.num_blocks * 16)
    assert_close(stored_key[slots], exact(key, norms["key_norm"]))
    assert torch.equal(stored_value[slots], value.view(tokens, kv_heads, value_dim))
    untouched = torch.ones(arena.num_blocks * 16, dtype=torch.bool).index_fill(0, slots, False)
    assert not stored_key[untouched].any()
    assert not stored_value[untouched].any()


@compiled
@pytest.mark.parametrize("threads", [2, 3])
def test_row_wise_bits_do_not_depend_on_threads(threads: int) -> None:
    x, weight = randn(500, 576, dtype=torch.bfloat16, seed=0), randn(576, dtype=torch.bfloat16, seed=1)
    kernels.set_num_threads(1)
    expected = kernels.rms_norm(x, weight, 1e-5), kernels.gate(x, "silu")
    kernels.set_num_threads(threads)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), expected[0])
    assert torch.equal(kernels.gate(x, "silu"), expected[1])


@compiled
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.rms_norm(torch.zeros(2, 8).half(), torch.ones(8), 1e-5), "x must be bfloat16 or float32"),
        (lambda: kernels.rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-5), r"weight must have shape \[8\]"),
        (lambda: kernels.rms_norm(torch.zeros(8, 2).t(), torch.ones(8), 1e-5, torch.zeros(2, 8)), "last one contig"),
        (lambda: kernels.gate(torch.zeros(2, 7), "silu"), r"gate_up must have shape \[2, 6\], got float32 \[2, 7\]"),
        (lambda: kernels.argmax(torch.zeros(2, 0)), "no columns"),
        (lambda: kernels.set_num_threads(0), "between 1 and 1024, got 0"),
        (lambda: kernels.force_isa("sse9"), "'sse9' is not one of portable, amx_emulated, avx2, avx2_vnni, avx512"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_a_value_error_with_the_numbers(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@compiled
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([0, 144])}, r"slots\[1\] is 144, must be in \[0, 144\)"),
        ({"slots": torch.tensor([-1, 0])}, r"slots\[0\] is -1"),
        ({"positions": torch.tensor([0, 50])}, r"positions\[1\] is 50, must be in \[0, 50\)"),
        ({"qkv": torch.zeros(2, 4 * 32 + 1)}, "no number of query heads"),
        ({"cos": torch.zeros(50, 17), "sin": torch.zeros(50, 17)}, "cos has 17 frequencies"),
        ({"key_norm": torch.ones(31)}, r"key_norm must have shape \[32\]"),
    ],
)
def test_rope_write_refuses_what_does_not_exist(change: dict[str, Any], message: str) -> None:
    kv = layer_cache(torch.float32, 1, 32, 32).float_layers[0]
    good: dict[str, Any] = {
        "qkv": torch.zeros(2, 4 * 32),
        "keys": kv.key,
        "values": kv.value,
        "cos": torch.zeros(50, 16),
        "sin": torch.zeros(50, 16),
        "positions": torch.tensor([0, 1]),
        "slots": torch.tensor([0, 1]),
    }
    kernels.rope_write(**good)
    with pytest.raises(ValueError, match=message):
        kernels.rope_write(**{**good, **change})


def in_a_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=600
    )


@compiled
def test_the_emulated_level_is_compiled_for_tests() -> None:
    assert "amx_emulated" in kernels.supported_isas(), (
        "run `make install`, which compiles it: an ordinary installation does without"
    )


@pytest.mark.slow
@compiled
def test_the_environment_forces_a_level() -> None:
    level = kernels.supported_isas()[0]  # the last would be chosen without it
    result = in_a_fresh_process("from octavo import kernels; print(kernels.isa())", OCTAVO_ISA=level)
    assert result.stdout.split() == [level], result.stderr


@pytest.mark.slow
@compiled
def test_a_level_that_does_not_exist_is_a_clear_error() -> None:
    result = in_a_fresh_process("from octavo import kernels", OCTAVO_ISA="mmx")
    assert result.returncode != 0
    assert "OCTAVO_ISA" in result.stderr
    assert "'mmx' is not one of portable, amx_emulated, avx2, avx2_vnni, avx512" in result.stderr


@pytest.mark.slow
def test_without_the_library_the_reference_attends_and_one_warning_says_so() -> None:
    code = """
import sys, logging
logging.basicConfig(format="%(levelname)s %(message)s")
sys.modules["octavo._native"] = None  # an import of it now fails
from octavo import kernels
from octavo.attention.native import NativeAttention
from tests.attention.test_native import PagedSequences, LayerKVSpec, fill, ReferenceAttention, torch
assert not kernels.available() and not kernels.available()
sequences = PagedSequences([LayerKVSpec(1, 64, 64)], 16, 1, 40)
batch = sequences.step({0: 40})
query = fill(sequences, batch, 3)
actual = NativeAttention().attend(sequences.kv[0], query, batch, scale=0.125)
assert torch.equal(actual, ReferenceAttention().attend(sequences.kv[0], query, batch, scale=0.125))
try:
    kernels.argmax(torch.zeros(1, 2))
except RuntimeError as error:
    print(error)
"""
    result = in_a_fresh_process(code)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("WARNING") == 1
    assert "the C++ kernels are not compiled" in result.stderr
    assert "argmax: the C++ kernels are not compiled" in result.stdout
