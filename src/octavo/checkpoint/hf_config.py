"""Read the `config.json` of a Hugging Face folder as a ModelConfig, without importing transformers or torch.

Missing keys have the defaults of the configuration class of the same name in transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.checkpoint.config_fields import ConfigFields
from octavo.checkpoint.kv_cache_scheme import kv_cache_scheme_dtype, only_kv_cache_scheme
from octavo.checkpoint.model_config import (
    NATIVE_ACTIVATIONS,
    NATIVE_ARCHITECTURES,
    NATIVE_ROPE_KINDS,
    ModelConfig,
    NativeArchitecture,
    RopeConfig,
)
from octavo.errors import CorruptModelError, ModelNotFoundError, OctavoError, UnsupportedModelError, shown

_NATIVE_BY_MODEL_TYPE = {native.model_type: name for name, native in NATIVE_ARCHITECTURES.items()}

# Far above any model's, and few enough that a configuration with more is refused before memory is made for each.
_MOST_LAYERS = 10_000

_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_hf_config(folder: Path) -> ModelConfig:
    """Read the architecture from `folder`/config.json, and the end-of-text ids from generation_config.json.

    Raises:
        ModelNotFoundError: there is no config.json.
        CorruptModelError: it is not JSON, or a field is missing or wrong; the message names it.
        UnsupportedModelError: the architecture is not decoder-only.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if raw is None:
        raise ModelNotFoundError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    return hf_model_config(raw, path)


def hf_model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """Return the architecture from a parsed `config.json`; `path` is only used in error messages.

    Raises:
        CorruptModelError, UnsupportedModelError: as `read_hf_config`.
    """
    try:
        return _model_config(raw, path)
    except OctavoError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise CorruptModelError(f"{path} has a field of the wrong type or out of range: {error}") from error


