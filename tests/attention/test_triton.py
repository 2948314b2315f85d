"""The Triton kernels against float64, in the interpreter on small batches, and on a GPU on large ones as well."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.attention import make_backend
from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import BlockLayout, FloatKV, KVArena
from tests.attention.batches import PagedSequences, set_scales
from tests.attention.oracle import oracle_attention
from tests.attention.triton_device import DEVICE, ON_GPU, needs_triton

pytestmark = needs_triton

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
BOTH = [BlockLayout.TOKENS, BlockLayout.PAIRS]
# Drawn here and not by Hypothesis, which a GPU machine need not have. Nearly each compiles kernels of its own there.
DRAWN = range(6 if ON_GPU else 4)


def paged(layer: LayerKVSpec, block_size: int, num_seqs: int, max_tokens: int, **options: Any) -> PagedSequences:
    return PagedSequences([layer], block_size, num_seqs, max_tokens, device=DEVICE, **options)


def fill(sequences: PagedSequences, batch: AttentionBatch, heads: int, seed: int) -> torch.Tensor:
    """Stores random keys and values for the step's tokens, by the kernel; returns random queries."""
    generator = torch.Generator().manual_seed(seed)
    layer, kv = sequences.spec.layers[0], sequences.kv[0]
    shapes = ((layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim), (heads, layer.key_dim))
    dtype = kv.key.dtype if isinstance(kv, FloatKV) else torch.float32
    key, value, query = (
        torch.randn(batch.num_tokens, *shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes
    )
    make_backend("triton", DEVICE).write(kv, key, value, batch)
    return query


def assert_right(
    sequences: PagedSequences, batch: AttentionBatch, query: torch.Tensor, rtol: float, **options: Any
) -> None:
    """Attends, and compares each sequence with the textbook's answer in float64."""
    kv = sequences.kv[0]
    scale = query.shape[2] ** -0.5
    actual = make_backend("triton", DEVICE).attend(kv, query, batch, scale=scale, **options)
    assert actual.dtype == query.dtype
    bounds, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    # Those of the oracle, on its device.
    theirs: dict[str, Any] = {
        name: option.cpu() if isinstance(option, torch.Tensor) else option for name, option in options.items()
    }
    for i, context in enumerate(contexts):
        key, value = kv.gather(batch.groups[0].block_tables[i].long(), context)
        expected = oracle_attention(
            query[bounds[i] : bounds[i + 1]].cpu(), key.cpu(), value.cpu(), scale=scale, window=kv.sliding_window,
            **theirs,
        )  # fmt: skip
        difference = actual[bounds[i] : bounds[i + 1]].cpu().double() - expected
        assert difference.norm() <= rtol * expected.norm(), (i, context)


def sinks_of(heads: int) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(heads)).to(DEVICE)


Shape = tuple[str, BlockLayout, tuple[int, int], int, int, int, "float | None", bool]


def shape_of(draw: random.Random) -> Shape:
    """Type, layout, dimensions, KV heads, query heads of each, tokens of a block, soft cap, and whether with sinks."""
    return (
        draw.choice(list(TOLERANCE)),
        draw.choice(BOTH),
        draw.choice([(64, 64), (128, 128), (80, 96), (256, 256), (16, 48)]),
        draw.randint(1, 8 if ON_GPU else 2),
        draw.choice([1, 3, 4, 8, 17]),
        draw.choice([16, 32, 48, 128]),
        draw.choice([None, 5.0]),
        draw.random() < 0.5,
    )


def lengths_of(draw: random.Random, most: int, most_seqs: int) -> list[int]:
    return [draw.randint(1, most) for _ in range(draw.randint(1, most_seqs))]


def check_decode(shape: Shape, contexts: list[int], window: int | None, seed: int) -> None:
    dtype, layout, dims, kv_heads, share, block_size, softcap, with_sinks = shape
    layer = LayerKVSpec(kv_heads, *dims, window)
    sequences = paged(layer, block_size, len(contexts), max(contexts), dtype=dtype, layout=layout, seed=seed)
    heads = kv_heads * share
    if any(context > 1 for context in contexts):
        fill(sequences, sequences.step({i: n - 1 for i, n in enumerate(contexts) if n > 1}), heads, seed)
    batch = sequences.step(dict.fromkeys(range(len(contexts)), 1))
    query = fill(sequences, batch, heads, seed + 1)
    sinks = sinks_of(heads) if with_sinks else None
    assert_right(sequences, batch, query, TOLERANCE[dtype], softcap=softcap, sinks=sinks)


