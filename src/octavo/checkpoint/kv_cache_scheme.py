"""The `kv_cache_scheme` of a checkpoint: how llm-compressor says that keys and values were calibrated.

    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {},                                weights and activations; empty: they are as they were
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, …}
    }

The scales are the tensors `k_scale` and `v_scale` of each layer's `self_attn`; `models/kv_scales.py` reads them.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def kv_cache_scheme_dtype(quantization: object, source: str) -> str | None:
    """The codec that a `quantization_config` asks for; None where it asks for none, or for one there is not.

    Static scales of 8-bit floats are `fp8_e4m3`, as in vLLM. Anything else is announced, and the cache stays in the
    model's own type.
    """
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if not scheme:
        return None
    if isinstance(scheme, dict) and _is_static_fp8(scheme):
        return "fp8_e4m3"
    logger.warning(
        "%s: ignoring the KV cache scheme %r: only static scales of 8-bit floats are supported. The cache uses the "
        "model's own type unless --kv-cache-dtype is given",
        source,
        scheme,
    )
    return None


def only_kv_cache_scheme(quantization: object) -> bool:
    """Whether a `quantization_config` says how keys and values are kept, and leaves the weights alone."""
    return (
        isinstance(quantization, dict)
        and bool(quantization.get("kv_cache_scheme"))
        and not any(map(_names_weights, _groups(quantization)))
    )


def _groups(quantization: dict[str, Any]) -> list[Any]:
    groups = quantization.get("config_groups") or {}
    return list(groups.values()) if isinstance(groups, dict) else [groups]


def _names_weights(group: object) -> bool:
    # A group for the attention alone has neither: it is how newer versions calibrate queries, keys and values.
    if not isinstance(group, dict):
        return True
    targets = [str(target) for target in group.get("targets") or ()]
    attention_alone = bool(targets) and all(target.endswith("Attention") or "self_attn" in target for target in targets)
    return bool(group.get("weights")) or not attention_alone


def _is_static_fp8(scheme: dict[str, Any]) -> bool:
    kind = (scheme.get("num_bits"), str(scheme.get("type", "")), scheme.get("symmetric", True))
    return kind == (8, "float", True) and not scheme.get("dynamic")
