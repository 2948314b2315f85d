"""GGUF types without kernels of their own, converted to those that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as GGMLType

from octavo.checkpoint.gguf_file import SUPPORTED_TENSOR_TYPES, GGUFFile
from octavo.checkpoint.gguf_requantize import FLOAT_TYPES, KERNEL_TYPES, convert, kernel_type, loaded_bytes
from tests.models import tiny

CONVERTED = [kind for kind in SUPPORTED_TENSOR_TYPES if kind not in (*FLOAT_TYPES, *KERNEL_TYPES)]


def random_rows(kind: Any, num_rows: int = 6, width: int = 512) -> npt.NDArray[np.uint8]:
    """Blocks of random quants, with ordinary scales."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    rows = rng.integers(0, 256, (num_rows, width // block_size, block_bytes), dtype=np.uint8)
    # The high bytes of ordinary fp16 scales, which are at either end of a block.
    for at in (1, 3, -1):
        rows[:, :, at] = rng.integers(0x20, 0x28, rows.shape[:2], dtype=np.uint8)
    return rows.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", CONVERTED, ids=lambda kind: kind.name)
def test_weights_change_by_no_more_than_the_rounding_to_q8_0(kind: Any) -> None:
    rows = random_rows(kind)
    before = gguf.dequantize(rows, kind)
    assert kernel_type(kind) is GGMLType.Q8_0
    after = gguf.dequantize(convert(rows, kind, GGMLType.Q8_0), GGMLType.Q8_0)
    assert np.isfinite(before).all()
    assert before.any()
    blocks, error = before.reshape(-1, 32), np.abs(after - before).reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    assert (error <= largest / 127 * (0.5 + 127 * 2**-11)).all()


@pytest.mark.parametrize("kind", [GGMLType.IQ4_XS, GGMLType.Q6_K], ids=lambda kind: kind.name)
def test_threads_and_parts_do_not_change_the_bytes(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(kind, num_rows=33)
    whole = convert(rows, kind, GGMLType.Q8_0)
    monkeypatch.setattr("octavo.checkpoint.gguf_requantize._VALUES_AT_ONCE", 1024)
    assert np.array_equal(convert(rows, kind, GGMLType.Q8_0, num_threads=3), whole)


def test_zeros_stay_zeros_and_a_damaged_scale_stays_one() -> None:
    rows = np.zeros((2, 144), np.uint8)
    assert not gguf.dequantize(convert(rows, GGMLType.Q4_K, GGMLType.Q8_0), GGMLType.Q8_0).any()
    rows[1, 1] = rows[1, 4] = 0x7E  # NaN
    assert np.isnan(convert(rows, GGMLType.Q4_K, GGMLType.Q8_0)[1, :2].view(np.float16)).all()


def test_loaded_bytes_count_the_converted_types(tmp_path: Path) -> None:
    model = tiny.make_model("Llama", hidden_size=256, intermediate_size=256)
    sizes = {}
    for kind in ("IQ4_XS", "Q4_K", "Q8_0", "Q6_K", "IQ3_S", "BF16"):
        tiny.write_gguf(tmp_path / f"{kind}.gguf", model, quantization=kind)
        sizes[kind] = loaded_bytes(GGUFFile(tmp_path / f"{kind}.gguf"))
    assert sizes["IQ4_XS"] < sizes["Q4_K"] < sizes["Q6_K"] < sizes["IQ3_S"] == sizes["Q8_0"] < sizes["BF16"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sizes["BF16"] == 2 * parameters
