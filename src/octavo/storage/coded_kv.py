"""A layer whose keys and values are encoded by a codec: views of its bytes, written and read in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.kvcache.spec import LayerKVSpec
from octavo.storage.codec import LANES, Coded, VectorCodec, split_last
from octavo.storage.layer_kv import LayerKV, SideArguments


@dataclass(frozen=True, slots=True)
class CodedSide:
    """The keys or the values of one layer.

    Attributes:
        codes: uint8; for keys [num_blocks, kv_heads, groups, units, lanes, unit], for values [num_blocks, kv_heads,
            block_size / together, code_bytes, together].
        fields: uint8 [num_blocks, kv_heads, block_size, bytes] each.
        scale: float32 [kv_heads] for a calibrated codec; 1 for others.
    """

    codec: VectorCodec
    dim: int
    codes: torch.Tensor
    fields: tuple[torch.Tensor, ...]
    scale: torch.Tensor

    @property
    def for_kernels(self) -> SideArguments:
        scale, zero = (*self.fields, None, None)[:2]
        heads = self.scale if self.codec.format.calibrated else None
        return self.codec.format.name, self.codes, scale, zero, heads

    def encode(self, x: torch.Tensor) -> Coded:
        """Encode [tokens, kv_heads, dim]."""
        return self.codec.encode(x.float(), self.scale)

    def decode(self, codes: torch.Tensor, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Decode codes [kv_heads, blocks * block_size, code_bytes] to float32 [num_tokens, kv_heads, dim]."""
        fields = (field.index_select(0, block_table).transpose(0, 1).flatten(1, 2) for field in self.fields)
        coded = Coded(codes[:, :num_tokens].transpose(0, 1), tuple(f[:, :num_tokens].transpose(0, 1) for f in fields))
        return self.codec.decode(coded, self.dim, self.scale)


class CodedKV(LayerKV):
    """One layer's part of every block, encoded by a codec.

    Attributes:
        finds_scales: whether the next tokens written determine the scales, which are fixed from then on.
    """

    def __init__(self, keys: CodedSide, values: CodedSide, group: int, sliding_window: int | None) -> None:
        self.keys = keys
        self.values = values
        self.group = group
        self.sliding_window = sliding_window
        self.finds_scales = False

    @classmethod
    def view(
        cls,
        arena: torch.Tensor,
        offset: int,
        layer: LayerKVSpec,
        codecs: tuple[VectorCodec, VectorCodec],
        block_size: int,
        group: int,
        *,
        by_tokens: bool = False,
    ) -> CodedKV:
        """Return the layer whose part of each block of `arena`, uint8 [num_blocks, block_bytes], starts at byte
        `offset`.

        Args:
            by_tokens: whether codes are stored token by token, as for a GPU.
        """
        (keys, values), heads, num_blocks = codecs, layer.num_kv_heads, arena.shape[0]
        lanes = 1 if by_tokens else lanes_of(block_size)
        together = values.together if lanes == LANES else 1

        def take(shape: tuple[int, ...]) -> torch.Tensor:
            nonlocal offset
            size = (num_blocks, heads, *shape)
            strides, step = [1], 1
            for length in reversed(size[2:]):
                step *= length
                strides.insert(0, step)
            view = arena.as_strided(size, (arena.stride(0), *strides), arena.storage_offset() + offset)
            offset += heads * step
            return view

        def take_fields(codec: VectorCodec, dim: int) -> tuple[torch.Tensor, ...]:
            return tuple(take((block_size, num_bytes)) for num_bytes in codec.format.field_bytes(dim))

        units = keys.format.code_bytes(layer.key_dim) // keys.unit
        key_codes = take((block_size // lanes, units, lanes, keys.unit))
        value_codes = take((block_size // together, values.format.code_bytes(layer.value_dim), together))
        key_fields, value_fields = take_fields(keys, layer.key_dim), take_fields(values, layer.value_dim)
        ones = torch.ones(heads, device=arena.device)
        return cls(
            CodedSide(keys, layer.key_dim, key_codes, key_fields, ones),
            CodedSide(values, layer.value_dim, value_codes, value_fields, ones.clone()),
            group,
            layer.sliding_window,
        )

    @property
    def for_kernels(self) -> tuple[SideArguments, SideArguments]:
        return self.keys.for_kernels, self.values.for_kernels

    @property
    def block_size(self) -> int:
        return self.values.codes.shape[2] * self.values.codes.shape[4]

    @property
    def by_tokens(self) -> bool:
        """Whether keys are stored token by token."""
        return self.keys.codes.shape[4] == 1

    @property
    def value_dim(self) -> int:
        return self.values.dim

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        if self.finds_scales and len(slots):
            self._find_scales(key, value)
        blocks, offsets = slots // self.block_size, slots % self.block_size
        lanes, unit = self.keys.codes.shape[4:]
        # Advanced indices separated by slices put the token dimension first on the left-hand side.
        codes, fields = self.keys.encode(key)
        self.keys.codes[blocks, :, offsets // lanes, :, offsets % lanes] = split_last(codes, -1, unit)
        _put(self.keys.fields, fields, blocks, offsets)
        codes, fields = self.values.encode(value)
        together = self.values.codes.shape[4]
        self.values.codes[blocks, :, offsets // together, :, offsets % together] = codes
        _put(self.values.fields, fields, blocks, offsets)

    def gather_heads(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV.gather_heads`."""
        # [kv_heads, blocks, groups, lanes, units, unit] and [kv_heads, blocks, block_size / n, n together, code_bytes]
        codes = self.keys.codes.index_select(0, block_table).permute(1, 0, 2, 4, 3, 5)
        key = self.keys.decode(codes.flatten(1, 3).flatten(2), block_table, num_tokens)
        codes = self.values.codes.index_select(0, block_table).permute(1, 0, 2, 4, 3)
        value = self.values.decode(codes.flatten(1, 3), block_table, num_tokens)
        return key.permute(1, 2, 0), value.transpose(0, 1)

    def _find_scales(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Choose scales that clip neither these tokens nor others twice as large; floats lose nothing by headroom."""
        for side, x in ((self.keys, key), (self.values, value)):
            if not side.codec.format.calibrated:
                continue
            most = x.float().abs().nan_to_num(0.0, posinf=0.0).amax((0, 2))
            side.scale.copy_(torch.where(most > 0, 2 * most / side.codec.largest, 1.0))
        self.finds_scales = False


def _put(
    fields: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...], blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    for field, new in zip(fields, found, strict=True):
        field[blocks, :, offsets] = new


def lanes_of(block_size: int) -> int:
    """Return the number of tokens whose keys are stored side by side."""
    return LANES if block_size % LANES == 0 else block_size
