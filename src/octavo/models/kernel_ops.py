"""The row-wise operations between the matrix products, by the C++ kernels."""

from __future__ import annotations

import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.native import NativeAttention
from octavo.models.ops import Heads, LayerOps, QKNorm
from octavo.models.rotary import Rotation
from octavo.storage.layer_kv import LayerKV
from octavo.storage.recent_kv import RecentKV


class KernelOps(LayerOps):
    """Kernels that round like `LayerOps`. A single one rotates heads, and stores keys and values."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return kernels.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.add_rms_norm(x, residual, weight, eps), x  # the kernel stores the sum in x

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
        plain = norm is None or not (norm.rotates_first or norm.query.centred)
        if not (plain and isinstance(attention, NativeAttention) and attention.computes(kv, qkv.dtype)):
            return super().rotate_and_store(qkv, heads, norm, rotation, kv, batch, attention)
        copies = None
        if isinstance(kv, RecentKV):
            copies = *kv.copies.for_kernels, batch.groups[kv.copies.group].slot_mapping
        kernels.rope_write(
            qkv,
            *kv.for_kernels,
            rotation.cos,
            rotation.sin,
            rotation.positions,
            batch.groups[kv.group].slot_mapping,
            query_norm=norm.query.weight if norm else None,
            key_norm=norm.key.weight if norm else None,
            eps=norm.query.eps if norm else 1e-6,
            copies=copies,
        )
        return qkv[:, : heads.num_heads * heads.key_dim].view(-1, heads.num_heads, heads.key_dim)
