"""What every codec promises: its bytes, its layout, and how far what is read lies from what was written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import KVArena
from octavo.storage.codec import CODECS, VectorCodec

NAMES = tuple(CODECS)
VECTOR_CODECS = {codec.format.name + str(i): codec for pair in CODECS.values() for i, codec in enumerate(pair)}
# The largest error of an element, as a share of the largest of its vector.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0.0, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}
TOLERANCE |= {"int8": 1.01 / 254, "nvfp4": 0.2}


def vectors(dim: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    x = torch.randn(7, 3, dim, generator=torch.Generator().manual_seed(seed))
    x[..., 0] *= spread  # keys have channels that are much larger than the others
    return x


def scale_of(codec: VectorCodec, x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax((0, 2)) / codec.largest


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(VECTOR_CODECS)),
    dim=st.sampled_from([8, 16, 24, 64, 80, 96, 128]),
    spread=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_what_is_read_is_within_the_codecs_error_of_what_was_written(
    name: str, dim: int, spread: float, seed: int
) -> None:
    codec, x = VECTOR_CODECS[name], vectors(dim, seed, spread)
    scale = scale_of(codec, x)
    coded = codec.encode(x, scale)
    assert coded.codes.dtype is torch.uint8
    assert coded.codes.shape[-1] == codec.format.code_bytes(dim)
    assert tuple(field.shape[-1] for field in coded.fields) == codec.format.field_bytes(dim)
    read = codec.decode(coded, dim, scale)
    error = (read - x).norm(dim=-1) if name.startswith("int4") else (read - x).abs().amax(-1)
    largest = x.norm(dim=-1) if name.startswith("int4") else x.abs().amax(-1)
    # int4 rounds the rotated vector: its error is spread over all elements.
    assert bool((error <= TOLERANCE.get(codec.format.name, 0.2) * largest).all())
    again = codec.encode(read, scale)
    if name.startswith(("float", "bfloat", "fp8")):  # others find other extremes in what was rounded
        assert torch.equal(codec.decode(again, dim, scale), read)


@pytest.mark.parametrize("name", sorted(VECTOR_CODECS))
def test_zeros_impulses_and_the_smallest_numbers_survive(name: str) -> None:
    codec = VECTOR_CODECS[name]
    one = torch.ones(2)
    assert not codec.decode(codec.encode(torch.zeros(1, 2, 64), one), 64, one).any()
    impulse = torch.zeros(1, 2, 64)
    impulse[..., 0] = 3.0
    read = codec.decode(codec.encode(impulse, one), 64, one)
    assert torch.allclose(read, impulse, atol=0.15)
    tiny = torch.full((1, 2, 64), 1e-42)
    assert codec.decode(codec.encode(tiny, one), 64, one).isfinite().all()


@pytest.mark.parametrize("name", sorted(VECTOR_CODECS))
def test_values_beyond_the_codes_range_saturate(name: str) -> None:
    codec, one = VECTOR_CODECS[name], torch.ones(1)
    read = codec.decode(codec.encode(torch.tensor([[[1e4, -1e6] + [0.5] * 14]]), one), 16, one)
    assert read.isfinite().all() or codec.format.name == "float16"
    assert read[0, 0, 0] > 400
    assert read[0, 0, 1] < -400


def test_fp8_reaches_448_and_57344() -> None:
    assert (VECTOR_CODECS["fp8_e4m30"].largest, VECTOR_CODECS["fp8_e5m20"].largest) == (448.0, 57344.0)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    block_size=st.sampled_from([1, 3, 8, 16, 48]),
    num_tokens=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_what_is_written_through_slots_is_gathered_through_the_table_in_every_codec(
    name: str, block_size: int, num_tokens: int, seed: int
) -> None:
    layers = [LayerKVSpec(2, 24, 16), LayerKVSpec(2, 24, 16)]
    num_blocks = -(-num_tokens // block_size)
    arena = KVArena(KVCacheSpec.build(layers, block_size, name), num_blocks + 2)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(num_blocks + 1, generator=generator)[:num_blocks] + 1
    positions = torch.randperm(num_tokens, generator=generator)
    slots = table[positions // block_size] * block_size + positions % block_size
    written = [torch.randn(2, num_tokens, 2, dim, generator=generator) for dim in (24, 16)]
    for i, layer in enumerate(arena.layers):
        layer.write(written[0][i][positions], written[1][i][positions], slots)
    for i, layer in enumerate(arena.layers):
        for read, codec, x in zip(layer.gather(table, num_tokens), CODECS[name], written, strict=True):
            one = torch.ones(2)
            assert torch.equal(read.float(), codec.decode(codec.encode(x[i], one), x.shape[-1], one))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_takes_the_bytes_that_the_plan_says_and_every_one_is_in_its_own_layer(name: str) -> None:
    layers = [LayerKVSpec(3, 80, 48), LayerKVSpec(3, 80, 48)]
    spec = KVCacheSpec.build(layers, 16, name)
    arena = KVArena(spec, 4)
    part = LayerKVSpec(3, 80, 48).block_bytes(KV_FORMATS[name], 16)
    assert spec.block_bytes == 2 * part
    x = torch.randn(16, 3, 80)
    arena.layers[1].write(x, x[..., :48], torch.arange(32, 48))
    touched = arena._bytes.ne(0)
    assert touched.any(dim=1).tolist() == [False, False, True, False]
    assert not touched[2, :part].any()
    assert touched[2, part:].count_nonzero() > 0.5 * part * (0.5 if name == "nvfp4" else 1)


@pytest.mark.parametrize(
    ("name", "of_64", "of_128"),
    [
        ("fp8_e4m3", 2.0, 2.0),
        ("fp8_e5m2", 2.0, 2.0),
        ("int8", 1.93, 1.96),
        ("k8v4", 2.53, 2.59),
        ("int4", 3.65, 3.82),
        ("nvfp4", 3.55, 3.55),
    ],
)
def test_as_many_more_tokens_fit_as_promised(name: str, of_64: float, of_128: float) -> None:
    for dim, least in ((64, of_64), (128, of_128)):
        layers = [LayerKVSpec(8, dim, dim)] * 4
        plain, coded = (KVCacheSpec.build(layers, 16, dtype).block_bytes for dtype in ("bfloat16", name))
        assert plain / coded >= least
        assert math.floor(1_000_000_000 / coded) >= least * math.floor(1_000_000_000 / plain) * 0.999
