"""Attention with the C++ kernels, and the reference as fallback."""

from __future__ import annotations

import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.reference import ReferenceAttention
from octavo.kernels.functions import SparseLayer
from octavo.storage.arena import FloatKV
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV
from octavo.storage.recent_kv import RecentKV

_TILE = 16  # tokens or dimensions per vector register
# Supported codes of keys and of values.
_PAIRS = {(code, code) for code in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")} | {("int8", "int4")}


class NativeAttention(AttentionBackend):
    """Attention with the C++ kernels on a CPU.

    Args:
        exact: whether a token's result is bitwise independent of the batch, the chunks and the number of threads.
    """

    name = "native"

    def __init__(self, *, exact: bool = True) -> None:
        self._exact = exact
        self._reference = ReferenceAttention()
        # Checked once per layer rather than per call, because a step of one sequence has only microseconds per layer.
        # Holding the layer keeps its id from being reused.
        self._supported: dict[int, tuple[LayerKV, bool]] = {}

    @staticmethod
    def supports(kv: LayerKV) -> bool:
        """Whether the kernels support a layer: bfloat16 or float32 on the CPU, or a supported codec.

        Block sizes and value heads must be multiples of 16, and heads at most `kernels.MAX_HEAD_DIM`. The codecs
        are fp8_e4m3, fp8_e5m2, int8, k8v4 and int4; with these, key heads must be multiples of 16 too, and value heads
        in int4 multiples of 32.
        """
        if isinstance(kv, RecentKV):
            return _supports_codes(kv.own) and _supports_codes(kv.copies)
        if isinstance(kv, CodedKV):
            return _supports_codes(kv)
        if not isinstance(kv, FloatKV):
            return False
        key_dim, value_dim = kv.key.shape[2] * kv.pair, kv.value_dim
        return (
            kernels.available()
            and kv.key.device.type == "cpu"
            and (kv.key.dtype, kv.pair) in ((torch.bfloat16, 2), (torch.float32, 1))
            and kv.block_size % _TILE == 0
            and value_dim % _TILE == 0
            and max(key_dim, value_dim) <= kernels.MAX_HEAD_DIM
        )

    def computes(self, kv: LayerKV, dtype: torch.dtype) -> bool:
        """Whether the kernels take queries, keys and values in `dtype` for a layer."""
        known = self._supported.get(id(kv))
        if known is None:
            known = self._supported[id(kv)] = kv, self.supports(kv)
        return known[1] and (dtype is kv.key.dtype if isinstance(kv, FloatKV) else dtype in kernels.FLOAT_FORMATS)

    def attend(
        self,
        kv: LayerKV,
        query: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        sink_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        apart = None
        if sink_query is not None and batch.sinks is not None:
            apart = sink_query, batch.sinks.budgets, batch.sinks.num_tokens
        if not self.computes(kv, query.dtype):
            return self._reference.attend(
                kv, query, batch, scale=scale, softcap=softcap, sinks=sinks, sink_query=sink_query
            )
        measured = None
        if batch.measured is not None and kv.sliding_window is None:
            measured = batch.measured.begins, batch.measured.mass[kv.group : kv.group + 1]
        copies = None
        if isinstance(kv, RecentKV):
            tables, kept = batch.groups[kv.copies.group].block_tables, kv.kept
            copies = *kv.copies.for_kernels, tables, kept.sink_blocks, kept.recent_blocks
        return kernels.attend(
            *kv.for_kernels,
            query,
            batch.groups[kv.group].block_tables,
            batch.table_rows,
            batch.query_start,
            batch.lengths(kv.group),
            out=query.new_empty(query.shape[0], query.shape[1], kv.value_dim),
            scale=scale,
            window=kv.sliding_window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
            exact=self._exact,
            copies=copies,
            apart=apart,
            sparse=_sparse_arguments(kv, batch),
            measured=measured,
        )


def _sparse_arguments(kv: LayerKV, batch: AttentionBatch) -> SparseLayer | None:
    sparse = batch.sparse
    if sparse is None or not isinstance(kv, FloatKV) or kv.bounds is None:
        return None
    num_read = sparse.num_read[kv.bounds_index : kv.bounds_index + 1]
    return kv.bounds, (num_read, sparse.num_recent, [sparse.completed[kv.group]])


def _supports_codes(kv: CodedKV) -> bool:
    multiple = 2 * _TILE if kv.values.codec.format.name == "int4" else _TILE
    return (
        kernels.available()
        and kv.values.codes.device.type == "cpu"
        and (kv.keys.codec.format.name, kv.values.codec.format.name) in _PAIRS
        and kv.block_size % _TILE == 0
        and not kv.by_tokens
        and kv.keys.dim % _TILE == 0
        and kv.values.dim % multiple == 0
        and max(kv.keys.dim, kv.values.dim) <= kernels.MAX_HEAD_DIM
    )
