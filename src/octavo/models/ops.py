"""The row-wise operations between the matrix products, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.checkpoint.model_config import ExpertsConfig
from octavo.models.rotary import Rotation
from octavo.storage.layer_kv import LayerKV

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(1.702 * gate))


# Gates that are not a product of an activation with the ups.
GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"clamped_swiglu": _clamped_swiglu}


def _xielu(x: torch.Tensor, alpha_p: float, alpha_n: float, beta: float) -> torch.Tensor:
    """Huang & Schlag 2024 (arXiv:2411.13010)."""
    x, dtype = x.float(), x.dtype
    below = x.clamp(max=0.0)
    return (alpha_p * x.clamp(min=0.0).square() + alpha_n * (below.expm1() - below) + beta * x).to(dtype)


# Activations with parameters, which are not gates.
LEARNT_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {"xielu": _xielu}


@dataclass(frozen=True, slots=True)
class Heads:
    """The layout of a fused projection: | num_heads * key_dim | kv_heads * key_dim | kv_heads * value_dim |."""

    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights [width] of a norm; LayerNorm if `centred`, which alone may have a bias.

    RMS weights in the dtype of activations multiply the rounded row; in float32, the row before it is rounded.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool = False


@dataclass(frozen=True, slots=True)
class QKNorm:
    """The norms over [key_dim] of each query and key head, before it rotates (Qwen 3) or after (Hunyuan)."""

    query: NormWeights
    key: NormWeights
    rotates_first: bool = False


class LayerOps:
    """The row-wise operations between the matrix products, rounding in the same order as transformers."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Apply root mean square normalisation over the last dimension (Zhang & Sennrich 2019), weight [x.shape[-1]].

        The variance is float32; the normalised row is cast to x's dtype before a weight of that dtype multiplies it,
        and after a wider one does.
        """
        normal = functional.rms_norm(x.float(), x.shape[-1:], eps=eps)
        return weight * normal.to(x.dtype) if weight.dtype is x.dtype else (weight * normal).to(x.dtype)

    def norm(self, x: torch.Tensor, norm: NormWeights | None) -> torch.Tensor:
        """Normalise rows x [rows, width]; without a norm, return x."""
        if norm is None:
            return x
        if norm.centred:
            return functional.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.eps).to(x.dtype)
        return self.rms_norm(x, norm.weight, norm.eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeights | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised sum, sum) of x and residual, both [rows, hidden]. May reuse the memory of either."""
        if norm is not None and not norm.centred:
            return self.add_rms_norm(x, residual, norm.weight, norm.eps)
        residual = residual + x
        return self.norm(residual, norm), residual

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised sum, sum) of x and residual, both [rows, hidden]. May reuse the memory of either."""
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the leading 2 * half dimensions of heads [tokens, num_heads, head_dim] by cos, sin [tokens, half].

        Dimension i is paired with i + half, as transformers' `rotate_half` does (not with i + 1, as the paper does).
        """
        half = cos.shape[-1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
        if 2 * half == heads.shape[-1]:
            return rotated
        return torch.cat((rotated, heads[..., 2 * half :]), dim=-1)

    def rotate_heads(
        self, qkv: torch.Tensor, heads: Heads, norm: QKNorm | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values of qkv [tokens, …], each [tokens, heads, dim]; the first two normalised
        and rotated."""
        widths = [heads.num_heads * heads.key_dim, heads.kv_heads * heads.key_dim, heads.kv_heads * heads.value_dim]
        _, key, value = torch.split(qkv, widths, dim=-1)
        key = key.view(-1, heads.kv_heads, heads.key_dim)
        key = self._rope(key, rotation, None if norm is None else (norm.key, norm.rotates_first))
        query = self.rotate_queries(qkv, heads, norm, rotation)
        return query, key, value.view(-1, heads.kv_heads, heads.value_dim)

    def rotate_queries(self, qkv: torch.Tensor, heads: Heads, norm: QKNorm | None, rotation: Rotation) -> torch.Tensor:
        """Return the queries of qkv [tokens, …], normalised and rotated, [tokens, num_heads, key_dim]."""
        query = qkv[:, : heads.num_heads * heads.key_dim].view(-1, heads.num_heads, heads.key_dim)
        return self._rope(query, rotation, None if norm is None else (norm.query, norm.rotates_first))

    def _rope(self, heads: torch.Tensor, rotation: Rotation, norm: tuple[NormWeights, bool] | None) -> torch.Tensor:
        """Return rotated heads [tokens, num_heads, key_dim], with a norm before the rotation or (True) after it."""
        weights, rotates_first = norm or (None, True)
        if rotates_first:
            heads = self.rotate(heads, rotation.token_cos, rotation.token_sin)
        if weights is not None:
            heads = self.norm(heads.reshape(-1, heads.shape[-1]), weights).view(heads.shape)
        return heads if rotates_first else self.rotate(heads, rotation.token_cos, rotation.token_sin)

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
        """Normalise and rotate the queries and keys of qkv [tokens, …]; store keys and values in their slots.

        Returns:
            The queries [tokens, num_heads, key_dim], which may be a view of qkv.
        """
        query, key, value = self.rotate_heads(qkv, heads, norm, rotation)
        attention.write(kv, key, value, batch)
        return query

    def activate(self, x: torch.Tensor, activation: str, parameters: Sequence[float]) -> torch.Tensor:
        """Return activation(x); see `ACTIVATIONS`, and with parameters `LEARNT_ACTIVATIONS`."""
        return LEARNT_ACTIVATIONS[activation](x, *parameters) if parameters else ACTIVATIONS[activation](x)

    def choose_experts(
        self, scores: torch.Tensor, bias: torch.Tensor | None, choice: ExpertsConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights float32 [rows, active] and numbers of the experts that rows of scores [rows, experts] use.

        See `ExpertsConfig` (Shazeer et al. 2017, section 2.1; DeepSeek-V3, section 2.1.2). The softmax keeps the order
        of scores, so the choice does not need it.
        """
        if choice.scoring == "sigmoid":
            scores = scores.sigmoid()
        elif choice.corrected:
            scores = scores.softmax(dim=-1)
        ranked = scores if bias is None else scores + bias
        if not choice.corrected:
            scores = ranked
        if choice.groups > 1:
            grouped = ranked.view(len(ranked), choice.groups, -1)
            best = grouped.topk(2, dim=-1).values.sum(dim=-1) if choice.corrected else grouped.amax(dim=-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(choice.active_groups).indices, True)
            ranked = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = ranked.topk(choice.active, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if choice.scoring == "softmax" and not choice.corrected:
            weights = (weights if choice.normalised else scores).softmax(dim=-1)
            weights = weights if choice.normalised else weights.gather(-1, chosen)
        elif choice.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * choice.scale, chosen

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return activation(gate) * up [rows, n] for gate_up [rows, 2 n] = | gate | up |; see `GATES`."""
        gate, up = gate_up.chunk(2, dim=-1)
        if activation in GATES:
            return GATES[activation](gate, up)
        return ACTIVATIONS[activation](gate).mul_(up)
