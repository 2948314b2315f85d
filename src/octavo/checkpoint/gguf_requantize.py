"""GGUF weights of types that the kernels do not multiply, converted to types that they do.

The kernels multiply Q4_0, Q4_1 and Q8_0, where 32 weights share a scale:

    Q4_K          -> Q4_1   the same quants; the product of its two scales, and of its two minimums, is rounded to fp16
    Q5_0, IQ4_NL  -> Q8_0   exactly: a weight is its block's scale times an integer of eight bits
    other types   -> Q8_0   dequantised, and each weight rounded to 1/127 of the largest of its block

Dequantised to bf16, which is the alternative, the same weights take 12 or 16 bits instead of 5 or 8.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GGMLType

from octavo.checkpoint.gguf_config import tensor_names
from octavo.checkpoint.gguf_file import GGUFFile

Bytes = npt.NDArray[np.uint8]

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
KERNEL_TYPES = (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0)
# Types with 32 weights to a block, which begins with its only scale: in fp16, times an integer.
_WHOLE_MULTIPLES = (GGMLType.Q5_0, GGMLType.IQ4_NL)
_VALUES_AT_ONCE = 1 << 18  # 1 MiB of floats, which stays in a core's cache


def kernel_type(stored: Any) -> Any:
    """Return the type in which the kernels multiply a quantised type: itself if they support it."""
    if stored in KERNEL_TYPES:
        return stored
    return GGMLType.Q4_1 if stored is GGMLType.Q4_K else GGMLType.Q8_0


def requantize(rows: Bytes, stored: Any, wanted: Any, *, num_threads: int = 1) -> Bytes:
    """Convert rows from one quantised type to another.

    Args:
        rows: uint8 [rows, bytes per row], in blocks of `stored`.
        wanted: `stored` itself, `kernel_type(stored)`, or Q8_0.

    Returns:
        uint8 [rows, bytes per row], in blocks of `wanted`; `rows` itself if nothing is to be converted. An infinite or
        NaN scale stays one, and is refused when the weight is packed.
    """
    if wanted is stored:
        return rows
    convert: Callable[[Bytes], Bytes]
    if (stored, wanted) == (GGMLType.Q4_K, GGMLType.Q4_1):
        convert = _q4_k_to_q4_1
    elif wanted is GGMLType.Q8_0:

        def convert(part: Bytes) -> Bytes:
            scales = part.reshape(-1, gguf.GGML_QUANT_SIZES[stored][1])[:, :2] if stored in _WHOLE_MULTIPLES else None
            return _to_q8_0(gguf.dequantize(part, stored), scales)

    else:
        raise ValueError(f"no conversion from {stored.name} to {wanted.name}")
    with ThreadPoolExecutor(num_threads) as threads:
        return np.concatenate(list(threads.map(convert, _parts(rows, stored))))


def loaded_bytes(file: GGUFFile) -> int:
    """Return the bytes of a file's weights once loaded: quantised ones as the kernels take them, floats in bf16."""
    total, names = 0, tensor_names(file)
    for name, tensor in file.tensors.items():
        if names.from_gguf(name):
            kind = GGMLType.BF16 if tensor.type in FLOAT_TYPES else kernel_type(tensor.type)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            total += prod(tensor.shape) * block_bytes // block_size
    return total


def _parts(rows: Bytes, stored: Any) -> Iterator[Bytes]:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    step = max(1, _VALUES_AT_ONCE // (rows.shape[1] // block_bytes * block_size))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _to_q8_0(values: npt.NDArray[np.float32], stored_scales: Bytes | None) -> Bytes:
    """float32 [rows, n] -> Q8_0: scale fp16 | 32 × int8. The scale is rounded first, and quants by what it became.

    Args:
        stored_scales: uint8 [blocks, 2], scales in fp16 to use instead of 1/127 of the largest weight.
    """
    blocks = values.reshape(-1, 32)
    out = np.empty((len(blocks), 34), np.uint8)
    with np.errstate(all="ignore"):  # damaged weights
        if stored_scales is None:
            scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
        else:
            scales = stored_scales.copy().view(np.float16)
        inverse = np.where(scales != 0, 1 / scales.astype(np.float32), 0)
        quants = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    out[:, :2] = scales.view(np.uint8)
    out[:, 2:] = quants.view(np.uint8)
    return out.reshape(len(values), -1)


def _q4_k_to_q4_1(rows: Bytes) -> Bytes:
    """Split each block of 256 into eight of 32: the quants move, and scale · scale and -(minimum · minimum) are stored.

    Q4_K: scale fp16 | minimum fp16 | 12 bytes, 8 × (scale, minimum) in six bits | 128 bytes, of which each run of 32
    has the quants of one block of 32 in its low halves and those of the next in its high halves. Q4_1: scale fp16 |
    minimum fp16 | 16 bytes, with the first 16 quants in the low halves.
    """
    blocks = rows.reshape(-1, 144)
    factors = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    scales, minimums = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    out = np.empty((len(blocks), 8, 20), np.uint8)
    with np.errstate(all="ignore"):  # damaged weights
        both = np.stack((factors[:, :1] * scales, factors[:, 1:] * -minimums.astype(np.float32)), axis=-1)
        out[:, :, :4] = both.astype(np.float16).view(np.uint8)
    runs = blocks[:, 16:].reshape(-1, 4, 2, 16)
    first, last = runs[:, :, 0], runs[:, :, 1]
    out[:, 0::2, 4:] = first & 15 | last << 4
    out[:, 1::2, 4:] = first >> 4 | last & 0xF0
    return out.reshape(len(rows), -1)