def check_chunks(shape: Shape, first: list[int], more: list[int], window: int | None, seed: int) -> None:
    dtype, layout, dims, kv_heads, share, block_size, softcap, with_sinks = shape
    layer = LayerKVSpec(kv_heads, *dims, window)
    longest = max(first) + max(more)
    sequences = paged(layer, block_size, len(first), longest, dtype=dtype, layout=layout, seed=seed)
    heads = kv_heads * share
    sinks = sinks_of(heads) if with_sinks else None
    batch = sequences.step(dict(enumerate(first)))
    assert_right(sequences, batch, fill(sequences, batch, heads, seed), TOLERANCE[dtype], softcap=softcap, sinks=sinks)
    batch = sequences.step(dict(zip(range(len(first)), more, strict=False)))
    query = fill(sequences, batch, heads, seed + 1)
    assert_right(sequences, batch, query, TOLERANCE[dtype], softcap=softcap, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN)
def test_a_decode_agrees_with_float64(seed: int) -> None:
    draw = random.Random(seed)
    contexts = lengths_of(draw, 5000 if ON_GPU else 300, 64 if ON_GPU else 2)
    check_decode(shape_of(draw), contexts, draw.choice([None, 1, 100, 270]), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "contexts", "window"),
    [
        (("float32", BlockLayout.TOKENS, (64, 64), 2, 3, 16, None, True), [300, 5], None),
        (("bfloat16", BlockLayout.PAIRS, (80, 96), 1, 17, 48, 5.0, True), [300], 270),
    ],
    ids=["sinks", "window"],
)
def test_a_decode_over_several_splits_agrees_with_float64(
    shape: Shape, contexts: list[int], window: int | None
) -> None:
    check_decode(shape, contexts, window, 0)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 400])
