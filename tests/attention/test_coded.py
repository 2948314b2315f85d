"""The fused kernels over coded keys and values agree with the reference, at every instruction-set level."""

from __future__ import annotations

import random

import pytest
import torch

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import KVArena
from tests.attention.batches import PagedSequences, set_scales

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")

CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4")


@pytest.mark.parametrize("codec", CODECS)
def test_attention_over_codes_is_that_over_what_they_decode_to(level: str, codec: str) -> None:
    chance = random.Random(level + codec)
    # Queries that have been rotated are rounded to bf16, except a decode's: scores reach 30 here.
    bf16_error = 4e-2 if codec == "int4" else 2e-2
    for dims, group, window, softcap in ((64, 3, None, None), (80 if codec == "int4" else 128, 1, 70, 20.0)):
        value_dim = 64 if dims == 80 else dims
        paged = PagedSequences([LayerKVSpec(2, dims, value_dim, window)], 16, 3, 700, dtype=codec)
        (kv,) = paged.kv
        set_scales(kv, torch.tensor([0.02, 0.5]), torch.tensor(0.03))
        sinks = torch.randn(2 * group) if window else None
        for step in ({0: 600, 1: 40, 2: 5}, {0: 1, 1: 1, 2: 1}, {1: 19, 2: 1}):
            batch = paged.step(step)
            x = torch.randn(batch.num_tokens, 2, dims) * chance.choice([1.0, 3.0])
            x[..., 0] *= 8
            kv.write(x, torch.randn(batch.num_tokens, 2, value_dim), batch.groups[0].slot_mapping)
            for dtype, error in ((torch.float32, 2e-3), (torch.bfloat16, bf16_error)):
                query = torch.randn(batch.num_tokens, 2 * group, dims).to(dtype)
                how = {"scale": dims**-0.5, "softcap": softcap, "sinks": sinks}
                assert NativeAttention.supports(kv)
                found = NativeAttention(exact=chance.random() < 0.5).attend(kv, query, batch, **how)
                expected = ReferenceAttention().attend(kv, query, batch, **how)
                assert torch.allclose(found.float(), expected.float(), atol=error, rtol=error)


