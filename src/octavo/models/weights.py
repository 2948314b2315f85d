"""The weight source that a model reads from, whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A quantised matrix as its file stores it.

    Attributes:
        rows: uint8 [shape[0], bytes per row], in Hugging Face's row order.
        type: a gguf.GGMLQuantizationType.
        shape: of the matrix the bytes encode.
    """

    rows: npt.NDArray[np.uint8]
    type: Any
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, such as "model.layers.0.self_attn.q_proj.weight"."""

    def names(self) -> list[str]: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor on the CPU, contiguous. Raises CorruptModelError where there is none of that name."""
        ...

    def raw(self, name: str) -> RawTensor | None:
        """The stored bytes of a GGUF tensor; None where the file keeps ordinary floats."""
        ...