def test_programs_find_their_split_in_any_batch(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are counted two at a time, one of them is a prompt, and the longest have two splits of 512 tokens."""
    from octavo.attention.triton import decode

    if not ON_GPU:  # where a vector of two would be a shape that no step has
        monkeypatch.setattr(decode, "_COUNTED", 2)
    monkeypatch.setattr(decode, "most_splits", lambda kv_heads: 2)
    # A recorded step launches more programs than there are splits.
    monkeypatch.setattr(decode, "max_splits", lambda *_: 17)
    sequences = paged(LayerKVSpec(1, 16, 16, window), 16, 5, 700, dtype="float16", layout=BlockLayout.TOKENS)
    fill(sequences, sequences.step({0: 699, 2: 300, 4: 512}), 2, 0)
    batch = sequences.step({0: 1, 1: 3, 2: 1, 3: 1, 4: 1})
    assert batch.total_decode_len == 700 + 301 + 1 + 513
    query = fill(sequences, batch, 2, 1)
    assert_right(sequences, batch, query, TOLERANCE["float16"], sinks=sinks_of(2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN)
def test_ragged_chunks_agree_with_float64(seed: int) -> None:
    draw = random.Random(100 + seed)
    first = lengths_of(draw, 2000 if ON_GPU else 24, 16 if ON_GPU else 2)
    more = lengths_of(draw, 2000 if ON_GPU else 20, 16 if ON_GPU else 2)
    check_chunks(shape_of(draw), first, more, draw.choice([None, 1, 7, 100, 270]), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "first", "more", "window"),
    [
        (("float16", BlockLayout.TOKENS, (16, 48), 2, 3, 16, None, False), [20, 40], [30, 1], 7),
        (("bfloat16", BlockLayout.PAIRS, (80, 96), 1, 17, 32, 5.0, True), [20, 1], [10, 1], 1),
    ],
    ids=["window", "sinks"],
)
def test_a_chunk_beside_a_decode_agrees_with_float64(
    shape: Shape, first: list[int], more: list[int], window: int
) -> None:
    check_chunks(shape, first, more, window, 0)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 60])
def test_a_chunk_over_several_tiles_agrees_with_float64(window: int | None) -> None:
    sequences = paged(LayerKVSpec(1, 16, 16, window), 16, 1, 400, dtype="float16", layout=BlockLayout.TOKENS)
    fill(sequences, sequences.step({0: 290}), 16, 0)
    batch = sequences.step({0: 4})
    assert_right(sequences, batch, fill(sequences, batch, 16, 1), TOLERANCE["float16"])


CODECS = ["fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4", "nvfp4"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_attention_over_codes_is_that_over_what_they_decode_to(codec: str) -> None:
    from octavo.attention.triton.backend import TritonAttention

    dims, window = ((80, 48), 30) if codec in ("fp8_e5m2", "int4", "nvfp4") else ((64, 32), None)
    sequences = paged(LayerKVSpec(2, *dims, window), 16, 2, 60, dtype=codec, layout=BlockLayout.TOKENS)
    (kv,) = sequences.kv
    if sequences.arena.calibrated_layers:
        set_scales(kv, torch.tensor([0.01, 0.02]), torch.tensor([0.03, 0.005]))
    assert TritonAttention.reads(kv)
    for step in ({0: 40}, {0: 1, 1: 9}):
        batch = sequences.step(step)
        query = fill(sequences, batch, 4, batch.num_tokens)
        assert_right(sequences, batch, query, TOLERANCE["float32"], sinks=sinks_of(4) if window else None)


def test_fp8_e4m3_is_read_without_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.attention.triton.launch.converts_e4m3", lambda: False)
    sequences = paged(LayerKVSpec(1, 16, 16), 16, 1, 30, dtype="fp8_e4m3", layout=BlockLayout.TOKENS)
    set_scales(sequences.kv[0], torch.tensor([0.01]), torch.tensor([0.5]))  # values among the smallest codes
    batch = sequences.step({0: 30})
    assert_right(sequences, batch, fill(sequences, batch, 1, 0), TOLERANCE["float32"])


@pytest.mark.parametrize(("layout", "size"), [(BlockLayout.PAIRS, 16), (BlockLayout.TOKENS, 3)])
def test_codes_that_lie_as_the_kernels_do_not_read_them_go_to_the_reference(layout: BlockLayout, size: int) -> None:
    from octavo.attention.triton.backend import TritonAttention

    sequences = paged(LayerKVSpec(1, 16, 16), size, 1, 9, dtype="int4", layout=layout)
    assert not TritonAttention.reads(sequences.kv[0])
    batch = sequences.step({0: 9})
    assert_right(sequences, batch, fill(sequences, batch, 1, 0), TOLERANCE["float32"])


def test_queries_that_are_part_of_a_wider_row_are_read_where_they_lie() -> None:
    sequences = paged(LayerKVSpec(1, 16, 16), 16, 2, 40, layout=BlockLayout.TOKENS)
    for step in ({0: 20, 1: 3}, {0: 1, 1: 1}):
        batch = sequences.step(step)
        query = fill(sequences, batch, 2, 0)
        wide = torch.full((batch.num_tokens, 64), float("nan"), device=DEVICE)
        wide[:, 32:] = query.view(-1, 32)
        assert_right(sequences, batch, wide[:, 32:].view(-1, 2, 16), TOLERANCE["float32"])


@pytest.mark.slow
def test_a_decodes_bits_do_not_depend_on_its_neighbours() -> None:
    def result(neighbours: list[int]) -> torch.Tensor:
        sequences = paged(LayerKVSpec(1, 16, 16), 16, 3, 600, dtype="float16", layout=BlockLayout.TOKENS)
        for i, length in enumerate([300, *neighbours]):
            fill(sequences, sequences.step({i: length}), 2, i)
        batch = sequences.step(dict.fromkeys(range(1 + len(neighbours)), 1))
        same = torch.linspace(-1, 1, 32, dtype=torch.float16, device=DEVICE).view(1, 2, 16)
        query = same.expand(batch.num_seqs, -1, -1).contiguous()
        backend = make_backend("triton", DEVICE)
        backend.write(sequences.kv[0], query[:, :1], query[:, 1:], batch)
        return backend.attend(sequences.kv[0], query, batch, scale=0.25)[0]

    assert torch.equal(result([]), result([520]))


@pytest.mark.skipif(ON_GPU, reason="a GPU would have to have the memory; here it is mapped, and never touched")
def test_blocks_more_than_2_to_the_31_elements_into_the_cache_are_written_and_read() -> None:
    spec = KVCacheSpec.build([LayerKVSpec(2, 256, 256)], 128, "int8")
    last = (1 << 31) // spec.block_bytes + 2
    kv = KVArena(spec, last + 1, DEVICE, BlockLayout.TOKENS).layers[0]
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 2, 256, generator=generator) for _ in range(2))
    backend, one = make_backend("triton", DEVICE), torch.ones(1, dtype=torch.int32)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 3], dtype=torch.int32),
        context_lens=3 * one,
        table_rows=torch.zeros(1, dtype=torch.int64),
        positions=torch.arange(3),
        groups=(GroupBatch(last * one.view(1, 1), last * 128 + torch.arange(3)),),
        num_seqs=1,
        num_tokens=3,
        max_query_len=3,
        max_context_len=3,
        total_decode_len=3,
    )
    backend.write(kv, key, value, batch)
    expected = make_backend("reference", DEVICE).attend(kv, key, batch, scale=0.1)
    assert expected.abs().sum() > 0
    assert torch.allclose(backend.attend(kv, key, batch, scale=0.1), expected, atol=1e-5)
    batch.query_start, batch.num_tokens, batch.max_query_len = torch.tensor([0, 1], dtype=torch.int32), 1, 1
    assert torch.allclose(backend.attend(kv, key[2:], batch, scale=0.1), expected[2:], atol=1e-5)


@pytest.mark.skipif(ON_GPU, reason="needs a CPU")
def test_the_triton_backend_on_a_cpu_asks_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.attention.triton.backend.INTERPRETED", False)
    with pytest.raises(ConfigError, match="set TRITON_INTERPRET=1"):
        make_backend("triton", "cpu")


def test_without_triton_the_backend_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.attention.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton"):
        make_backend("triton", "cuda")
    assert make_backend("auto", "cuda").name == "reference"
