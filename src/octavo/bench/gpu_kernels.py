"""A GPU's limits, and the kernels as a share of them, beside torch's own where it has the same.

decode    bytes of the context's keys and values, each once, over the time of the call: a share of copy bandwidth
prefill   4 * num_heads * head_dim operations for each pair of query and key that it sees: a share of the rate of a
          large matrix product
others    bytes that must be read and written, over the time of the call: a share of copy bandwidth
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from octavo.attention import make_backend
from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.models.ops import Heads
from octavo.models.rotary import Rotation
from octavo.models.triton_ops import TritonLayerOps
from octavo.sampling.triton_draw import draw_rows
from octavo.storage.arena import FloatKV, KVArena
from octavo.storage.block_copy import copy_blocks


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is that is measured; `SMALL` is for a trial of the code in Triton's interpreter."""

    copy_bytes: int
    matrix: int
    heads: tuple[int, int, int]
    decode: tuple[int, int]
    prefill: int
    rows: tuple[int, int, int, int]
    dtype: torch.dtype


FULL = Sizes(1 << 30, 8192, (32, 8, 128), (64, 4000), 8000, (4096, 14336, 128256, 1024), torch.bfloat16)
"""Llama 3.1 8B's heads (query, key-value, dimension); decode: sequences and context; prefill: tokens; rows: widths of
hidden states, of the gated activation and of logits, and blocks of 64 KiB that are copied."""
SMALL = Sizes(1 << 16, 64, (4, 2, 32), (2, 300), 20, (32, 48, 300, 2), torch.float16)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at best: bytes read and written per second by a copy, operations per second in products."""

    copy_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One shape of a kernel's call.

    Attributes:
        share: of the limit that binds this shape.
        torch_seconds: of `scaled_dot_product_attention` over contiguous keys and values of the same length; None where
            torch has nothing of the kind.
    """

    name: str
    seconds: float
    share: float
    torch_seconds: float | None = None


