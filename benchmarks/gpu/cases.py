"""Launches of all Triton kernels in the shapes of real models, with memory that is never touched.

They are meant for `gpu_compile.compile_all`. A size of 1 is a separate case, because Triton specialises on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.attention.triton import rows
from octavo.attention.triton.backend import TritonAttention
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.models.ops import Heads, NormWeights, QKNorm
from octavo.models.rotary import Rotation
from octavo.models.triton_ops import TritonLayerOps
from octavo.sampling.triton_choice import draw_rows
from octavo.storage.arena import KVArena
from octavo.storage.block_copy import copy_blocks

Case = tuple[str, Callable[[], object]]

_PLAIN = ("bfloat16", "float16", "float32")
_CODECS = ("fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4", "nvfp4")
_BATCHES = {"decode": (5, 1), "one decode": (1, 1), "chunks": (5, 100), "one chunk": (1, 100)}


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Yield cases of every kernel; with `quick`, in few shapes and types."""
    yield from _attention(quick)
    yield from _stores(quick)
    yield from _rows(quick)
    for count, name in ((1, "draw a row"), (5, "draw")):
        table = torch.zeros(count, 6, dtype=torch.float64)
        yield name, partial(draw_rows, torch.zeros(count, 128256), table)
    yield "draw, masked", partial(draw_rows, torch.zeros(5, 128256), table, torch.zeros(5, 4008, dtype=torch.int32))
    blocks = torch.zeros(8, 4096, dtype=torch.uint8)
    yield "copy blocks", lambda: copy_blocks(blocks, blocks, [(1, 2)])
    large = torch.empty(2, 1 << 30, dtype=torch.uint8)
    yield "copy one block of a GiB", lambda: copy_blocks(large, large, [(0, 1)])


def _attention(quick: bool) -> Iterator[Case]:
    for batch in _BATCHES:
        yield f"{batch} bfloat16 128", partial(_attend, "bfloat16", (128, 128), batch)
    yield "decode k8v4 128", partial(_attend, "k8v4", (128, 128), "decode")
    if quick:
        return
    for batch in ("decode", "chunks"):
        for codec in _CODECS:
            for dim in (64, 80, 128, 256):
                if (batch, codec, dim) == ("decode", "k8v4", 128):
                    continue
                yield f"{batch} {codec} {dim}", partial(_attend, codec, (dim, dim), batch)
        for name in _PLAIN:
            for dim in (64, 80, 128, 192, 256):
                if (name, dim) != ("bfloat16", 128):
                    yield f"{batch} {name} {dim}", partial(_attend, name, (dim, dim), batch)
        yield f"{batch} bfloat16 192, 128", partial(_attend, "bfloat16", (192, 128), batch)
        yield f"{batch} window", partial(_attend, "bfloat16", (128, 128), batch, window=1000)
        yield f"{batch} softcap", partial(_attend, "bfloat16", (256, 256), batch, window=4096, softcap=50.0)
        yield f"{batch} sinks", partial(_attend, "bfloat16", (64, 64), batch, window=128, sinks=True, share=8)
        yield f"{batch} share 1", partial(_attend, "bfloat16", (128, 128), batch, share=1)
        yield f"{batch} share 16", partial(_attend, "bfloat16", (128, 128), batch, share=16)


def _stores(quick: bool) -> Iterator[Case]:
    for name in ("bfloat16", "k8v4") if quick else (*_PLAIN, *_CODECS):
        for count in (1,) if quick else (1, 300):
            yield f"store {name} x {count}", partial(_store, name, count)
            yield f"rotate and store {name} x {count}", partial(_rotate, name, count)
    if not quick:
        yield "rotate and store, normalised", partial(_rotate, "bfloat16", 5, norm=True)
        yield "rotate and store, a part", partial(_rotate, "bfloat16", 5, norm=True, dim=80, rotary=40)


def _rows(quick: bool) -> Iterator[Case]:
    for name in _PLAIN[:1] if quick else _PLAIN:
        dtype: torch.dtype = getattr(torch, name)
        for width in (4096,) if quick else (576, 4096, 8192, 16384):
            for count in (5,) if quick else (1, 5):
                x, weight = torch.zeros(count, width, dtype=dtype), torch.zeros(width, dtype=dtype)
                yield f"rms_norm {name} {count} x {width}", partial(rows.rms_norm, x, weight, 1e-5)
                yield f"add_rms_norm {name} {count} x {width}", partial(rows.add_rms_norm, x, x.clone(), weight, 1e-5)
        for gelu in (False, True):
            gate_up = torch.zeros(5, 2 * 14336, dtype=dtype)
            yield f"gate {name} {'gelu' if gelu else 'silu'}", partial(rows.gate, gate_up, gelu=gelu)


class _LayerCase:
    """One layer of a cache and a batch of `num_seqs` sequences with `queries` new tokens each."""

    def __init__(
        self,
        name: str,
        dims: tuple[int, int],
        num_seqs: int,
        queries: int,
        kv_heads: int = 8,
        window: int | None = None,
    ) -> None:
        spec = KVCacheSpec.build([LayerKVSpec(kv_heads, *dims, window)], 16, name)
        self.backend = TritonAttention("cuda")
        (self.kv,) = KVArena(spec, 4, "cpu", self.backend.layout).layers
        self.dtype: torch.dtype = getattr(torch, name) if spec.plain else torch.bfloat16
        tokens = num_seqs * queries
        self.batch = AttentionBatch(
            query_start=torch.zeros(num_seqs + 1, dtype=torch.int32),
            context_lens=torch.zeros(num_seqs, dtype=torch.int32),
            table_rows=torch.zeros(num_seqs, dtype=torch.int64),
            positions=torch.zeros(tokens, dtype=torch.int64),
            groups=(GroupBatch(torch.zeros(64, 512, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)),),
            num_seqs=num_seqs,
            num_tokens=tokens,
            max_query_len=queries,
            max_context_len=4000,
            total_decode_len=4000 * num_seqs,
        )


def _attend(
    name: str, dims: tuple[int, int], batch: str, *, share: int = 4, sinks: bool = False, window: int | None = None,
    **options: Any,
) -> None:  # fmt: skip
    step = _LayerCase(name, dims, *_BATCHES[batch], window=window)
    query = torch.zeros(step.batch.num_tokens, 8 * share, dims[0], dtype=step.dtype)
    for longest in (4000, 200):  # with several splits, and with one
        step.batch.max_context_len = longest
        of_sinks = torch.zeros(8 * share, dtype=step.dtype) if sinks else None
        step.backend.attend(step.kv, query, step.batch, scale=0.1, sinks=of_sinks, **options)


def _store(name: str, count: int) -> None:
    step = _LayerCase(name, (128, 128), 1, count)
    rows = torch.zeros(count, 8, 128, dtype=step.dtype)
    step.backend.write(step.kv, rows, rows, step.batch)


def _rotate(name: str, count: int, *, norm: bool = False, dim: int = 128, rotary: int = 128) -> None:
    step = _LayerCase(name, (dim, dim), 1, count)
    angles = torch.zeros(4096, rotary // 2)
    weights = NormWeights(torch.zeros(dim, dtype=step.dtype), None, 1e-6)
    TritonLayerOps().rotate_and_store(
        torch.zeros(count, (32 + 8 + 8) * dim, dtype=step.dtype),
        Heads(32, 8, dim, dim),
        QKNorm(weights, weights) if norm else None,
        Rotation(angles, angles, step.batch.positions),
        step.kv,
        step.batch,
        step.backend,
    )
