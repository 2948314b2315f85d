"""The interface from which a model reads its weights, independent of the file format."""

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
        shape: shape of the encoded matrix.
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
        """Return a contiguous tensor on the CPU; raises CorruptModelError if there is none of this name."""
        ...

    def raw(self, name: str) -> RawTensor | None:
        """Return the stored bytes of a GGUF tensor; None if the file stores ordinary floats."""
        ...