def seconds_per_call(call: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """The median of five rounds' means, after a warm-up."""
    for _ in range(3 if repeats > 1 else 1):
        call()
    rounds = []
    for _ in range(5 if repeats > 1 else 1):
        _wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait(device)
        rounds.append((time.perf_counter() - started) / repeats)
    return statistics.median(rounds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_limits(device: torch.device, sizes: Sizes, *, repeats: int = 20) -> Limits:
    source, target = (torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copying = seconds_per_call(lambda: target.copy_(source), device, repeats=repeats)
    # Random values: products of zeros draw less power and run faster.
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(sizes.dtype) for _ in range(2))
    multiplying = seconds_per_call(lambda: a @ b, device, repeats=repeats)
    return Limits(2 * sizes.copy_bytes / copying, 2 * sizes.matrix**3 / multiplying)


@torch.inference_mode()
def measure_attention(
    device: torch.device, sizes: Sizes, limits: Limits, *, block_size: int = 16, repeats: int = 20
) -> list[KernelRow]:
    """Decode and prefill over shuffled blocks."""
    num_seqs, context = sizes.decode
    query_heads, _, dim = sizes.heads
    decode = _Call(device, sizes, num_seqs, 1, context, block_size)
    took = seconds_per_call(decode.ours, device, repeats=repeats)
    rate = decode.kv_bytes / took / limits.copy_bandwidth
    rows = [KernelRow(f"decode {num_seqs} x {context}", took, rate, decode.torch_seconds(repeats))]
    del decode
    count = sizes.prefill
    prefill = _Call(device, sizes, 1, count, count, block_size)
    took = seconds_per_call(prefill.ours, device, repeats=repeats)
    operations = 4 * query_heads * dim * count * (count + 1) / 2
    rows.append(
        KernelRow(f"prefill {count}", took, operations / took / limits.matrix_rate, prefill.torch_seconds(repeats))
    )
    return rows


@torch.inference_mode()
def measure_kernels(
    device: torch.device, sizes: Sizes, limits: Limits, *, repeats: int = 20, codecs: Sequence[str] | None = None
) -> list[KernelRow]:
    """The other kernels, in the shapes of a step of `sizes.decode` sequences, and decodes over codecs: all, or some."""
    rows: list[KernelRow] = []

    def add(name: str, num_bytes: int, call: Callable[[], object]) -> None:
        took = seconds_per_call(call, device, repeats=repeats)
        rows.append(KernelRow(name, took, num_bytes / took / limits.copy_bandwidth))

    count, context = sizes.decode
    hidden, wide, vocab, blocks = sizes.rows
    element = sizes.dtype.itemsize
    x = torch.randn(count, hidden, device=device).to(sizes.dtype)
    weight, gate_up = torch.ones_like(x[0]), torch.randn(count, 2 * wide, device=device).to(sizes.dtype)
    ops = TritonLayerOps()
    add("rms_norm", 2 * x.nbytes, lambda: ops.rms_norm(x, weight, 1e-5))
    add("add_rms_norm", 4 * x.nbytes, lambda: ops.add_rms_norm(x, x, weight, 1e-5))
    add("gated activation", 3 * count * wide * element, lambda: ops.gate(gate_up, "silu"))
    arena = torch.zeros(2 * blocks, 1 << 16, dtype=torch.uint8, device=device)
    copies = [(i, blocks + i) for i in range(blocks)]
    add("copy blocks", arena.nbytes, lambda: copy_blocks(arena, copies))
    logits = torch.randn(count, vocab, device=device)
    for name, top_k, top_p in (("draw all", 0.0, 1.0), ("draw top_k, top_p", 50.0, 0.9)):
        table = torch.tensor([[0.5, 1.0, -torch.inf, top_p, top_k, 0.0]], dtype=torch.float64).repeat(count, 1)
        on_device = table.to(device)
        add(name, logits.nbytes, lambda table=on_device: draw_rows(logits, table))  # type: ignore[misc]
    for codec in [name for name, format in KV_FORMATS.items() if not format.plain] if codecs is None else codecs:
        call = _Call(device, sizes, count, 1, context, 16, codec=codec)
        add(f"decode {codec}", call.kv_bytes, call.ours)
        add(f"rotate and store {codec}", call.stored_bytes, call.store)
    return rows


class _Call:
    """`num_seqs` sequences with `queries` new tokens each at the end of `context`, over blocks in random order."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        num_seqs: int,
        queries: int,
        context: int,
        block_size: int,
        codec: str | None = None,
    ) -> None:
        query_heads, kv_heads, dim = sizes.heads
        self._device, self._backend = device, make_backend("triton", device)
        name = codec or str(sizes.dtype).removeprefix("torch.")
        spec = KVCacheSpec.build([LayerKVSpec(kv_heads, dim, dim)], block_size, name)
        blocks = spec.blocks_for_tokens(context)
        self._arena = KVArena(spec, 1 + num_seqs * blocks, device, self._backend.layout)
        (kv,) = self._arena.layers
        self._kv, self._heads = kv, Heads(query_heads, kv_heads, dim, dim)
        if isinstance(kv, FloatKV):
            kv.key.normal_()
            kv.value.normal_()
        ids = torch.randperm(num_seqs * blocks, device=device) + 1
        self._query = torch.randn(num_seqs * queries, query_heads, dim, device=device).to(sizes.dtype)
        self._scale, self._queries, self._num_seqs, self._context = dim**-0.5, queries, num_seqs, context
        tokens = num_seqs * queries
        slots = ids.view(num_seqs, blocks)[:, -1].repeat_interleave(queries) * block_size
        self._qkv = torch.randn(tokens, (query_heads + 2 * kv_heads) * dim, device=device).to(sizes.dtype)
        angles = torch.zeros(context, dim // 2, device=device)
        self._batch = AttentionBatch(
            query_start=torch.arange(0, num_seqs * queries + 1, queries, dtype=torch.int32, device=device),
            context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
            table_rows=torch.arange(num_seqs, device=device),
            positions=torch.arange(context - queries, context, device=device).repeat(num_seqs),
            groups=(GroupBatch(ids.view(num_seqs, blocks).int(), slots),),
            num_seqs=num_seqs,
            num_tokens=num_seqs * queries,
            max_query_len=queries,
            max_context_len=context,
        )
        self._rotation = Rotation(angles.cos(), angles.sin(), self._batch.positions)
        of_token = spec.bytes_per_token
        self.kv_bytes = num_seqs * context * of_token
        # Queries are written back; keys and values are read once, and stored.
        self.stored_bytes = self._qkv.nbytes + tokens * (query_heads * dim * sizes.dtype.itemsize + of_token)

    def ours(self) -> torch.Tensor:
        return self._backend.attend(self._kv, self._query, self._batch, scale=self._scale)

    def store(self) -> torch.Tensor:
        return TritonLayerOps().rotate_and_store(
            self._qkv, self._heads, None, self._rotation, self._kv, self._batch, self._backend
        )

    def torch_seconds(self, repeats: int) -> float:
        """Of torch's attention over keys and values that lie contiguously, which is what it can read."""
        _, heads, dim = self._query.shape
        query = self._query.view(self._num_seqs, self._queries, heads, dim).transpose(1, 2)
        shape = (self._num_seqs, self._heads.kv_heads, self._context, dim)
        key, value = (torch.randn(shape, device=self._device).to(query.dtype) for _ in range(2))
        causal = self._queries > 1
        return seconds_per_call(
            lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True),
            self._device,
            repeats=repeats,
        )