def _model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    folder = path.parent
    architecture = _architecture(raw, path)
    fields = ConfigFields({**raw, **raw.get("text_config", {})}, str(path))
    native = NATIVE_ARCHITECTURES.get(architecture)
    reason = _why_not_native(fields, architecture, native)
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    head_dim, value_dim = _head_dims(fields, native, hidden_size, num_heads)
    bias_option = bool(fields.get("attention_bias", False)) and (native is None or native.bias_option)
    num_layers = fields.size("num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        raise CorruptModelError(f"{path}: num_hidden_layers is {num_layers}, and at most {_MOST_LAYERS} are accepted")
    max_position = fields.size("max_position_embeddings", default=2048)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size", default=None if native else 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, native, num_heads),
        head_dim=head_dim,
        value_dim=value_dim,
        max_position_embeddings=max_position,
        rope=_rope(fields, head_dim, max_position) if reason is None else RopeConfig(rotary_dim=head_dim),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        hidden_act=_activation(fields),
        qkv_bias=bias_option or (native is not None and native.biased == "qkv"),
        output_bias=bias_option,
        mlp_bias=bool(fields.get("mlp_bias", False)) and (native is None or native.model_type == "llama"),
        qk_norm=native is not None and native.qk_norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", native is None)),
        layer_windows=_layer_windows(fields, native, num_layers),
        dtype=_dtype(fields, folder),
        bos_token_id=_first_id(fields.get("bos_token_id", native.default_bos if native else None)),
        eos_token_ids=_eos_token_ids(fields, native, folder),
        kv_cache_dtype=kv_cache_scheme_dtype(fields.get("quantization_config"), str(path)),
        transformers_reason=reason,
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in `path`; None if there is no such file.

    Raises:
        CorruptModelError: the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def _architecture(raw: dict[str, Any], path: Path) -> str:
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{path}: {raw.get('model_type')} is an encoder-decoder; Octavo serves decoders")
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CorruptModelError(f"{path}: architectures must be a list of names, got {shown(names)}")
    model_type = str(raw.get("model_type", ""))
    if not names:
        if not model_type:
            raise CorruptModelError(f"{path} states neither architectures nor model_type")
        return _NATIVE_BY_MODEL_TYPE.get(model_type, model_type)
    name: str = names[0]
    if not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise UnsupportedModelError(f"{path}: {name} does not generate text; Octavo serves decoder-only models")
    return name


def _why_not_native(fields: ConfigFields, architecture: str, native: NativeArchitecture | None) -> str | None:
    if native is None:
        return f"{architecture} is not among {', '.join(NATIVE_ARCHITECTURES)}"
    rope = fields.rope()
    if rope["rope_type"] not in NATIVE_ROPE_KINDS:
        return f"RoPE scaling {rope['rope_type']!r}"
    if any(isinstance(value, dict) for value in rope.values()):
        return "a RoPE that differs between layers"
    if (rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        return "a partial rotary factor"
    if (activation := _activation(fields)) not in NATIVE_ACTIVATIONS:
        return f"activation {activation!r}"
    quantization = fields.get("quantization_config")
    if quantization and not only_kv_cache_scheme(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        return f"weights quantised by {method!r}"
    if native.windowed == "by_layer":
        kinds = set(fields.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            return f"layers of type {', '.join(sorted(map(repr, kinds)))}"
    return None


def _activation(fields: ConfigFields) -> str:
    activation = fields.get("hidden_act", "silu")
    if not isinstance(activation, str):
        raise CorruptModelError(f"{fields.source}: hidden_act must be the name of a function, got {shown(activation)}")
    return activation


def _head_dims(
    fields: ConfigFields, native: NativeArchitecture | None, hidden_size: int, num_heads: int
) -> tuple[int, int]:
    """Return the dimensions of a query and key head, and of a value head."""
    rope_part, plain_part = fields.get("qk_rope_head_dim"), fields.get("qk_nope_head_dim")
    if rope_part and plain_part:  # DeepSeek's latent attention
        return int(rope_part) + int(plain_part), fields.size("v_head_dim")
    default = (native.default_head_dim if native else None) or hidden_size // num_heads
    # Qwen2Config has no head_dim, yet its attention takes the key from a config.json that carries it.
    head_dim = fields.size("head_dim", default=default)
    return head_dim, head_dim


def _num_kv_heads(fields: ConfigFields, native: NativeArchitecture | None, num_heads: int) -> int:
    if fields.get("multi_query"):
        return 1
    if "num_key_value_heads" in fields.content and fields.content["num_key_value_heads"] is None:
        return num_heads
    return fields.size("num_key_value_heads", default=(native.default_kv_heads if native else None) or num_heads)


def _rope(fields: ConfigFields, head_dim: int, max_position: int) -> RopeConfig:
    parameters = fields.rope()
    kind = parameters["rope_type"]
    values: dict[str, Any] = {"theta": float(parameters["rope_theta"]), "rotary_dim": head_dim, "kind": kind}
    keys = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    for key in keys:
        if not isinstance(parameters.get(key), int | float):
            raise CorruptModelError(f"{fields.source}: RoPE scaling {kind!r} needs a number {key}")
        values[key] = float(parameters[key])
    if kind == "llama3":
        # transformers prefers the outer key where both are given.
        outer = fields.get("original_max_position_embeddings")
        values["original_max_position"] = int(
            outer or parameters.get("original_max_position_embeddings") or max_position
        )
    return RopeConfig(**values)


def _layer_windows(fields: ConfigFields, native: NativeArchitecture | None, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window, by the rules of the family's configuration class in transformers."""
    if native is not None and native.windowed == "never":
        return (None,) * num_layers
    window = fields.get("sliding_window", 4096 if native else None)
    if window is not None:
        window = fields.size("sliding_window", default=4096)
    if native is not None and native.windowed == "always":
        return (window,) * num_layers
    if native is not None and not fields.get("use_sliding_window", False):
        window = None
    layer_types = fields.get("layer_types")
    if layer_types is None:
        if native is None:
            return (None,) * num_layers
        first = int(fields.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise CorruptModelError(f"{fields.source}: {len(layer_types)} layer_types for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(fields: ConfigFields, folder: Path) -> str:
    stated = str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.")
    if stated in _SAFETENSORS_DTYPES.values():
        return stated
    return _dtype_of_first_tensor(folder) or "bfloat16"


def _dtype_of_first_tensor(folder: Path) -> str | None:
    """Return the dtype of the first tensor, which transformers uses if a configuration has no dtype.

    A safetensors file starts with the length of its JSON header (8 bytes, little-endian).
    """
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return None
            try:
                header = json.loads(file.read(length))
            except ValueError:
                return None
        for tensor in header.values():
            if isinstance(tensor, dict) and (dtype := _SAFETENSORS_DTYPES.get(str(tensor.get("dtype")))):
                return dtype
    return None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _first_id(value: Any) -> int | None:
    return next(iter(_ids(value)), None)


def _eos_token_ids(fields: ConfigFields, native: NativeArchitecture | None, folder: Path) -> frozenset[int]:
    generation = read_json(folder / "generation_config.json") or {}
    # transformers' generate() asks the generation config first: where that names ids, the class default is not one.
    default = native.default_eos if native and generation.get("eos_token_id") is None else None
    return frozenset(_ids(fields.get("eos_token_id", default)) + _ids(generation.get("eos_token_id")))
