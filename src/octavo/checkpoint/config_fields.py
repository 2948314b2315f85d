"""Read the fields of a Hugging Face `config.json` by the names and aliases that its architecture uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CorruptModelError, UnsupportedModelError, shown

MOST_SIZE = 1 << 40
"""The largest number that a model file may state as one of its sizes."""

# Older architectures' names for the fields that every decoder has.
_ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
    "hidden_act": ("activation_function", "hidden_activation", "activation"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "rope_theta": ("rotary_emb_base",),
    "attention_bias": ("qkv_bias", "use_qkv_bias", "bias"),
    "mlp_bias": ("bias",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k"),
    "n_shared_experts": ("moe_num_shared_experts", "num_shared_experts"),
    "first_k_dense_replace": ("moe_layer_start_index",),
    "partial_rotary_factor": ("rotary_pct",),
}


def uniform_size(value: object, key: str, source: object, minimum: int = 1) -> int:
    """Return the size that a model file states under `key`, once or in a list for each layer.

    Raises:
        CorruptModelError: it is not an integer of at least `minimum`, or is above `MOST_SIZE`.
        UnsupportedModelError: it differs between layers.
    """
    if isinstance(value, list) and value:
        if any(each != value[0] for each in value):
            raise UnsupportedModelError(f"{source}: {key} differs between layers, which Octavo does not support")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CorruptModelError(f"{source}: {key} must be an integer of at least {minimum}, got {shown(value)}")
    if value > MOST_SIZE:
        raise CorruptModelError(f"{source}: {key} must be at most {MOST_SIZE}, got {value}")
    return value


class ConfigFields:
    """Typed access to one configuration.

    Args:
        source: the file or the model, named in errors.
        defaults: what missing keys mean.
    """

    def __init__(self, content: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.content = content
        self.source = source
        self._defaults = defaults or {}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` or one of its aliases, of those that are not null if there are any; where
        it is missing, the family's default or else `default`."""
        stated = [self.content[name] for name in (key, *_ALIASES.get(key, ())) if name in self.content]
        missing = None if stated else self._defaults.get(key, default)
        return next((value for value in stated if value is not None), missing)

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`; `default` if the key is missing or null.

        Raises:
            CorruptModelError: the key is missing without a default, or its value is not such an integer.
            UnsupportedModelError: it differs between layers.
        """
        value = self.get(key)
        if value is None:
            value = self._defaults.get(key) or default
        if value is None:
            raise CorruptModelError(f"{self.source} has no {key}")
        return uniform_size(value, key, self.source, minimum)

    def dictionary(self, *keys: str) -> dict[str, Any]:
        """Return the value of the first of `keys` that is a non-empty object; {} if none is."""
        for key in keys:
            if value := self.get(key):
                if not isinstance(value, dict):
                    raise CorruptModelError(f"{self.source}: {key} must be an object, got {value!r}")
                return dict(value)
        return {}

    def rope(self) -> dict[str, Any]:
        """The RoPE parameters: `rope_parameters` in transformers 5, earlier `rope_scaling` and `rope_theta`."""
        parameters = self.dictionary("rope_scaling", "rope_parameters")
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if parameters["rope_type"] in ("su", "yarn") and "short_factor" in parameters:  # older names in Phi-3
            parameters["rope_type"] = "longrope"
        if parameters["rope_type"] == "mrope":  # a position for each axis of an image, all of which are equal in text
            parameters["rope_type"] = "default"
        parameters.setdefault("rope_theta", self.get("rope_theta", 10000.0))
        if parameters["rope_type"] == "dynamic" and (alpha := parameters.get("alpha")):  # Hunyuan's, which is static
            dim = self.get("head_dim") or self.size("hidden_size") // self.size("num_attention_heads")
            parameters |= {"rope_type": "default", "rope_theta": parameters["rope_theta"] * alpha ** (dim / (dim - 2))}
        return parameters
