"""Matrices that a safetensors checkpoint stores quantised, read as floats, or in the nearest format of the kernels.

    fp8                 X.weight f8 [out, in], X.weight_scale_inv [out / b, in / b]: a scale for each block
    modelopt            X.weight f8 [out, in], X.weight_scale []
    compressed-tensors  X.weight f8 or i8 [out, in], or X.weight_packed i32 [out, in / n];
                        X.weight_scale [1], [out, 1] or [out, groups], X.weight_zero_point of the same shape,
                        X.weight_g_idx [in]: the group of each input
    gptq                X.qweight i32 [in / n, out], X.qzeros i32 [groups, out / n], X.scales [groups, out],
                        X.g_idx [in]: the group of each input
    awq                 X.qweight i32 [in, out / n], X.qzeros i32 [groups, out / n], X.scales [groups, out]
    mxfp4               X_blocks u8 [experts, out, in / 32, 16]: two numbers E2M1 in a byte;
                        X_scales u8 [experts, out, in / 32]: exponents, plus 127

n = 32 / bits numbers are in an int32, the first in its lowest bits, except in awq, which mixes eight outputs. Where
bits is no divisor of 32, a number may begin in one int32 and end in the next.

Where 32 weights in a row share a scale and a zero point, the kernels' formats hold the same integers:

    0 to 15, zero point 8      -> Q4_0   exactly, if the scale is one of fp16's
    0 to 15, other zero points -> Q4_1   scale · -zero point is rounded to fp16
    -127 to 127                -> Q8_0   exactly, if the scale is one of fp16's
    others, fp8 among them     -> Q8_0   each weight rounded to 1/127 of the largest of its 32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.errors import CorruptModelError
from octavo.models.weights import RawTensor

# Functions import it, because it takes a sixth of a second to import and folders of floats do not need it.
if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as GGMLType

# Raised where shapes do not match, or sizes in the configuration are no numbers.
_UNFIT = (RuntimeError, IndexError, ValueError, TypeError, AttributeError, ZeroDivisionError)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs is in each four bits


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

    def shape(self, name: str) -> tuple[int, ...]:
        """Return [out, in], without unpacking anything."""
        stem = name.removesuffix(".weight")
        if "[" in name:
            outputs, blocks = self._get(_part_of_module(name, "blocks")).shape[:2]
            return outputs, blocks * 32
        if self._has(f"{stem}.weight_packed"):
            return tuple(self._get(f"{stem}.weight_shape").tolist())
        if not self._has(f"{stem}.qweight"):
            return tuple(self._get(name).shape)
        rows, columns = self._get(f"{stem}.qweight").shape
        bits = self._bits(stem)
        return (columns * 32 // bits, rows) if self._is_awq else (columns, rows * 32 // bits)

    def read(self, name: str) -> torch.Tensor:
        """Return float32 [out, in].

        Raises:
            CorruptModelError: what belongs to it is missing, or the shapes do not match.
        """
        try:
            if (mxfp4 := self._mxfp4(name)) is not None:
                import gguf

                return torch.from_numpy(gguf.dequantize(mxfp4.rows, mxfp4.type))
            numbers, zeros, scales = self._parts(name)
            return (numbers - zeros) * scales
        except _UNFIT as error:
            raise CorruptModelError(f"{name}: its quantised parts do not fit together: {error}") from error

    def raw(self, name: str) -> RawTensor | None:
        """Return the matrix in the nearest format of the kernels; None if its rows are not a multiple of 32.

        Raises:
            CorruptModelError: as `read`.
        """
        try:
            if (mxfp4 := self._mxfp4(name)) is not None:
                return mxfp4
            numbers, zeros, scales = self._parts(name)
            if numbers.shape[1] % 32:
                return None
            kind, blocks = _in_blocks(numbers, zeros, scales)
        except _UNFIT as error:
            raise CorruptModelError(f"{name}: its quantised parts do not fit together: {error}") from error
        rows = blocks.reshape(len(numbers), -1)
        return RawTensor(rows, kind, tuple(numbers.shape), origin=str(self._config.get("quant_method")))

    def _parts(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return numbers [out, in], zero points and scales that broadcast to them: (number - zero) * scale."""
        stem = name.removesuffix(".weight")
        if self._has(f"{stem}.qweight"):
            return self._awq(stem) if self._is_awq else self._gptq(stem)
        return self._scaled(stem)

    @property
    def _is_awq(self) -> bool:
        return self._config.get("quant_method") == "awq"

    def _bits(self, stem: str) -> int:
        """Return the bits of a number in gptq and awq, which may differ between matrices."""
        return 32 * self._get(f"{stem}.qzeros").shape[1] // self._get(f"{stem}.scales").shape[1]

    def _mxfp4(self, name: str) -> RawTensor | None:
        """Return a matrix of an expert in the blocks of GGUF, where the second half of a block's numbers lies above the
        first half; None if it is not stored in MXFP4."""
        import gguf

        blocks, exponents = (_part_of_module(name, part) for part in ("blocks", "scales"))
        if not self._has(blocks):
            return None
        pairs = self._get(blocks)
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2)  # [out, in / 32, 32]
        halves = numbers[..., :16] | numbers[..., 16:] << 4
        rows = torch.cat((self._get(exponents).unsqueeze(-1), halves), dim=-1).flatten(1)
        kind = gguf.GGMLQuantizationType.MXFP4
        return RawTensor(rows.numpy(), kind, (len(rows), numbers.shape[1] * 32))

    @staticmethod
    def _forms(name: str) -> list[str]:
        stem = name.removesuffix(".weight")
        if "[" in name:
            return [_part_of_module(name, "blocks")]
        return [f"{stem}.{form}" for form in ("qweight", "weight_packed", "weight_scale_inv", "weight_scale")]

    def _scaled(self, stem: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inverse = self._has(f"{stem}.weight_scale_inv")
        scale = self._get(f"{stem}.weight_scale_inv" if inverse else f"{stem}.weight_scale").float()
        zero, zero_point = torch.zeros(()), f"{stem}.weight_zero_point"
        if self._has(f"{stem}.weight_packed"):
            rows, columns = self._get(f"{stem}.weight_shape").tolist()
            bits = -(-32 * self._get(f"{stem}.weight_packed").shape[1] // columns)
            weight = unpack(self._get(f"{stem}.weight_packed"), bits)[:, :columns].float()
            zero = torch.tensor(float(1 << (bits - 1)))
            if self._has(zero_point):
                zero = unpack(self._get(zero_point).T, bits).T[:rows].float()
        else:
            weight = self._get(f"{stem}.weight").float()
            if self._has(zero_point):
                zero = self._get(zero_point).float()
        group = self._get(f"{stem}.weight_g_idx").long() if self._has(f"{stem}.weight_g_idx") else None
        return weight, self._of_weights(zero, weight.shape, group), self._of_weights(scale, weight.shape, group)

    def _of_weights(self, part: torch.Tensor, shape: torch.Size, group: torch.Tensor | None) -> torch.Tensor:
        """Return scales or zero points for every weight, see `_spread`.

        Args:
            group: of each input; -1, as compressed-tensors also writes it, where groups are in order.
        """
        if group is not None and part.numel() > 1 and int(group.min()) >= 0:
            return part[:, group]
        config_groups = (self._config.get("config_groups") or {}).values()
        blocks = [(each.get("weights") or {}).get("block_structure") for each in config_groups]
        block = next(filter(None, [self._config.get("weight_block_size"), *blocks]), None)
        if block is None or part.shape != (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
            return _spread(part, shape)
        return part.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]

    def _gptq(self, stem: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales, bits = self._get(f"{stem}.scales").float(), self._bits(stem)
        quants = unpack(self._get(f"{stem}.qweight").T, bits).T
        zeros = unpack(self._get(f"{stem}.qzeros"), bits)
        if self._config.get("checkpoint_format", "gptq") == "gptq":
            zeros = zeros + 1
        if self._has(f"{stem}.g_idx"):
            group = self._get(f"{stem}.g_idx").long()
        else:
            group = torch.arange(len(quants)) // (len(quants) // len(scales))
        return quants.T.float(), zeros[group].T.float(), scales[group].T

    def _awq(self, stem: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales = self._get(f"{stem}.scales").float()
        quants, zeros = (_awq_unpack(self._get(f"{stem}.{part}")) for part in ("qweight", "qzeros"))
        each = len(quants) // len(scales)
        return quants.T.float(), zeros.repeat_interleave(each, 0).T.float(), scales.repeat_interleave(each, 0).T


def _part_of_module(name: str, part: str) -> str:
    """'experts.down_proj[5].weight' -> 'experts.down_proj_blocks[5]', a selection from one tensor for all experts."""
    return name.removesuffix(".weight").replace("[", f"_{part}[")


def quantise(weight: torch.Tensor, name: str, origin: str) -> RawTensor:
    """Round floats [out, in] to the format of the kernels with this name, as llama.cpp does."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    return RawTensor(gguf.quantize(weight.float().numpy(), kind), kind, tuple(weight.shape), origin=origin)


def _in_blocks(
    numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> tuple[GGMLType, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return the nearest format, and its blocks of 32 inputs, uint8 [blocks, bytes]."""
    import gguf
    from gguf import GGMLQuantizationType as GGMLType

    values = numbers.reshape(-1, 32)
    zero, scale = (part.expand(numbers.shape).reshape(-1, 32) for part in (zeros.float(), scales.float()))
    stored = scale[:, :1].half().float()
    # fp16 holds no scales below 6e-5 precisely.
    precise = bool(((stored - scale).abs() <= 1e-3 * scale.abs()).all())
    if not precise or bool((zero != zero[:, :1]).any()) or bool((values != values.round()).any()):
        return GGMLType.Q8_0, gguf.quantize(((values - zero) * scale).numpy(), GGMLType.Q8_0)
    head = [scale[:, :1].half()]
    if float(values.min()) >= 0 and float(values.max()) <= 15:
        kind = GGMLType.Q4_0 if bool((zero == 8).all()) else GGMLType.Q4_1
        if kind is GGMLType.Q4_1:
            head.append((-zero[:, :1] * scale[:, :1]).half())
        body = values[:, :16].byte() | values[:, 16:].byte() << 4
    elif float((values - zero).abs().max()) <= 127:
        kind, body = GGMLType.Q8_0, (values - zero).to(torch.int8).view(torch.uint8)
    else:
        return GGMLType.Q8_0, gguf.quantize(((values - zero) * scale).numpy(), GGMLType.Q8_0)
    return kind, torch.cat([*(part.contiguous().view(torch.uint8) for part in head), body], 1).numpy()


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of int32 [rows, n] as int32 [rows, n * 32 / bits], the lowest bits first."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        return (packed.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32) & mask).flatten(1)
    words = packed.long() & 0xFFFFFFFF
    pairs = words | words.roll(-1, dims=1) << 32
    first = torch.arange(0, packed.shape[1] * 32 // bits) * bits
    return (pairs[:, first // 32] >> first % 32 & mask).int()


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
