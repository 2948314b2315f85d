"""Codecs of keys and values. Their protocol is in `base.py`, and their sizes are in `kvcache/formats.py`."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.kvcache.formats import KVFormat
from octavo.storage.codec.base import Coded, VectorCodec
from octavo.storage.codec.floats import BF16, FP16, FP32
from octavo.storage.codec.fp8 import FP8_E4M3, FP8_E5M2
from octavo.storage.codec.int4 import INT4_KEYS, INT4_VALUES
from octavo.storage.codec.int8 import INT8
from octavo.storage.codec.nvfp4 import NVFP4

CODECS: Mapping[str, tuple[VectorCodec, VectorCodec]] = {
    "bfloat16": (BF16, BF16),
    "float16": (FP16, FP16),
    "float32": (FP32, FP32),
    "fp8_e4m3": (FP8_E4M3, FP8_E4M3),
    "fp8_e5m2": (FP8_E5M2, FP8_E5M2),
    "int8": (INT8, INT8),
    # Keys get more bits, because an error in a key changes every weight of a softmax, whereas errors in values are
    # averaged (KIVI, Liu et al. 2024; KVTuner, Li et al. 2025).
    "k8v4": (INT8, INT4_VALUES),
    "int4": (INT4_KEYS, INT4_VALUES),
    "nvfp4": (NVFP4, NVFP4),
}
"""The codecs of keys and of values, by the names in `kvcache.formats.KV_FORMATS`."""

_KEYS = {keys.format.name: keys for keys, _ in CODECS.values()}
_VALUES = {values.format.name: values for _, values in CODECS.values()}


def codecs_of(format: KVFormat) -> tuple[VectorCodec, VectorCodec]:
    """Return the codecs of keys and of values."""
    return _KEYS[format.keys.name], _VALUES[format.values.name]


__all__ = ["CODECS", "Coded", "VectorCodec", "codecs_of"]
