"""What a checkpoint says of its KV cache is followed; what it says of its weights still decides who runs it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.checkpoint.kv_cache_scheme import kv_cache_scheme_dtype, only_kv_cache_scheme

STATIC_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LINEARS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
ATTENTION = {"group_0": {"targets": ["LlamaAttention"], "input_activations": STATIC_FP8, "weights": None}}


def config(scheme: object, groups: object = None) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": scheme}


@pytest.mark.parametrize(
    ("quantization", "native", "dtype"),
    [
        (config(STATIC_FP8), True, "fp8_e4m3"),
        (config(STATIC_FP8, {}), True, "fp8_e4m3"),
        (config(STATIC_FP8, ATTENTION), True, "fp8_e4m3"),
        (config(STATIC_FP8, LINEARS), False, "fp8_e4m3"),
        (config(None, LINEARS), False, None),
        (config(None), False, None),
        ("awq", False, None),
        (None, False, None),
    ],
)
def test_only_weights_that_are_quantised_keep_a_checkpoint_from_the_native_decoder(
    quantization: object, native: bool, dtype: str | None
) -> None:
    assert only_kv_cache_scheme(quantization) is native
    assert kv_cache_scheme_dtype(quantization, "config.json") == dtype


@pytest.mark.parametrize("change", [{"type": "int"}, {"num_bits": 4}, {"dynamic": True}, {"symmetric": False}])
def test_a_scheme_that_no_codec_has_is_announced(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert kv_cache_scheme_dtype(config({**STATIC_FP8, **change}), "config.json") is None
    assert "ignoring the KV cache scheme" in caplog.text
