"""Matrices that a safetensors checkpoint stores quantised, read as the floats that they stand for.

    fp8                 X.weight f8 [out, in], X.weight_scale_inv [out / b, in / b]: a scale for each block
    compressed-tensors  X.weight f8 or i8 [out, in], or X.weight_packed i32 [out, in / n];
                        X.weight_scale [1], [out, 1] or [out, groups], X.weight_zero_point of the same shape
    gptq                X.qweight i32 [in / n, out], X.qzeros i32 [groups, out / n], X.scales [groups, out],
                        X.g_idx [in]: the group of each input
    awq                 X.qweight i32 [in, out / n], X.qzeros i32 [groups, out / n], X.scales [groups, out]

n = 32 / bits numbers lie in an int32, the first in its lowest bits, except in awq, which mixes eight outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from octavo.errors import CorruptModelError

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies in each four bits


class QuantisedCheckpoint:
    """Recognises and dequantises the matrices of one checkpoint.

    Args:
        quantization: `quantization_config` of `config.json`.
        has, get: look-up of a stored tensor by its name.
    """

    def __init__(
        self, quantization: Mapping[str, Any], has: Callable[[str], bool], get: Callable[[str], torch.Tensor]
    ) -> None:
        self._config = quantization
        self._has = has
        self._get = get

    def holds(self, name: str) -> bool:
        """Whether tensor `name`, '….weight', is stored in quantised form."""
        return name.endswith(".weight") and any(map(self._has, self._forms(name)))

    def read(self, name: str) -> torch.Tensor:
        """Return float32 [out, in].

        Raises:
            CorruptModelError: what belongs to it is missing, or the shapes do not match.
        """
        stem = name.removesuffix(".weight")
        try:
            if self._has(f"{stem}.qweight"):
                awq = self._config.get("quant_method") == "awq"
                return self._awq(stem) if awq else self._gptq(stem)
            return self._scaled(stem)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CorruptModelError(f"{name}: its quantised parts do not fit together: {error}") from error

    @staticmethod
    def _forms(name: str) -> list[str]:
        stem = name.removesuffix(".weight")
        return [f"{stem}.{form}" for form in ("qweight", "weight_packed", "weight_scale_inv", "weight_scale")]

    def _scaled(self, stem: str) -> torch.Tensor:
        inverse = self._has(f"{stem}.weight_scale_inv")
        scale = self._get(f"{stem}.weight_scale_inv" if inverse else f"{stem}.weight_scale").float()
        zero: torch.Tensor | float = 0.0
        if self._has(f"{stem}.weight_packed"):
            rows, columns = self._get(f"{stem}.weight_shape").tolist()
            bits = -(-32 * self._get(f"{stem}.weight_packed").shape[1] // columns)
            weight = unpack(self._get(f"{stem}.weight_packed"), bits)[:, :columns].float()
            zero = float(1 << (bits - 1))
            if self._has(f"{stem}.weight_zero_point"):
                packed = self._get(f"{stem}.weight_zero_point")
                zero = _spread(unpack(packed.T, bits).T[:rows].float(), weight.shape)
        else:
            weight = self._get(f"{stem}.weight").float()
            if self._has(f"{stem}.weight_zero_point"):
                zero = _spread(self._get(f"{stem}.weight_zero_point").float(), weight.shape)
        return (weight - zero) * self._scales(scale, weight.shape, inverse)

    def _scales(self, scale: torch.Tensor, shape: torch.Size, inverse: bool) -> torch.Tensor:
        block = self._config.get("weight_block_size") if inverse else None
        if block is None:
            return _spread(scale, shape)
        return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]

    def _gptq(self, stem: str) -> torch.Tensor:
        scales, bits = self._get(f"{stem}.scales").float(), int(self._config["bits"])
        quants = unpack(self._get(f"{stem}.qweight").T, bits).T
        zeros = unpack(self._get(f"{stem}.qzeros"), bits)
        if self._config.get("checkpoint_format", "gptq") == "gptq":
            zeros = zeros + 1
        if self._has(f"{stem}.g_idx"):
            group = self._get(f"{stem}.g_idx").long()
        else:
            group = torch.arange(len(quants)) // (len(quants) // len(scales))
        return ((quants - zeros[group]) * scales[group]).T

    def _awq(self, stem: str) -> torch.Tensor:
        scales = self._get(f"{stem}.scales").float()
        quants, zeros = (_awq_unpack(self._get(f"{stem}.{part}")) for part in ("qweight", "qzeros"))
        each = len(quants) // len(scales)
        return ((quants - zeros.repeat_interleave(each, 0)) * scales.repeat_interleave(each, 0)).T


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of int32 [rows, n] as int32 [rows, n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _awq_unpack(packed: torch.Tensor) -> torch.Tensor:
    places = torch.tensor(_AWQ_ORDER).argsort()
    return unpack(packed, 4).view(len(packed), -1, 8)[..., places].flatten(1)


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a number for every weight: of the tensor, of its row, or of its group or block."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    scale = scale.reshape(scale.shape[0], -1)
    for axis in (0, 1):
        if scale.shape[axis] not in (1, shape[axis]):
            scale = scale.repeat_interleave(-(-shape[axis] // scale.shape[axis]), axis)
    return scale[: shape[0], : shape[1]]
