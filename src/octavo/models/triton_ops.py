"""The row-wise operations between the matrix products, as Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.triton import encode, rows, store
from octavo.attention.triton.backend import TritonAttention
from octavo.models.ops import Heads, LayerOps, QKNorm
from octavo.models.rotary import Rotation
from octavo.storage.layer_kv import LayerKV


class TritonLayerOps(LayerOps):
    """With the roundings of `LayerOps`. Heads are rotated, and keys and values stored, in one kernel."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The kernel leaves the sum where the residual was.
        return rows.add_rms_norm(x, residual, weight, eps), residual

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        norm: QKNorm | None,
        rotation: Rotation,
        kv: LayerKV,
        batch: AttentionBatch,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        if not isinstance(attention, TritonAttention):
            return super().rotate_and_store(qkv, heads, norm, rotation, kv, batch, attention)
        put: Callable[..., None]
        if attention.supports(kv):
            put = partial(store.rotate_and_store, qkv, kv)
        elif (coded := attention.encoder(kv)) is not None:
            put = partial(encode.rotate_and_encode, qkv, *coded)
        else:
            return super().rotate_and_store(qkv, heads, norm, rotation, kv, batch, attention)
        put(
            batch.groups[kv.group].slot_mapping,
            rotation.positions,
            rotation.cos,
            rotation.sin,
            num_heads=heads.num_heads,
            query_norm=norm.query if norm else None,
            key_norm=norm.key if norm else None,
            eps=norm.eps if norm else 0.0,
        )
        return qkv[:, : heads.num_heads * heads.key_dim].view(-1, heads.num_heads, heads.key_dim)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation in ("silu", "gelu_pytorch_tanh"):
            return rows.gate(gate_up, gelu=activation == "gelu_pytorch_tanh")
        return super().gate(gate_up, activation)