@pytest.mark.parametrize("codec", CODECS)
def test_attention_over_codes_of_latents_is_that_over_what_they_decode_to(level: str, codec: str) -> None:
    torch.manual_seed(0)
    paged = PagedSequences([LayerKVSpec(1, 576, 512)], 16, 1, 80, dtype=codec)
    (kv,) = paged.kv
    set_scales(kv, torch.tensor([0.02]), torch.tensor(0.03))
    for count in (70, 1):
        batch = paged.step({0: count})
        kv.write(torch.randn(count, 1, 576), torch.randn(count, 1, 512), batch.groups[0].slot_mapping)
        query = torch.randn(count, 5, 576).bfloat16()
        found, expected = (
            backend.attend(kv, query, batch, scale=576**-0.5) for backend in (NativeAttention(), ReferenceAttention())
        )
        assert torch.allclose(found.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_encoded_on_the_way_to_the_bit(level: str, codec: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    spec = KVCacheSpec.build([LayerKVSpec(2, 80, 96)], 16, codec)
    found, expected = (KVArena(spec, 4) for _ in range(2))
    tokens = 37
    qkv = torch.randn(tokens, 6 * 80 + 2 * (80 + 96)) * torch.tensor([0.01, 1.0, 300.0])[torch.arange(tokens) % 3, None]
    qkv[5] = 0.0
    qkv = qkv.to(dtype)
    slots = torch.randperm(48)[:tokens] + 16
    keys, values = qkv[:, 480:640].view(-1, 2, 80), qkv[:, 640:].view(-1, 2, 96)
    for arena in (found, expected):
        set_scales(arena.coded_layers[0], torch.tensor([0.5, 0.02]), torch.tensor(0.1))
    layer = found.coded_layers[0]
    # An angle of zero rotates nothing: what is stored is what was projected.
    still, flat = torch.ones(1, 40), torch.zeros(1, 40)
    kernels.rope_write(qkv.clone(), *layer.for_kernels, still, flat, torch.zeros(tokens).long(), slots)
    expected.layers[0].write(keys, values, slots)
    assert torch.equal(found._bytes, expected._bytes)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_what_is_not_finite_has_the_references_codes(level: str, codec: str) -> None:
    spec = KVCacheSpec.build([LayerKVSpec(1, 16, 32)], 16, codec)
    found, expected = (KVArena(spec, 2) for _ in range(2))
    # bf16 has a NaN of either sign, and an operation in torch may give the negative one.
    odd = torch.tensor([0x7FC0, -1, 0x7F80, -0x80], dtype=torch.int16).view(torch.bfloat16)
    assert odd.isnan().tolist() == [True, True, False, False]
    qkv = torch.randn(4, 16 + 16 + 32).bfloat16()
    qkv[range(4), [32, 40, 50, 63]] = odd
    layer, slots = found.coded_layers[0], torch.arange(4) + 16
    for arena in (found, expected):
        set_scales(arena.coded_layers[0], torch.tensor([0.5]), torch.tensor([0.1]))
    kernels.rope_write(qkv, *layer.for_kernels, torch.ones(1, 8), torch.zeros(1, 8), torch.zeros(4).long(), slots)
    expected.layers[0].write(qkv[:, None, 16:32], qkv[:, None, 32:], slots)
    assert torch.equal(layer.values.codes, expected.coded_layers[0].values.codes)
    read, wanted = (arena.layers[0].gather(torch.tensor([1]), 4)[1] for arena in (found, expected))
    assert torch.allclose(read, wanted, rtol=0, atol=0, equal_nan=True)


def test_what_no_kernel_reads_goes_to_the_reference() -> None:
    for codec, layer, size in (
        ("nvfp4", LayerKVSpec(2, 64, 64), 16),
        ("int8", LayerKVSpec(2, 24, 64), 16),
        ("int8", LayerKVSpec(2, 64, 64), 8),
        ("int4", LayerKVSpec(2, 64, 48), 16),
        ("int4/int8", LayerKVSpec(2, 64, 64), 16),
        ("fp8_e4m3/int8", LayerKVSpec(2, 64, 64), 16),
        ("bfloat16/int8", LayerKVSpec(2, 64, 64), 16),
    ):
        assert not NativeAttention.supports(KVArena(KVCacheSpec.build([layer], size, codec), 2).layers[0])


def test_the_kernels_refuse_what_does_not_fit() -> None:
    layer = KVArena(KVCacheSpec.build([LayerKVSpec(2, 64, 64)], 16, "int8"), 2).coded_layers[0]
    other = KVArena(KVCacheSpec.build([LayerKVSpec(2, 64, 64)], 16, "fp8_e4m3"), 2).coded_layers[0]
    floats = KVArena(KVCacheSpec.build([LayerKVSpec(2, 64, 64)], 16, "float32"), 2).float_layers[0]
    query, one = torch.zeros(1, 4, 64), torch.zeros(1, dtype=torch.int32)
    batched = (query, one.view(1, 1), one.long(), torch.tensor([0, 1]).int(), one + 1)
    (keys, values), codes, scale = layer.for_kernels, layer.keys.codes, layer.keys.fields[0]
    for sides, message in (
        ((keys, other.for_kernels[1]), "keys in int8 do not go with values in fp8_e4m3"),
        ((other.for_kernels[0], values), "keys in fp8_e4m3 do not go with values in int8"),
        ((floats.key, values), "keys in floats do not go with values in int8"),
        ((keys, floats.value), "keys in int8 do not go with values in floats"),
        ((("nvfp4", codes, scale, None, None), values), "'nvfp4' is not one of"),
        ((("int8", codes, None, None, None), values), "must have the fields of their codec"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.attend(*sides, *batched, out=torch.empty_like(query), scale=1.0)
