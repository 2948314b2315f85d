"""Attention with Triton kernels, and the reference as fallback."""

from __future__ import annotations

from typing import TypeGuard

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton.chunk import attend_chunks
from octavo.attention.triton.decode import attend_decodes
from octavo.attention.triton.encode import encode, encodes
from octavo.attention.triton.launch import INTERPRETED, ReadKV, read_kv
from octavo.attention.triton.store import store
from octavo.errors import ConfigError
from octavo.storage.arena import BlockLayout, FloatKV
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV

_MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonAttention(AttentionBackend):
    """Attention with Triton kernels: the decode kernel for sequences with one new token, the chunk kernel for others.

    Raises:
        ConfigError: the device is a CPU, and Triton's interpreter is not enabled.
    """

    name = "triton"
    layout = BlockLayout.TOKENS

    def __init__(self, device: torch.device | str) -> None:
        if torch.device(device).type == "cpu" and not INTERPRETED:
            raise ConfigError(
                "attention_backend 'triton' on device 'cpu' runs in Triton's interpreter only, which is for tests: "
                "set TRITON_INTERPRET=1 before octavo starts, or use 'auto'"
            )
        self._reference = ReferenceAttention()
        self._layers: dict[int, tuple[LayerKV, ReadKV | None]] = {}

    @staticmethod
    def supports(kv: LayerKV) -> TypeGuard[FloatKV]:
        """Whether the kernels store this layer's floats: bfloat16, float16 or float32, with heads of at most 256."""
        if not isinstance(kv, FloatKV):
            return False
        key_dim, value_dim = kv.key.shape[2] * kv.pair, kv.value.shape[3]
        return kv.key.dtype in _DTYPES and max(key_dim, value_dim) <= _MAX_HEAD_DIM

    @staticmethod
    def reads(kv: LayerKV) -> bool:
        """Whether the kernels attend over this layer, which may hold floats or any codec in this backend's layout."""
        read = read_kv(kv)
        return read is not None and max(read.key_dim, read.value_dim) <= _MAX_HEAD_DIM

    def _read(self, kv: LayerKV) -> ReadKV | None:
        # Cached by id of the layer, which cannot be reused while the layer is held here.
        known = self._layers.get(id(kv))
        if known is None:
            known = self._layers[id(kv)] = kv, read_kv(kv) if self.reads(kv) else None
        return known[1]

    def write(self, kv: LayerKV, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        """See `AttentionBackend.write`."""
        for part in kv.parts:
            slots = batch.groups[part.group].slot_mapping
            if self.supports(part):
                store(part, key, value, slots)
            elif (coded := self.encoder(part)) is not None:
                encode(*coded, key, value, slots)
            else:
                part.write(key, value, slots)

    def encoder(self, kv: LayerKV) -> tuple[CodedKV, ReadKV] | None:
        """Return a coded layer with its kernel view, if the kernels can encode for it; None if torch must write it."""
        if not isinstance(kv, CodedKV) or kv.finds_scales or not encodes(kv):
            return None
        read = self._read(kv)
        return None if read is None else (kv, read)

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
        read = self._read(kv)
        if read is None or sink_query is not None:
            return self._reference.attend(
                kv, query, batch, scale=scale, softcap=softcap, sinks=sinks, sink_query=sink_query
            )
        if query.stride(2) != 1:
            query = query.contiguous()
        of_keys, of_values = read.rotations
        dtype = query.dtype
        if of_keys is not None:
            # Rotated queries and keys have the same scores as plain ones.
            query = (query.float() @ of_keys).to(dtype)
        out = torch.empty(
            (query.shape[0], query.shape[1], read.value_dim),
            dtype=dtype if of_values is None else torch.float32,
            device=query.device,
        )
        only_decodes = batch.max_query_len == 1
        mixed = not only_decodes and batch.total_decode_len > 0
        if only_decodes or mixed:
            attend_decodes(out, read, query, batch, scale=scale, softcap=softcap, sinks=sinks)
        if not only_decodes:
            attend_chunks(out, read, query, batch, scale=scale, softcap=softcap, sinks=sinks, decodes_apart=mixed)
        return out if of_values is None else (out @ of_values.T).to(dtype)
