"""What the decoder is made of: matrix products, row-wise steps and rotary tables, in plain torch.

Two seams let faster code in without touching the decoder: a `LinearFactory` decides how a weight is kept and
multiplied, and `LayerOps` holds the row-wise steps between the products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.nn import functional

from octavo.errors import UnsupportedModelError
from octavo.model_config import RopeConfig

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Linear(ABC):
    """x [rows, in_features] -> x @ weight.T + bias [rows, out_features], in x's dtype.

    Attributes:
        nbytes: memory of the weight and the bias as they are kept.
    """

    nbytes: int

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


LinearFactory = Callable[[torch.Tensor, "torch.Tensor | None"], Linear]
"""Takes weight [out_features, in_features] and bias [out_features] or None."""


class PlainLinear(Linear):
    """The weight as it came."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """The weight reordered once into oneDNN's own blocked layout, instead of anew in every call.

    Results are those of `PlainLinear` (bit for bit in bf16), 1.2 to 5 times sooner at 1 to 64 rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Whether oneDNN can pack this weight on this machine."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        if weight.dtype is torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype is torch.float32


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The default `LinearFactory`: packed where oneDNN can, plain elsewhere."""
    return (PackedLinear if PackedLinear.supports(weight) else PlainLinear)(weight, bias)


class LayerOps:
    """The row-wise steps between the matrix products, with transformers' order of roundings."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019), weight [x.shape[-1]].

        The variance is float32; the normalised row is cast to x's dtype before the weight multiplies it.
        """
        return weight * functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of x and residual, both [rows, hidden]. May reuse the memory of either."""
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

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up [rows, n] of gate_up [rows, 2 n] = | gate | up |. `activation` is in `ACTIVATIONS`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up


class RotaryTable:
    """cos and sin of position * frequency (Su et al. 2021, section 3.4.2) in float32, grown as positions need it."""

    _MIN_POSITIONS = 1024

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(config).to(device)
        self._cos = self._sin = self.inv_freq.new_empty(0, len(self.inv_freq))

    def lookup(self, positions: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, both float32 [tokens, rotary_dim / 2], at int64 `positions` [tokens], all below `limit`."""
        if limit > len(self._cos):
            # Doubled, so that a growing context recomputes the table a logarithmic number of times.
            size = max(self._MIN_POSITIONS, 1 << (limit - 1).bit_length())
            angles = torch.arange(size, dtype=torch.float32, device=self.inv_freq.device)[:, None] * self.inv_freq
            self._cos, self._sin = angles.cos(), angles.sin()
        return self._cos[positions], self._sin[positions]


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """float32 [rotary_dim / 2], bit for bit what transformers' `modeling_rope_utils` computes.

    Raises:
        UnsupportedModelError: `frequency_factors` of another length.
    """
    dim = config.rotary_dim
    inv_freq = 1.0 / (config.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if config.frequency_factors is not None:
        if len(config.frequency_factors) != len(inv_freq):
            raise UnsupportedModelError(
                f"{len(config.frequency_factors)} RoPE frequency factors for {len(inv_freq)} frequencies"
            )
        return inv_freq / torch.tensor(config.frequency_factors, dtype=torch.float32)
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(inv_freq, config)
    return inv_freq


def _llama3_frequencies(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: short wavelengths as they are, long ones slowed by `factor`, those between interpolated."""
    old_context = config.original_max_position
    wavelength = 2 * math.pi / inv_freq
    longest_kept = old_context / config.high_freq_factor
    shortest_slowed = old_context / config.low_freq_factor
    stretched = torch.where(wavelength > shortest_slowed, inv_freq / config.factor, inv_freq)
    smooth = (old_context / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (wavelength >= longest_kept) & (wavelength <= shortest_slowed)
    return torch.where(between, (1 - smooth) * stretched / config.factor + smooth * stretched, stretched)
