"""The row-wise operations between the matrix products, as Triton kernels."""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.triton import encode, rows, store
from octavo.attention.triton.backend import TritonAttention
from octavo.models.ops import Heads, LayerOps, QKNorm
from octavo.models.rotary import Rotation
from octavo.storage.layer_kv import LayerKV


class TritonLayerOps(LayerOps):
    """Triton kernels that round like `LayerOps`. A single one rotates heads, and stores keys and values."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype is not x.dtype:
            return super().rms_norm(x, weight, eps)
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight.dtype is not x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        # The kernel stores the sum in the residual.
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
        plain = norm is None or not (
            norm.rotates_first or norm.query.centred or norm.query.weight.dtype is not qkv.dtype
        )
        if not isinstance(attention, TritonAttention) or not plain or rotation.cos.shape[1] == 0:
            return super().rotate_and_store(qkv, heads, norm, rotation, kv, batch, attention)
        new = store.NewHeads(
            qkv,
            heads.num_heads,
            batch.groups[kv.group].slot_mapping,
            rotation.positions,
            rotation.cos,
            rotation.sin,
            norm.query.weight if norm else None,
            norm.key.weight if norm else None,
            norm.query.eps if norm else 0.0,
        )
        if attention.supports(kv):
            store.rotate_and_store(new, kv)
        elif (coded := attention.encoder(kv)) is not None:
            encode.rotate_and_encode(new, *coded)
        else:
            return super().rotate_and_store(qkv, heads, norm, rotation, kv, batch, attention)
        return qkv[:, : heads.num_heads * heads.key_dim].view(-1, heads.num_heads, heads.key_dim)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation in ("silu", "gelu_pytorch_tanh"):
            return rows.gate(gate_up, gelu=activation == "gelu_pytorch_tanh")
        return super().gate(gate_up, activation)
