"""The mass of attention that each block has, against a dense computation in float64."""

from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.attention.base import MASS_UNIT, AttentionBackend, MeasuredRows
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.kvcache.spec import LayerKVSpec
from octavo.storage.layer_kv import LayerKV
from tests.attention.batches import PagedSequences
from tests.levels import LEVELS

SIZE, HEADS, KV_HEADS, DIM = 16, 6, 2, 64
# New tokens of each sequence: a decode, a prompt's last rows, a prompt that begins here, and one that is not measured.
LENGTHS, NEW, MEASURED = (1300, 333, 40, 700), (1, 64, 40, 5), (True, True, True, False)


def dense(kv: LayerKV, table: torch.Tensor, query: torch.Tensor, length: int, softcap: float | None) -> torch.Tensor:
    """The mass of a sequence's blocks in attention of its last rows: float64 [blocks]."""
    key = kv.gather_heads(table[: -(-length // SIZE)], length)[0].double()  # [kv_heads, dim, keys]
    by_head = key.repeat_interleave(HEADS // KV_HEADS, dim=0)
    scores = query.double().transpose(0, 1) @ by_head * DIM**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length)
    scores = scores.masked_fill(positions > positions[-len(query) :, None], float("-inf"))
    weights = torch.nn.functional.pad(scores.softmax(-1), (0, -length % SIZE))
    return weights.view(HEADS, len(query), -1, SIZE).sum(-1).pow(4).sum((0, 1))


def measured(
    backend: AttentionBackend, dtype: str, softcap: float | None, *, in_parts: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The mass of each sequence's blocks as measured, and as it is; in parts, by steps of half of the new tokens."""
    floats = dtype if dtype in ("float32", "bfloat16") else "bfloat16"
    paged = PagedSequences([LayerKVSpec(KV_HEADS, DIM, DIM)], SIZE, len(LENGTHS), max(LENGTHS), dtype=dtype)
    stored = getattr(torch, floats)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        seq: [torch.randn(length, heads, DIM, generator=generator).to(stored) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for seq, length in enumerate(LENGTHS)
    }
    kv, found, expected = paged.kv[0], [torch.zeros(-(-n // SIZE), dtype=torch.int64) for n in LENGTHS], []
    done = dict.fromkeys(tensors, 0)
    befores = {seq: length - NEW[seq] for seq, length in enumerate(LENGTHS) if length > NEW[seq]}
    halves = [{seq: count // 2 for seq, count in enumerate(NEW) if count > 1}] if in_parts else []
    for number, ends in enumerate([befores, *halves, dict(enumerate(NEW))]):
        counts = ends if number == 0 else {seq: min(n, LENGTHS[seq] - done[seq]) for seq, n in ends.items()}
        batch = paged.step(counts)
        query, key, value = (
            torch.cat([tensors[seq][i][done[seq] : done[seq] + count] for seq, count in counts.items()])
            for i in range(3)
        )
        backend.write(kv, key, value, batch)
        for seq, count in counts.items():
            done[seq] += count
        if number == 0:  # only stored
            continue
        blocks = [-(-length // SIZE) for length in batch.context_lens.tolist()]
        begins = [sum(blocks[:i]) if MEASURED[seq] else -1 for i, seq in enumerate(counts)]
        batch.measured = MeasuredRows(torch.tensor(begins), torch.zeros(1, sum(blocks), dtype=torch.int64))
        backend.attend(kv, query, batch, scale=DIM**-0.5, softcap=softcap)
        for i, seq in enumerate(counts):
            mass = batch.measured.mass[0, sum(blocks[:i]) : sum(blocks[: i + 1])]
            found[seq][: blocks[i]] += mass
    for row, (seq, (query, _, _)) in enumerate(tensors.items()):
        mass = dense(kv, batch.groups[0].block_tables[row], query[-NEW[seq] :], LENGTHS[seq], softcap)
        expected.append(mass if MEASURED[seq] else torch.zeros_like(mass))
    return found, expected


def check(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for mass, of_blocks, count in zip(found, expected, NEW, strict=True):
        assert ((mass / MASS_UNIT - of_blocks).abs() <= tolerance * of_blocks + 1e-6 * count * HEADS).all()
        assert abs(mass.sum().item() / MASS_UNIT - of_blocks.sum().item()) < tolerance * count * HEADS


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_reference_measures_what_is_so(softcap: float | None) -> None:
    check(*measured(ReferenceAttention(), "float32", softcap), 1e-5)


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
@pytest.mark.usefixtures("restore_kernels")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3", "int4"])
def test_every_level_measures_what_is_so_whatever_the_chunks_and_threads(level: str, dtype: str) -> None:
    kernels.force_isa(level)
    tolerance = 1e-4 if dtype == "float32" else 4e-2
    for softcap in (None, 5.0):
        found, expected = measured(NativeAttention(), dtype, softcap)
        check(found, expected, tolerance)
    kernels.set_num_threads(1)
    for mass, in_parts in zip(found, measured(NativeAttention(), dtype, softcap, in_parts=True)[0], strict=True):
        assert torch.equal(mass, in_parts)


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
def test_mass_without_room_is_refused_with_the_numbers() -> None:
    paged = PagedSequences([LayerKVSpec(KV_HEADS, DIM, DIM)], SIZE, 1, 40)
    batch = paged.step({0: 40})
    batch.measured = MeasuredRows(torch.tensor([1]), torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="room for 3 blocks, but sequence 0 has 3 from 1"):
        NativeAttention().attend(paged.kv[0], torch.zeros(40, HEADS, DIM), batch, scale=1.0)
