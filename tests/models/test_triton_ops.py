"""The Triton kernels between the matrix products round as the plain steps do."""

from __future__ import annotations

import pytest
import torch

from octavo.attention.reference import ReferenceAttention
from octavo.kvcache.spec import LayerKVSpec
from octavo.models.ops import Heads, LayerOps, NormWeights, QKNorm
from octavo.models.rotary import Rotation
from octavo.storage.arena import BlockLayout
from tests.attention.batches import PagedSequences, set_scales
from tests.attention.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

# Relative, of the whole tensor: sums of squares come in another order, and the interpreter cuts off where it should
# round to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert (actual.double() - expected.double()).norm() <= TOLERANCE[expected.dtype] * expected.double().norm()


def triton_ops() -> LayerOps:
    from octavo.models.triton_ops import TritonLayerOps

    return TritonLayerOps()


def norm_weights(dim: int, dtype: torch.dtype, seed: int) -> NormWeights:
    return NormWeights(randn(dim, dtype=dtype, seed=seed), None, 1e-6)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@DTYPES
def test_normalisation_with_and_without_a_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(70, 96, dtype=dtype), randn(70, 96, dtype=dtype, seed=1), randn(96, dtype=dtype))
    ours, plain = triton_ops(), LayerOps()
    assert_near(ours.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    expected, expected_sum = plain.add_rms_norm(x, residual, weight, 1e-5)
    normalised, total = ours.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert_near(total, expected_sum)
    assert_near(normalised, expected)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
def test_a_gated_activation(dtype: torch.dtype, activation: str) -> None:
    gate_up = randn(5, 2 * 1100, dtype=dtype)
    expected = LayerOps().gate(gate_up, activation)
    assert_near(triton_ops().gate(gate_up, activation), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dim", "rotary", "with_norm", "layout"),
    [
        (torch.float32, 64, 64, False, BlockLayout.TOKENS),
        (torch.bfloat16, 128, 128, True, BlockLayout.TOKENS),
        (torch.float16, 80, 40, True, BlockLayout.PAIRS),
    ],
)
def test_heads_are_normalised_rotated_and_stored(
    dtype: torch.dtype, dim: int, rotary: int, with_norm: bool, layout: BlockLayout
) -> None:
    from octavo.attention.triton.backend import TritonAttention

    heads, value_dim = Heads(6, 2, dim, 48), 48
    angles = torch.arange(200.0, device=DEVICE)[:, None] * torch.linspace(0.01, 1, rotary // 2, device=DEVICE)
    norm = QKNorm(norm_weights(dim, dtype, 2), norm_weights(dim, dtype, 3)) if with_norm else None
    name = str(dtype).removeprefix("torch.")
    found = []
    for ops in (LayerOps(), triton_ops()):
        layer = LayerKVSpec(2, dim, value_dim)
        sequences = PagedSequences([layer], 16, 2, 60, dtype=name, device=DEVICE, layout=layout)
        for step in ({0: 37, 1: 5}, {0: 3, 1: 40}):
            batch, kv = sequences.step(step), sequences.kv[0]
            qkv = randn(batch.num_tokens, 8 * dim + 2 * value_dim, dtype=dtype, seed=batch.num_tokens)
            rotation = Rotation(angles.cos(), angles.sin(), batch.positions)
            query = ops.rotate_and_store(qkv, heads, norm, rotation, kv, batch, TritonAttention(DEVICE))
            found.append(query.clone())
        found += kv.gather(batch.groups[0].block_tables[0].long(), 40)
        found += kv.gather(batch.groups[0].block_tables[1].long(), 45)
    half = len(found) // 2
    for expected, actual in zip(found[:half], found[half:], strict=True):
        assert_near(actual, expected)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4", "nvfp4"])
def test_keys_and_values_are_encoded_on_the_way_as_the_codec_does(codec: str) -> None:
    from octavo.attention.triton.backend import TritonAttention

    dim, value_dim, count = (64, 32, 19) if codec == "nvfp4" else (48, 24, 19)
    rotary = dim // 2
    norm = QKNorm(norm_weights(dim, torch.float32, 2), norm_weights(dim, torch.float32, 3))
    angles = torch.arange(60.0, device=DEVICE)[:, None] * torch.linspace(0.01, 1, rotary // 2, device=DEVICE)
    qkv = randn(count, 6 * dim + 2 * dim + 2 * value_dim, dtype=torch.float32)
    qkv *= torch.tensor([0.01, 1.0, 300.0, 0.0], device=DEVICE)[torch.arange(count) % 4, None]
    stored, queries = [], []
    for fused, ops in ((False, LayerOps()), (True, triton_ops())):
        sequences = PagedSequences(
            [LayerKVSpec(2, dim, value_dim)], 16, 1, 60, dtype=codec, device=DEVICE, layout=BlockLayout.TOKENS
        )
        (kv,) = sequences.kv
        if sequences.arena.calibrated_layers:
            set_scales(kv, torch.tensor([0.5, 0.02]), torch.tensor(0.1))
        attention = TritonAttention(DEVICE)
        assert attention.encoder(kv) is not None
        batch = sequences.step({0: count})
        rotation = Rotation(angles.cos(), angles.sin(), batch.positions)
        # The first time as `LayerOps` does it, over the codec's own form.
        given = ReferenceAttention() if not fused else attention
        query = ops.rotate_and_store(qkv.clone(), Heads(6, 2, dim, value_dim), norm, rotation, kv, batch, given)
        queries.append(query)
        stored.append(sequences.arena.read_blocks(range(1, 3)))
        if not fused:
            key, value = (side.reshape(count, 2, -1) for side in qkv.split([6 * dim, 2 * dim, 2 * value_dim], -1)[1:])
            attention.write(kv, key, value, batch)
            apart = sequences.arena.read_blocks(range(1, 3))
            kv.write(key, value, batch.groups[0].slot_mapping)
            assert_same_codes(apart, sequences.arena.read_blocks(range(1, 3)), codec)
    assert_near(queries[1], queries[0])
    assert_same_codes(stored[1], stored[0], codec)


def assert_same_codes(actual: torch.Tensor, expected: torch.Tensor, codec: str) -> None:
    """To the byte where no sum comes before the rounding; what is rotated first may now and then be a code beside."""
    different = (actual != expected).float().mean()
    assert different <= (0.01 if codec in ("int4", "k8v4") else 0.002)
