"""A GPU's limits, and the attention kernels as a share of them, beside torch's own attention.

decode    bytes of the context's keys and values, each once, over the time of the call: a share of copy bandwidth
prefill   4 * num_heads * head_dim operations for each pair of query and key that it sees: a share of the rate of a
          large matrix product
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from octavo.attention import make_backend
from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import FloatKV, KVArena


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is that is measured; `SMALL` is for a trial of the code in Triton's interpreter."""

    copy_bytes: int
    matrix: int
    heads: tuple[int, int, int]
    decode: tuple[int, int]
    prefill: int
    dtype: torch.dtype


FULL = Sizes(1 << 30, 8192, (32, 8, 128), (64, 4000), 8000, torch.bfloat16)
"""Llama 3.1 8B's heads (query, key-value, dimension); decode: sequences and context; prefill: tokens."""
SMALL = Sizes(1 << 16, 64, (4, 2, 16), (2, 300), 20, torch.float16)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at best: bytes read and written per second by a copy, operations per second in products."""

    copy_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One shape of an attention call.

    Attributes:
        share: of the limit that binds this shape.
        torch_seconds: of `scaled_dot_product_attention` over contiguous keys and values of the same length.
    """

    name: str
    seconds: float
    share: float
    torch_seconds: float


def seconds_per_call(call: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """The least mean of three rounds, after a warm-up."""
    for _ in range(3 if repeats > 1 else 1):
        call()
    best = float("inf")
    for _ in range(3 if repeats > 1 else 1):
        _wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        _wait(device)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


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


class _Call:
    """`num_seqs` sequences with `queries` new tokens each at the end of `context`, over blocks in random order."""

    def __init__(
        self, device: torch.device, sizes: Sizes, num_seqs: int, queries: int, context: int, block_size: int
    ) -> None:
        query_heads, kv_heads, dim = sizes.heads
        self._device, self._backend = device, make_backend("triton", device)
        name = str(sizes.dtype).removeprefix("torch.")
        spec = KVCacheSpec.build([LayerKVSpec(kv_heads, dim, dim)], block_size, name)
        blocks = spec.blocks_for_tokens(context)
        self._arena = KVArena(spec, 1 + num_seqs * blocks, device, self._backend.layout)
        (kv,) = self._arena.layers
        assert isinstance(kv, FloatKV)
        self._kv = kv
        self._kv.key.normal_()
        self._kv.value.normal_()
        ids = torch.randperm(num_seqs * blocks, device=device) + 1
        self._query = torch.randn(num_seqs * queries, query_heads, dim, device=device).to(sizes.dtype)
        self._scale, self._queries, self._num_seqs, self._context = dim**-0.5, queries, num_seqs, context
        self._batch = AttentionBatch(
            query_start=torch.arange(0, num_seqs * queries + 1, queries, dtype=torch.int32, device=device),
            context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
            table_rows=torch.arange(num_seqs, device=device),
            positions=torch.arange(context - queries, context, device=device).repeat(num_seqs),
            groups=(GroupBatch(ids.view(num_seqs, blocks).int(), torch.zeros(0, dtype=torch.int64, device=device)),),
            num_seqs=num_seqs,
            num_tokens=num_seqs * queries,
            max_query_len=queries,
            max_context_len=context,
        )
        self.kv_bytes = 2 * num_seqs * context * kv_heads * dim * sizes.dtype.itemsize

    def ours(self) -> torch.Tensor:
        return self._backend.attend(self._kv, self._query, self._batch, scale=self._scale)

    def torch_seconds(self, repeats: int) -> float:
        """Of torch's attention over keys and values that lie contiguously, which is what it can read."""
        _, heads, dim = self._query.shape
        query = self._query.view(self._num_seqs, self._queries, heads, dim).transpose(1, 2)
        shape = (self._num_seqs, self._kv.key.shape[1], self._context, dim)
        key, value = (torch.randn(shape, device=self._device).to(query.dtype) for _ in range(2))
        causal = self._queries > 1
        return seconds_per_call(
            lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True),
            self._device,
            repeats=repeats,
        )


def as_json(limits: Limits, rows: list[KernelRow]) -> dict[str, Any]:
    return {"limits": asdict(limits), "attention": [asdict(row) for row in rows]}
