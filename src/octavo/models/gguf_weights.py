"""The tensors of a GGUF file for the decoder, with Hugging Face names and values, as floats or stored bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gguf
import numpy as np
import numpy.typing as npt
import torch

from octavo.checkpoint.gguf_file import GGUFFile, GGUFTensor, check_tensor_type
from octavo.checkpoint.model_config import ModelConfig
from octavo.errors import CorruptModelError
from octavo.models.weights import RawTensor, row_order


class GGUFWeights:
    """The tensors of a GGUF file, dequantised on request, with q and k rows in the decoder's order."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_names: dict[str, str] = {}
        self._learnt = _learnt_by_activations(file, config)
        self._experts: dict[str, int] = {}  # of the names of matrices in a tensor that holds those of all experts
        for gguf_name, tensor in file.tensors.items():
            if name := config.names.from_gguf(gguf_name):
                check_tensor_type(tensor, file.path)
                if "*" in name:
                    experts = {name.replace("*", str(expert)): expert for expert in range(tensor.shape[0])}
                    self._experts |= experts
                    self._gguf_names |= dict.fromkeys(experts, gguf_name)
                else:
                    self._gguf_names[name] = gguf_name

    def names(self) -> list[str]:
        return [*self._gguf_names, *self._learnt]

    def has(self, name: str) -> bool:
        return name in self._gguf_names or name in self._learnt

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._learnt[name].shape) if name in self._learnt else self._tensor(name).shape

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in self._learnt:
            return self._learnt[name].to(dtype)
        tensor, offset = self._tensor(name), self._config.layer.norm_offset
        if offset and name.endswith("norm.weight"):  # llama.cpp's converter has added it
            return _dequantize(self._rows(name), tensor, torch.float32).sub_(offset).to(dtype)
        values = _dequantize(self._rows(name), tensor, dtype)
        if tensor.type.name not in _FLOATS:
            _check_finite(values, name)
        return values

    def raw(self, name: str) -> RawTensor | None:
        tensor = self._tensor(name)
        if tensor.type.name in _FLOATS:
            return None
        stored = self._file.tensors[self._gguf_names[name]]
        raw = RawTensor(self._rows(name), tensor.type, tensor.shape)
        if self._experts.get(name, 0) + 1 < (stored.shape[0] if name in self._experts else 1):
            return raw  # the next expert's matrix shares pages with this one
        return replace(raw, release=partial(self._file.release, stored.name))

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        rows = self._file.raw(self._gguf_names[name])
        if (expert := self._experts.get(name)) is not None:
            count = len(rows) // self._file.tensors[self._gguf_names[name]].shape[0]
            rows = rows[expert * count : (expert + 1) * count]
        order = row_order(name, self._config)
        if order is None:
            return rows
        return rows.reshape(len(order), -1)[order].reshape(rows.shape)  # a bias is one row of many values

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            tensor = self._file.tensors[self._gguf_names[name]]
        except KeyError:
            raise CorruptModelError(f"{self._file.path} has no tensor {name}") from None
        return replace(tensor, shape=tensor.shape[1:]) if name in self._experts else tensor


def _learnt_by_activations(file: GGUFFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the parameters of each layer's xIELU, which metadata has, by Hugging Face's names."""
    if config.hidden_act != "xielu":
        return {}
    found: dict[str, torch.Tensor] = {}
    for part, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ())):
        stated = torch.tensor(file.get(f"xielu.{part}"), dtype=torch.float32)
        if stated.shape != (config.num_layers,):
            raise CorruptModelError(f"{file.path}: xielu.{part} must be {config.num_layers} numbers, one a layer")
        for layer, value in enumerate(stated):
            found[f"{config.names.hf('activation', layer)}.{part}"] = value.view(shape)
    return found


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_VALUES_AT_ONCE = 1 << 22  # 16 MiB of float32


def _dequantize(rows: npt.NDArray[np.uint8], tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise stored bytes [rows, row_bytes] to float32, then round to `dtype`."""
    kind = tensor.type.name
    if kind in _FLOATS:
        stored = torch.from_numpy(rows.reshape(-1)).view(_FLOATS[kind])
        return stored.view(tensor.shape).to(dtype, copy=True)  # a copy, so that the file can be released
    values = torch.empty(len(rows), tensor.shape[-1], dtype=dtype)
    step = max(1, _VALUES_AT_ONCE // tensor.shape[-1])
    for start in range(0, len(rows), step):
        values[start : start + step] = torch.from_numpy(gguf.dequantize(rows[start : start + step], tensor.type))
    return values.view(tensor.shape)


def _check_finite(values: torch.Tensor, name: str) -> None:
    """Raise CorruptModelError where a row of dequantised weights holds an infinity or NaN, as the packed path does."""
    if torch.stack(torch.aminmax(values)).isfinite().all():
        return
    row = int(values.flatten(1).isfinite().all(1).logical_not().nonzero()[0])
    raise CorruptModelError(f"{name}: row {row} has a scale that is infinite or not a number: the weight is damaged")
