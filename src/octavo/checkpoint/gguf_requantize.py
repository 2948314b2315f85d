"""GGUF weights of types that the kernels do not multiply, converted to Q8_0.

The kernels multiply `KERNEL_TYPES` from the file's own bits. Weights of other types are rounded to 1/127 of the largest
of 32. Dequantised to bf16, which is the alternative, they would take 16 bits instead of 8.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GGMLType

from octavo.checkpoint.gguf_config import tensor_names
from octavo.checkpoint.gguf_file import KERNEL_TYPE_NAMES, GGUFFile

Bytes = npt.NDArray[np.uint8]

FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
KERNEL_TYPES = tuple(GGMLType[name] for name in KERNEL_TYPE_NAMES)
# Of a block whose factors of six bits take a byte each.
_LOADED_BYTES = {GGMLType.Q3_K: 114, GGMLType.Q4_K: 148, GGMLType.Q5_K: 180, GGMLType.IQ4_XS: 138}
_VALUES_AT_ONCE = 1 << 18  # 1 MiB of floats, which stays in a core's cache


def kernel_type(stored: Any) -> Any:
    """Return the type in which the kernels multiply a quantised type: itself if they support it."""
    return stored if stored in KERNEL_TYPES else GGMLType.Q8_0


def convert(rows: Bytes, stored: Any, kind: Any, *, num_threads: int = 1) -> Bytes:
    """Convert quantised rows to Q8_0.

    Args:
        rows: uint8 [rows, bytes per row], in blocks of `stored`.
        kind: Q8_0, or `stored` itself, which changes nothing.

    Returns:
        uint8 [rows, bytes per row], in blocks of `kind`. An infinite or NaN scale stays one, and is refused when the
        weight is packed.
    """

    def convert_part(part: Bytes) -> Bytes:
        with np.errstate(all="ignore"):  # damaged weights
            converted: Bytes = gguf.quantize(gguf.dequantize(part, stored), GGMLType.Q8_0)
        return converted

    if stored is kind:
        return rows
    with ThreadPoolExecutor(num_threads) as threads:
        return np.concatenate(list(threads.map(convert_part, _parts(rows, stored))))


def loaded_bytes(file: GGUFFile) -> int:
    """Return the bytes of a file's weights once loaded: quantised ones as the kernels take them, floats in bf16."""
    total, names = 0, tensor_names(file)
    for name, tensor in file.tensors.items():
        if names.from_gguf(name):
            kind = GGMLType.BF16 if tensor.type in FLOAT_TYPES else kernel_type(tensor.type)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            total += prod(tensor.shape) * _LOADED_BYTES.get(kind, block_bytes) // block_size
    return total


def _parts(rows: Bytes, stored: Any) -> Iterator[Bytes]:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    step = max(1, _VALUES_AT_ONCE // (rows.shape[1] // block_bytes * block_size))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
