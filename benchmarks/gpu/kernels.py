"""A GPU's limits, and the speed of the kernels as a share of them, compared with torch's own if it has the same kernel.

decode    bytes of the context's keys and values, each counted once, per time of a call: a share of copy bandwidth
prefill   4 * num_heads * head_dim operations for each query and each key that it sees: a share of the rate of a large
          matrix product
others    bytes that must be read and written, per time of a call: a share of copy bandwidth
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.peers import flashinfer_attention, has_flashinfer, torch_attention
from octavo.attention import make_backend
from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.models.ops import Heads
from octavo.models.rotary import Rotation
from octavo.models.triton_ops import TritonLayerOps
from octavo.sampling.triton_choice import draw_rows
from octavo.storage.arena import FloatKV, KVArena
from octavo.storage.block_copy import copy_blocks


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to measure; `SMALL` is for trying the code in Triton's interpreter."""

    copy_bytes: int
    matrix: int
    heads: tuple[int, int, int]
    decode: tuple[int, int]
    mixed: tuple[int, int]
    prefill: int
    rows: tuple[int, int, int, int]
    dtype: torch.dtype


FULL = Sizes(
    1 << 30, 8192, (32, 8, 128), (64, 4000), (128_000, 2000), 8000, (4096, 14336, 128256, 1024), torch.bfloat16
)
"""Llama 3.1 8B's heads (query, key-value, dimension); decode: sequences and context; mixed: the contexts of
one of as many sequences, and of the others; prefill: tokens; rows: widths of
hidden states, of the gated activation and of logits, and blocks of 64 KiB that are copied."""
SMALL = Sizes(1 << 16, 64, (4, 2, 32), (2, 300), (600, 20), 20, (32, 48, 300, 2), torch.float16)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the device: bytes read and written per second by a copy, and operations per second in products."""

    copy_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The result for one shape of a kernel's call.

    Attributes:
        seconds: time of a call.
        share: share of the limit that applies to this shape.
        torch_seconds: time of `scaled_dot_product_attention` over contiguous keys and values of the same length; None
            if torch has no such kernel.
        flashinfer_seconds: time of FlashInfer's over the same blocks; None if it has no such kernel or is not there.
    """

    name: str
    seconds: float
    share: float
    torch_seconds: float | None = None
    flashinfer_seconds: float | None = None


def seconds_per_call(call: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """Return the median over five rounds of the mean time per call, after a warm-up."""
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
    # Random values, because products of zeros draw less power and run faster.
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(sizes.dtype) for _ in range(2))
    multiplying = seconds_per_call(lambda: a @ b, device, repeats=repeats)
    return Limits(2 * sizes.copy_bytes / copying, 2 * sizes.matrix**3 / multiplying)


@torch.inference_mode()
def measure_attention(
    device: torch.device, sizes: Sizes, limits: Limits, *, block_size: int = 16, repeats: int = 20
) -> Iterator[KernelRow]:
    """Measure decode and prefill over shuffled blocks."""
    num_seqs, context = sizes.decode
    query_heads, _, dim = sizes.heads
    decode = _PagedBatch(device, sizes, [context] * num_seqs, 1, block_size)
    took = seconds_per_call(decode.ours, device, repeats=repeats)
    rate = decode.kv_bytes / took / limits.copy_bandwidth
    yield KernelRow(f"decode {num_seqs} x {context}", took, rate, *decode.peers_seconds(repeats))
    del decode
    long, short = sizes.mixed
    mixed = _PagedBatch(device, sizes, [long] + [short] * (num_seqs - 1), 1, block_size)
    took = seconds_per_call(mixed.ours, device, repeats=repeats)
    rate = mixed.kv_bytes / took / limits.copy_bandwidth
    name = f"decode 1 x {long}, {num_seqs - 1} x {short}"
    yield KernelRow(name, took, rate, None, mixed.flashinfer_seconds(repeats))
    del mixed
    count = sizes.prefill
    prefill = _PagedBatch(device, sizes, [count], count, block_size)
    took = seconds_per_call(prefill.ours, device, repeats=repeats)
    operations = 4 * query_heads * dim * count * (count + 1) / 2
    share = operations / took / limits.matrix_rate
    yield KernelRow(f"prefill {count}", took, share, *prefill.peers_seconds(repeats))


