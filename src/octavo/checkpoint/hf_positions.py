"""Each layer's sliding window and rotary embedding, as a Hugging Face configuration states them."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint.config_fields import ConfigFields
from octavo.checkpoint.model_config import RopeConfig, longrope_attention_factor, yarn_attention_factor
from octavo.checkpoint.native_architecture import NativeArchitecture
from octavo.errors import CorruptModelError


def layer_windows(fields: ConfigFields, native: NativeArchitecture | None, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window, by the rules of the family's configuration class in transformers."""
    rule = native.windowed if native else "by_layer"
    if rule == "never":
        return (None,) * num_layers
    window: int | None = fields.get("sliding_window", 4096 if native else None)
    if window or isinstance(rule, int):
        window = fields.size("sliding_window", default=4096)
    window = window or None  # 0 in configurations of models without one
    if native is not None and not isinstance(rule, int) and not fields.get("use_sliding_window", rule == "always"):
        window = None
    if rule == "always":
        return (window,) * num_layers
    kinds = fields.get("layer_types")
    if kinds is None and isinstance(rule, int):
        every = fields.size("sliding_window_pattern", default=fields.size("_sliding_window_pattern", default=rule))
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    elif kinds is None:
        first = int(fields.get("max_window_layers", 28)) if native else num_layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise CorruptModelError(f"{fields.source}: {len(kinds)} layer_types for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def partial_rotary(fields: ConfigFields, rope: dict[str, Any], default: float) -> float:
    """Return the share of a head's dimensions that rotates."""
    if dimensions := fields.get("rotary_dim"):
        stated = fields.get("head_dim")
        default = dimensions / (stated or fields.size("hidden_size") // fields.size("num_attention_heads"))
    return float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or default)


def layer_ropes(
    fields: ConfigFields,
    native: NativeArchitecture | None,
    head_dim: int,
    max_position: int,
    windows: tuple[int | None, ...],
    max_len: int,
) -> list[RopeConfig | None]:
    """Return each layer's rotary embedding, None where it has none; windowed layers may have one of their own.

    Args:
        max_len: the longest sequence, by which "longrope" and "dynamic" choose frequencies.
    """
    parameters = fields.rope()
    if native is not None and native.partial_rotary is not None:
        head_dim = int(head_dim * partial_rotary(fields, parameters, native.partial_rotary))
    if native is None or native.local_rope_theta is None:
        rope = _rope(fields, parameters, head_dim, max_position, max_len)
        return [rope if rotates else None for rotates in _rotating(fields, native, windows)]
    both = ("full_attention", "sliding_attention")
    if all(isinstance(parameters.get(kind), dict) for kind in both):
        everywhere, local = ({"rope_type": "default", "rope_theta": 10000.0} | parameters[kind] for kind in both)
    else:
        everywhere = parameters
        theta = fields.get("rope_local_base_freq", native.local_rope_theta)
        local = {"rope_type": "default", "rope_theta": theta}
    full, windowed = (_rope(fields, kind, head_dim, max_position, max_len) for kind in (everywhere, local))
    return [full if window is None else windowed for window in windows]


def _rotating(fields: ConfigFields, native: NativeArchitecture | None, windows: tuple[int | None, ...]) -> list[bool]:
    """Return for each layer whether queries and keys rotate."""
    if native is None or native.unrotated == "none":
        return [True] * len(windows)
    if native.unrotated == "unstated":
        return [fields.get("position_embedding_type") == "rope"] * len(windows)
    if native.unrotated == "full_if_windowed" and not any(windows):
        return [True] * len(windows)
    if native.unrotated in ("full_attention", "full_if_windowed"):
        return [window is not None for window in windows]
    step = fields.size("no_rope_layer_interval", default=4)
    listed = fields.get("no_rope_layers") or [(layer + 1) % step for layer in range(len(windows))]
    if len(listed) != len(windows):
        raise CorruptModelError(f"{fields.source}: {len(listed)} no_rope_layers for {len(windows)} layers")
    return [bool(rotates) for rotates in listed]


def _rope(
    fields: ConfigFields, parameters: dict[str, Any], head_dim: int, max_position: int, max_len: int
) -> RopeConfig:
    kind = parameters["rope_type"]
    values: dict[str, Any] = {"theta": float(parameters["rope_theta"]), "rotary_dim": head_dim, "kind": kind}
    factors = ("factor", "low_freq_factor", "high_freq_factor")
    keys = {"linear": factors[:1], "dynamic": factors[:1], "llama3": factors, "yarn": factors[:1]}.get(kind, ())
    for key in keys:
        if not isinstance(parameters.get(key), int | float):
            raise CorruptModelError(f"{fields.source}: RoPE scaling {kind!r} needs a number {key}")
        values[key] = float(parameters[key])
    if kind == "dynamic":  # a greater base in contexts beyond the model's
        stretch = max(1.0, 1.0 + values["factor"] * (max_len / max_position - 1.0))
        values |= {"kind": "default", "factor": 1.0}
        values["theta"] *= stretch ** (head_dim / (head_dim - 2))
    if kind == "yarn":
        values |= _yarn(parameters, values["factor"])
    if kind in ("llama3", "yarn", "longrope"):
        # transformers prefers the outer key where both are given.
        outer = fields.get("original_max_position_embeddings")
        values["original_max_position"] = int(
            outer or parameters.get("original_max_position_embeddings") or max_position
        )
    if kind == "longrope":
        values |= _longrope(fields, parameters, values["original_max_position"], max_position, max_len)
    return RopeConfig(**values)


def _longrope(
    fields: ConfigFields, parameters: dict[str, Any], original: int, max_position: int, max_len: int
) -> dict[str, Any]:
    key = "long_factor" if max_len > original else "short_factor"
    factors, stated = parameters.get(key), parameters.get("attention_factor")
    if not isinstance(factors, list) or not all(isinstance(each, int | float) for each in factors):
        raise CorruptModelError(f"{fields.source}: RoPE scaling 'longrope' needs a list of numbers {key}")
    if stated is None:
        stated = longrope_attention_factor(float(parameters.get("factor") or max_position / original), original)
    return {"frequency_factors": tuple(map(float, factors)), "attention_factor": float(stated)}


def _yarn(parameters: dict[str, Any], factor: float) -> dict[str, Any]:
    stated, above, below = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is None:
        above, below = (above, below) if above and below else (1.0, 0.0)
        stated = yarn_attention_factor(factor, float(above)) / yarn_attention_factor(factor, float(below))
    return {
        "beta_fast": float(parameters.get("beta_fast") or 32),
        "beta_slow": float(parameters.get("beta_slow") or 1),
        "truncate": bool(parameters.get("truncate", True)),
        "attention_factor": float(stated),
    }
