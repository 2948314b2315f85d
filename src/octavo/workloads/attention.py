"""Benchmark of attention over paged blocks against one contiguous block, with the same kernel and lengths.

This measures the cost of walking the block table. For each block size, a separate arena holds the same number of
tokens, in enough layers to exceed the CPU's caches, with block ids shuffled as in a pool that has served for a while.
"max" is one block for the whole context, as with `--block-size max`. The block sizes take turns
(`timing.interleaved`), layer by layer.

    GB/s      key and value bytes of the context, each counted once, over the time of the call
    GFLOP/s   4 * num_heads * head_dim for each query and each key that it sees: Q·K and P·V, two operations each
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from octavo.attention import make_backend
from octavo.attention.base import AttentionBackend, AttentionBatch, GroupBatch
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.planner.calculator import block_tokens
from octavo.storage.arena import KVArena
from octavo.storage.layer_kv import LayerKV
from octavo.workloads.machine_limits import DRAM_BYTES
from octavo.workloads.timing import Call, interleaved, paired_ratio

Kind = Literal["decode", "prefill"]
BlockSize = int | Literal["max"]

_SOME_CODE = 0x2A  # a small number in every codec, and subnormal in none
_SOME_SCALE = torch.tensor([0x00, 0x3C], dtype=torch.uint8)  # 2^-7 in bfloat16

CONTIGUOUS: Literal["max"] = "max"
DECODE_TOKENS, CHUNK = 16384, 2048


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """The shape of one attention layer."""

    query: int
    kv: int
    dim: int


SMALL, LARGE = HeadCounts(9, 3, 64), HeadCounts(32, 8, 128)
"""SmolLM2-135M's layers, and Llama 3.1 8B's."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One shape of a call.

    Attributes:
        context: number of tokens of each sequence, including the new ones.
        new_tokens: number of queries of each sequence: 1 in decode, a chunk at its end in prefill.
    """

    kind: Kind
    backend: str
    heads: HeadCounts
    dtype: str
    seqs: int
    context: int
    new_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Size of the keys and values of all sequences in one layer."""
        return self.seqs * self.context * self._spec(16, 1).bytes_per_token

    @property
    def flops(self) -> int:
        seen = sum(range(self.context - self.new_tokens + 1, self.context + 1))
        return 4 * self.heads.query * self.heads.dim * seen * self.seqs

    def num_layers(self, working_set: int) -> int:
        """Return the number of layers, at least 1, whose keys and values together take at least `working_set` bytes."""
        return max(1, -(-working_set // self.kv_bytes))

    def calls(self, block_size: BlockSize, num_layers: int, backend: AttentionBackend | None = None) -> list[Call]:
        """Return one call for each layer of a new arena, using `backend` or, if None, the backend of this case."""
        spec = self._spec(block_tokens(block_size, self.context), num_layers)
        per_seq = spec.blocks_for_tokens(self.context)
        arena = KVArena(spec, self.seqs * per_seq + 1)
        for layer in arena.float_layers:
            # Write every page before it is timed, with numbers that are not subnormal, which would be slow.
            layer.key.fill_(0.5)
            layer.value.fill_(0.5)
        for coded in arena.coded_layers:
            for side in (coded.keys, coded.values):
                side.codes.fill_(_SOME_CODE)
                for field in side.fields:
                    field.copy_(_SOME_SCALE if field.shape[-1] == 2 else field.new_tensor(8))
        shuffled = torch.randperm(self.seqs * per_seq, generator=torch.Generator().manual_seed(0)) + 1
        batch = self._batch(shuffled.view(self.seqs, per_seq).int())
        query = torch.randn(batch.num_tokens, self.heads.query, self.heads.dim).to(
            getattr(torch, spec.dtype) if spec.plain else torch.bfloat16
        )
        backend = backend or make_backend(self.backend, "cpu")
        return [partial(_attend, backend, layer, query, batch) for layer in arena.layers]

    def _spec(self, block_size: int, num_layers: int) -> KVCacheSpec:
        layer = LayerKVSpec(self.heads.kv, self.heads.dim, self.heads.dim)
        return KVCacheSpec.build([layer] * num_layers, block_size, self.dtype)

    def _batch(self, tables: torch.Tensor) -> AttentionBatch:
        num_tokens = self.seqs * self.new_tokens
        first = self.context - self.new_tokens
        return AttentionBatch(
            query_start=(torch.arange(self.seqs + 1) * self.new_tokens).int(),
            context_lens=torch.full((self.seqs,), self.context).int(),
            table_rows=torch.arange(self.seqs),
            positions=torch.arange(first, self.context).repeat(self.seqs),
            groups=(GroupBatch(tables, torch.empty(0, dtype=torch.int64)),),
            num_seqs=self.seqs,
            num_tokens=num_tokens,
            max_query_len=self.new_tokens,
            max_context_len=self.context,
            total_decode_len=self.seqs * self.context,
        )


def _attend(backend: AttentionBackend, kv: LayerKV, query: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    return backend.attend(kv, query, batch, scale=query.shape[2] ** -0.5)


def measure_case(
    case: AttentionCase,
    block_sizes: Sequence[BlockSize],
    *,
    working_set: int = DRAM_BYTES,
    seconds: float = 0.5,
) -> list[dict[str, Any]]:
    """Time the case at each block size, interleaved; return a row of JSON for each.

        microseconds    the median call, for all sequences in one layer
        gb_per_s        see the module; None in prefill, which is not limited by reading
        gflop_per_s     see the module
        slower_percent  how much slower than one contiguous block, by the median of the rounds' ratios; negative if
                        faster, None if contiguous was not measured

    Args:
        working_set: bytes of keys and values that the calls of one block size cycle through.
        seconds: time spent on each block size.
    """
    num_layers = case.num_layers(working_set)
    timings = interleaved({str(size): case.calls(size, num_layers) for size in block_sizes}, seconds=seconds)
    contiguous = timings.get(CONTIGUOUS)
    shape = {name: value for name, value in asdict(case).items() if name != "heads"}
    return [
        shape
        | {
            "block_size": size,
            "rounds": len((timing := timings[str(size)]).seconds),
            "microseconds": round(timing.median * 1e6, 1),
            "gb_per_s": round(case.kv_bytes / timing.median / 1e9, 2) if case.kind == "decode" else None,
            "gflop_per_s": round(case.flops / timing.median / 1e9, 2),
            "slower_percent": contiguous and round(100 * (paired_ratio(timing, contiguous) - 1), 2),
        }
        for size in block_sizes
    ]


def cases(
    kinds: Sequence[Kind],
    backends: Sequence[str],
    contexts: Sequence[int],
    *,
    heads: HeadCounts = SMALL,
    dtype: str = "bfloat16",
) -> Iterator[AttentionCase]:
    """Yield cases: decode of sequences with `DECODE_TOKENS` in total, and prefill of the last `CHUNK` tokens of one."""
    for kind in kinds:
        for backend in backends:
            for context in contexts:
                decode = kind == "decode"
                seqs = max(1, DECODE_TOKENS // context) if decode else 1
                yield AttentionCase(kind, backend, heads, dtype, seqs, context, 1 if decode else min(CHUNK, context))