@torch.inference_mode()
def measure_kernels(
    device: torch.device, sizes: Sizes, limits: Limits, *, repeats: int = 20, codecs: Sequence[str] | None = None
) -> Iterator[KernelRow]:
    """Measure the other kernels, in the shapes of a step of `sizes.decode` sequences, and decode with codecs.

    Args:
        codecs: the codecs to measure; None for all.
    """

    def timed(name: str, num_bytes: int, call: Callable[[], object]) -> KernelRow:
        took = seconds_per_call(call, device, repeats=repeats)
        return KernelRow(name, took, num_bytes / took / limits.copy_bandwidth)

    count, context = sizes.decode
    hidden, wide, vocab, blocks = sizes.rows
    element = sizes.dtype.itemsize
    x = torch.randn(count, hidden, device=device).to(sizes.dtype)
    weight, gate_up = torch.ones_like(x[0]), torch.randn(count, 2 * wide, device=device).to(sizes.dtype)
    ops = TritonLayerOps()
    yield timed("rms_norm", 2 * x.nbytes, lambda: ops.rms_norm(x, weight, 1e-5))
    yield timed("add_rms_norm", 4 * x.nbytes, lambda: ops.add_rms_norm(x, x, weight, 1e-5))
    yield timed("gated activation", 3 * count * wide * element, lambda: ops.gate(gate_up, "silu"))
    arena = torch.zeros(2 * blocks, 1 << 16, dtype=torch.uint8, device=device)
    copies = [(i, blocks + i) for i in range(blocks)]
    yield timed("copy blocks", arena.nbytes, lambda: copy_blocks(arena, arena, copies))
    logits = torch.randn(count, vocab, device=device)
    for name, top_k, top_p in (("draw all", 0.0, 1.0), ("draw top_k, top_p", 50.0, 0.9)):
        table = torch.tensor([[0.5, 1.0, -torch.inf, top_p, top_k, 0.0]], dtype=torch.float64).repeat(count, 1)
        on_device = table.to(device)
        yield timed(name, logits.nbytes, lambda table=on_device: draw_rows(logits, table))  # type: ignore[misc]
    for codec in [name for name, format in KV_FORMATS.items() if not format.plain] if codecs is None else codecs:
        call = _PagedBatch(device, sizes, [context] * count, 1, 16, codec=codec)
        yield timed(f"decode {codec}", call.kv_bytes, call.ours)
        yield timed(f"rotate and store {codec}", call.stored_bytes, call.store)


class _PagedBatch:
    """A batch of sequences with `queries` new tokens at the end of each of the `contexts`, in shuffled blocks."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        contexts: list[int],
        queries: int,
        block_size: int,
        codec: str | None = None,
    ) -> None:
        query_heads, kv_heads, dim = sizes.heads
        self._device, self._backend = device, make_backend("triton", device)
        name = codec or str(sizes.dtype).removeprefix("torch.")
        spec = KVCacheSpec.build([LayerKVSpec(kv_heads, dim, dim)], block_size, name)
        num_seqs = len(contexts)
        blocks = [spec.blocks_for_tokens(context) for context in contexts]
        self._arena = KVArena(spec, 1 + sum(blocks), device, self._backend.layout)
        (kv,) = self._arena.layers
        self._kv, self._heads = kv, Heads(query_heads, kv_heads, dim, dim)
        if isinstance(kv, FloatKV):
            kv.key.normal_()
            kv.value.normal_()
        ids = torch.split(torch.randperm(sum(blocks), device=device) + 1, blocks)
        tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).int()
        self._query = torch.randn(num_seqs * queries, query_heads, dim, device=device).to(sizes.dtype)
        self._scale, self._queries, self._contexts = dim**-0.5, queries, contexts
        tokens = num_seqs * queries
        slots = torch.stack([own[-1] for own in ids]).repeat_interleave(queries) * block_size
        self._qkv = torch.randn(tokens, (query_heads + 2 * kv_heads) * dim, device=device).to(sizes.dtype)
        angles = torch.zeros(max(contexts), dim // 2, device=device)
        self._batch = AttentionBatch(
            query_start=torch.arange(0, num_seqs * queries + 1, queries, dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            table_rows=torch.arange(num_seqs, device=device),
            positions=torch.cat([torch.arange(n - queries, n, device=device) for n in contexts]),
            groups=(GroupBatch(tables, slots),),
            num_seqs=num_seqs,
            num_tokens=num_seqs * queries,
            max_query_len=queries,
            max_context_len=max(contexts),
            total_decode_len=sum(contexts) if queries == 1 else 0,
        )
        self._rotation = Rotation(angles.cos(), angles.sin(), self._batch.positions)
        of_token = spec.bytes_per_token
        self.kv_bytes = sum(contexts) * of_token
        # All of qkv is read, queries are written back, and keys and values are stored.
        self.stored_bytes = self._qkv.nbytes + tokens * (query_heads * dim * sizes.dtype.itemsize + of_token)

    def ours(self) -> torch.Tensor:
        return self._backend.attend(self._kv, self._query, self._batch, scale=self._scale)

    def store(self) -> torch.Tensor:
        return TritonLayerOps().rotate_and_store(
            self._qkv, self._heads, None, self._rotation, self._kv, self._batch, self._backend
        )

    def peers_seconds(self, repeats: int) -> tuple[float, float | None]:
        """Measure torch's and FlashInfer's attention."""
        return self.torch_seconds(repeats), self.flashinfer_seconds(repeats)

    def torch_seconds(self, repeats: int) -> float:
        call = torch_attention(self._by_sequence, self._contexts[0], self._heads.kv_heads)
        return seconds_per_call(call, self._device, repeats=repeats)

    def flashinfer_seconds(self, repeats: int) -> float | None:
        if not has_flashinfer():
            return None
        (group,) = self._batch.groups
        call = flashinfer_attention(
            self._by_sequence, group.block_tables, self._contexts, self._heads.kv_heads, self._kv.block_size
        )
        return seconds_per_call(call, self._device, repeats=repeats)

    @property
    def _by_sequence(self) -> torch.Tensor:
        return self._query.view(len(self._contexts), self._queries, *self._query.shape[1:])
