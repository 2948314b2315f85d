"""The interface from which a model reads its weights, independent of the file format."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.checkpoint.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A quantised matrix as its file stores it.

    Attributes:
        rows: uint8 [shape[0], bytes per row], in Hugging Face's row order.
        type: a gguf.GGMLQuantizationType.
        shape: shape of the encoded matrix.
        release: gives back the memory that reading `rows` took; they may still be read, and take it again.
        origin: how its file stores it, if otherwise.
    """

    rows: npt.NDArray[np.uint8]
    type: Any
    shape: tuple[int, ...]
    release: Callable[[], None] = lambda: None
    origin: str = ""


def row_order(name: str, config: ModelConfig) -> npt.NDArray[np.intp] | None:
    """Return the indices that bring the rows of a projection to queries or keys into the decoder's order, or None.

    The decoder rotates the halves of a head; files may have been written for the rotation of neighbouring dimensions:

        decoder       x0 x1 x2 x3 | y0 y1 y2 y3     (x_i rotates with y_i)
        interleaved   x0 y0 x1 y1 x2 y2 x3 y3

    Of latent attention's, the rotated rows of a head come first in the decoder, and last in files.

    In a fused projection of queries, keys and values, the rows of values come last and keep their order.

    Rows of a fused projection may be ordered by KV head, | q q k v | q q k v |, instead of | q q q q | k k | v v |.

    Whole rows move, so the same indices apply to quantised bytes, dequantised values and biases.
    """
    if not (config.qkv_by_head or config.rotary_interleaved or config.latent):
        return None
    part = config.names.part_of(name)
    if part == "qkv" and config.qkv_by_head:
        group = config.num_heads // config.num_kv_heads
        shape = (config.num_kv_heads, group + 2, config.head_dim)
        by_head = np.arange(math.prod(shape)).reshape(shape)
        return np.concatenate([rows.reshape(-1) for rows in np.split(by_head, (group, group + 1), axis=1)])
    dim, latent = config.rope.rotary_dim, config.latent
    if latent is not None:
        # Files have what is rotated last, the decoder first.
        heads = {"q": config.num_heads, "q_b": config.num_heads, "kv_a": 1}.get(part or "")
        plain = latent.rank if part == "kv_a" else latent.plain_dim
    else:
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "qkv": config.num_heads + config.num_kv_heads}.get(
            part or ""
        )
        plain = config.head_dim - dim
    if heads is None:
        return None
    rows = np.arange(heads * (dim + plain)).reshape(heads, dim + plain)
    if latent is not None:
        rows = np.roll(rows, dim, axis=1)
    rotated = rows[:, :dim]
    if config.rotary_interleaved:
        rotated = rotated.reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(heads, dim)
    order = np.concatenate((rotated, rows[:, dim:]), axis=1).reshape(-1)
    values = config.num_kv_heads * config.value_dim if part == "qkv" else 0
    return np.concatenate((order, len(order) + np.arange(values)))


# How a name in brackets selects rows, of as many as there are.
_SELECTORS: dict[str, Callable[[int], slice]] = {
    ":half": lambda rows: slice(0, rows // 2),
    "half:": lambda rows: slice(rows // 2, rows),
    "::2": lambda rows: slice(0, rows, 2),
    "1::2": lambda rows: slice(1, rows, 2),
}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor that holds several matrices: 'input_linear[5,:half].weight' is the first half of the rows of
    the fifth matrix in 'input_linear.weight'."""

    tensor: str
    selectors: tuple[str, ...] = ()
    transposed: bool = False  # the matrices are

    @classmethod
    def parse(cls, name: str) -> TensorPart:
        match = re.fullmatch(r"(.+)\[(.+)\](.*)", name)
        return cls(match[1] + match[3], tuple(match[2].split(","))) if match else cls(name)

    def of(self, stored: Any) -> Any:
        """Select from a tensor, or from what reads its slices."""
        for selector in self.selectors:
            if not selector.isdigit():
                stored = stored[_SELECTORS[selector](stored.shape[0])]
            elif self.transposed:
                stored = stored[int(selector)].T
            else:
                stored = stored[int(selector)]
        return stored

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.of(np.broadcast_to(np.int8(0), stored)).shape)


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, such as "model.layers.0.self_attn.q_proj.weight", with rows of queries and
    keys in the decoder's order (`row_order`)."""

    def names(self) -> list[str]: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor on the CPU; raises CorruptModelError if there is none of this name."""
        ...

    def raw(self, name: str) -> RawTensor | None:
        """Return the bytes of a matrix that is stored quantised, as GGUF has them; None if it is stored as floats."""
        ...
