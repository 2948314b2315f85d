"""Read the `config.json` of a Hugging Face folder as a ModelConfig, without importing transformers or torch.

Missing keys have the defaults of the configuration class of the same name in transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.checkpoint.config_fields import ConfigFields
from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.hf_positions import layer_ropes, layer_windows, partial_rotary
from octavo.checkpoint.kv_cache_scheme import kv_cache_scheme_dtype, only_kv_cache_scheme
from octavo.checkpoint.model_config import (
    NATIVE_ACTIVATIONS,
    NATIVE_ROPE_KINDS,
    ExpertsConfig,
    LatentConfig,
    LayerDescription,
    ModelConfig,
    RopeConfig,
    yarn_attention_factor,
)
from octavo.checkpoint.native_architecture import NativeArchitecture
from octavo.checkpoint.tensor_names import TensorNames
from octavo.checkpoint.text_models import native_architecture
from octavo.errors import CorruptModelError, ModelNotFoundError, OctavoError, UnsupportedModelError, shown

# Far above any model's, and few enough that a configuration with more is refused before memory is made for each.
_MOST_LAYERS = 10_000

_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_hf_config(folder: Path, overrides: Mapping[str, Any] | None = None, max_len: int | None = None) -> ModelConfig:
    """Read the architecture from `folder`/config.json, and the end-of-text ids from generation_config.json.

    Args:
        overrides: fields that replace those of config.json; objects are merged.
        max_len: the longest sequence, by which some RoPE scalings choose frequencies; the model's limit if None.

    Raises:
        ModelNotFoundError: there is no config.json.
        CorruptModelError: it is not JSON, or a field is missing or wrong; the message names it.
        UnsupportedModelError: the architecture is not decoder-only.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if raw is None:
        raise ModelNotFoundError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    return hf_model_config(merged(raw, overrides or {}), path, max_len)


def hf_model_config(raw: dict[str, Any], path: Path, max_len: int | None = None) -> ModelConfig:
    """Return the architecture from a parsed `config.json`; `path` is only used in error messages.

    Raises:
        CorruptModelError, UnsupportedModelError: as `read_hf_config`.
    """
    try:
        return _model_config(raw, path, max_len)
    except OctavoError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise CorruptModelError(f"{path} has a field of the wrong type or out of range: {error}") from error


def _model_config(raw: dict[str, Any], path: Path, max_len: int | None) -> ModelConfig:
    folder = path.parent
    architecture = _architecture(raw, path)
    content = {**raw, **(raw.get("text_config") or {})}
    native = native_architecture(architecture, content.get("model_type"))
    fields = ConfigFields(content, str(path), native.defaults if native else {})
    max_position = fields.size("max_position_embeddings", default=2048)
    max_len = max_len or max_position
    reason = _why_not_native(fields, architecture, native, max_len)
    sizes = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size")
    if native is None and (missing := [key for key in sizes if fields.get(key) is None]):
        raise UnsupportedModelError(
            f"{path}: {architecture} has no {missing[0]}; Octavo serves decoder-only models with attention"
        )
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    width = None if native and native.layer.gated else 4 * hidden_size
    mlp_width = fields.size(native.mlp_width if native else "intermediate_size", width)
    head_dim, value_dim = _head_dims(fields, hidden_size, num_heads)
    latent = _latent(fields) if native and native.latent and reason is None else None
    rotary_dim = latent.rotary_dim if latent else head_dim
    num_layers = fields.size("num_hidden_layers")
    scalars = _scalars(fields, native, hidden_size, num_layers) if native else {}
    if num_layers > _MOST_LAYERS:
        raise CorruptModelError(f"{path}: num_hidden_layers must be at most {_MOST_LAYERS}, got {num_layers}")
    windows = layer_windows(fields, native, num_layers)
    biased = _biased(fields, native)
    ropes: list[RopeConfig | None] = [RopeConfig(rotary_dim=rotary_dim)] * num_layers
    if reason is None:
        ropes = layer_ropes(fields, native, rotary_dim, max_position, windows, max_len)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=mlp_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        value_dim=value_dim,
        max_position_embeddings=max_position,
        rope=next((rope for rope in reversed(ropes) if rope), RopeConfig(rotary_dim=rotary_dim)),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        hidden_act=_activation(fields, native),
        qkv_bias="qkv" in biased or "all" in biased,
        output_bias="all" in biased or bool(fields.get("attention_out_bias")),
        mlp_bias=_mlp_bias(fields, native),
        head_bias=native is not None and native.head_bias,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", fields.get("tie_word_embeddings", native is None))),
        layer=_layer(native, fields),
        names=_names(native, fields),
        layer_windows=windows,
        layer_ropes=tuple(ropes),
        rotary_interleaved=native is not None
        and native.rotary_interleaved == "both"
        and bool(fields.get("rope_interleave", True)),
        qkv_by_head=native is not None and native.qkv_by_head,
        experts=_experts(fields, native, num_layers),
        latent=latent,
        **scalars,
        dtype=_dtype(fields, folder),
        bos_token_id=_first_id(fields.get("bos_token_id")),
        eos_token_ids=_eos_token_ids(fields, folder),
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
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{path} contains a JSON {type(content).__name__}, not an object")
    return content


def merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with fields replaced; an object in both is merged, so that its other fields stay."""
    changed = {
        name: merged(raw[name], value) if isinstance(value, dict) and isinstance(raw.get(name), dict) else value
        for name, value in overrides.items()
    }
    return {**raw, **changed}


def _architecture(raw: dict[str, Any], path: Path) -> str:
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{path}: {raw.get('model_type')} is an encoder-decoder; Octavo serves decoders")
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CorruptModelError(f"{path}: architectures must be a list of names, got {shown(names)}")
    model_type = str(raw.get("model_type", ""))
    if not names:
        if not model_type:
            raise CorruptModelError(f"{path} has neither architectures nor model_type")
        return next(
            (name for name, native in NATIVE_ARCHITECTURES.items() if native.model_type == model_type), model_type
        )
    name: str = names[0]
    if not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        raise UnsupportedModelError(f"{path}: {name} does not generate text; Octavo serves decoder-only models")
    return name


def _why_not_native(
    fields: ConfigFields, architecture: str, native: NativeArchitecture | None, max_len: int
) -> str | None:
    if native is None:
        return f"the native decoder does not know {architecture}"
    rope = fields.rope()
    if rope["rope_type"] not in (*NATIVE_ROPE_KINDS, "dynamic"):
        return f"RoPE scaling {rope['rope_type']!r}"
    if any(isinstance(value, dict) for value in rope.values()) and native.local_rope_theta is None:
        return "a RoPE that differs between layers"
    unscaled = rope.get("original_max_position_embeddings", max_len) if rope.get("llama_4_scaling_beta") else max_len
    if max_len > unscaled:
        return f"queries are scaled beyond {unscaled} positions; with --max-model-len {unscaled} it runs natively"
    if native.partial_rotary is None and not native.latent and partial_rotary(fields, rope, 1.0) != 1.0:
        return "a partial rotary factor"
    if (activation := _activation(fields, native)) not in NATIVE_ACTIVATIONS:
        return f"activation {activation!r}"
    quantization = fields.dictionary("quantization_config")
    if quantization and not only_kv_cache_scheme(quantization) and (unread := _unread_quantization(quantization)):
        return f"weights quantised by {unread}"
    kinds = fields.get("mlp_layer_types") or ()
    if "dense" in kinds and "sparse" in kinds[: kinds.index("dense")]:
        return "dense layers between those with experts"
    if native.latent and fields.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy", "noaux_tc"):
        return f"experts chosen by {fields.get('topk_method')!r}"
    if native.experts and not (native.experts.corrected or fields.get("topk_method")) and fields.get("n_group", 1) != 1:
        return "groups of experts"
    if native.experts and (
        fields.get("mlp_only_layers")
        or fields.get("decoder_sparse_step", 1) != 1
        or fields.get("moe_layer_interval", 1) != 1
        or fields.get("moe_layer_end_index", -1) not in (-1, fields.size("num_hidden_layers") - 1)
    ):
        return "experts in some layers only"
    if native.experts and native.experts.deepseek and _mlp_bias(fields, native):
        return "biases of a shared expert"
    if (fields.get("swiglu_limit", 7.0), fields.get("swiglu_alpha", 1.702)) != (7.0, 1.702):
        return "a SwiGLU with a limit other than 7, or a factor other than 1.702"
    if fields.get("alibi") or not fields.get("parallel_attn", True):
        return "ALiBi, or an MLP after attention instead of next to it"
    if fields.get("norm_head"):
        return "a head with normalised rows"
    if fields.get("clip_qkv") is not None:
        return "clipped queries, keys and values"
    if native.layer.qk_norm == "none" and (fields.get("use_qk_norm") or fields.get("qk_layernorm")):
        return "norms of queries and keys"
    if native.experts is None and (fields.get("num_experts") or 0) > 1:
        return "a mixture of experts"
    kinds = set(fields.get("layer_types") or ()) - {"full_attention", "sliding_attention", "attention"}
    if kinds and (native.windowed not in ("always", "never") or native.unrotated == "unstated"):
        return f"layers of type {', '.join(sorted(map(repr, kinds)))}"
    return None


def _unread_quantization(quantization: Mapping[str, Any]) -> str | None:
    """Return what `models/quantised_checkpoint.py` does not read of a `quantization_config`; None if it reads it."""
    method = quantization.get("quant_method")
    if method in ("fp8", "mxfp4") or (method, quantization.get("quant_algo")) == ("modelopt", "FP8"):
        return None
    if method in ("gptq", "awq"):
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        read = bits == 4 or (method == "gptq" and bits in (2, 3, 8))
        version = str(quantization.get("version", "gemm")).lower()
        return None if read and version in ("gemm", "") else f"{method!r} in {bits} bits, version {version!r}"
    if method == "compressed-tensors":
        formats = {quantization.get("format")} - {"mixed-precision"}
        formats |= {group.get("format") for group in (quantization.get("config_groups") or {}).values()} - {None}
        unread = formats - {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense"}
        if unread:
            return f"{method!r} in format {sorted(map(str, unread))}"
        transforms = ((quantization.get("transform_config") or {}).get("config_groups") or {}).values()
        places = {str(each.get("location")) for transform in transforms for each in transform.get("apply") or ()}
        online = sorted(places - {"weight_input", "weight_output"})
        return f"{method!r} with transforms of {', '.join(online)}" if online else None
    return repr(method)


def _head_dims(fields: ConfigFields, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """Return the dimensions of a query and key head, and of a value head."""
    rope_part, plain_part = fields.get("qk_rope_head_dim"), fields.get("qk_nope_head_dim")
    if rope_part and plain_part:  # DeepSeek's latent attention
        return int(rope_part) + int(plain_part), fields.size("v_head_dim")
    # Qwen2Config has no head_dim, yet its attention takes the key from a config.json that carries it.
    head_dim = fields.size("head_dim", default=hidden_size // num_heads)
    return head_dim, head_dim


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    if "num_key_value_heads" in fields.content and fields.content["num_key_value_heads"] is None:
        return num_heads
    return fields.size("num_key_value_heads", default=num_heads)


def _biased(fields: ConfigFields, native: NativeArchitecture | None) -> set[str]:
    """Return which projections of attention have a bias, as `NativeArchitecture` names them."""
    if native is None:
        return {"all"} if fields.get("attention_bias", False) else set()
    if native.mlp_bias_option == "use_bias":
        stated = fields.get("use_bias", False)
    else:
        stated = fields.get("attention_bias", False)
    return {native.biased, native.bias_option if stated else "none"}


def _mlp_bias(fields: ConfigFields, native: NativeArchitecture | None) -> bool:
    key = "mlp_bias" if native is None else native.mlp_bias_option
    return (native is not None and native.biased == "mlp") or bool(key and fields.get(key, False))


def _layer(native: NativeArchitecture | None, fields: ConfigFields) -> LayerDescription:
    layer = native.layer if native else LayerDescription()
    if not fields.get("use_parallel_residual", True):
        layer = replace(layer, parallel=None)
    if _has_two_falcon_norms(fields):
        layer = replace(layer, parallel="two norms")
    if not fields.get("use_qk_norm", True):
        layer = replace(layer, qk_norm="none")
    return layer


def _names(native: NativeArchitecture | None, fields: ConfigFields) -> TensorNames:
    names = native.names if native else TensorNames()
    if _has_two_falcon_norms(fields):
        names = replace(names, changed={**names.changed, "attention_norm": "ln_attn", "mlp_norm": "ln_mlp"})
    return names


def _has_two_falcon_norms(fields: ConfigFields) -> bool:
    """Whether a Falcon has norms of their own for attention and MLP, as those of 40 and 180 billion parameters do."""
    return bool(fields.get("new_decoder_architecture")) and fields.get("num_ln_in_parallel_attn", 2) == 2


def _activation(fields: ConfigFields, native: NativeArchitecture | None) -> str:
    if native is not None and native.activation is not None:
        return native.activation
    activation = fields.get("hidden_act", "silu")
    if not isinstance(activation, str):
        raise CorruptModelError(f"{fields.source}: hidden_act must be the name of a function, got {shown(activation)}")
    return {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}.get(activation, activation)


def _scalars(fields: ConfigFields, native: NativeArchitecture, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that the configuration sets by numbers of the family's own."""
    stated = {name: fields.get(scalar.hf_key, scalar.default) for name, scalar in native.scalars.items()}
    found = {name: native.scalars[name].of(n, hidden_size, num_layers) for name, n in stated.items() if n is not None}
    return {"embedding_scale": hidden_size**0.5, **found} if native.scales_embedding else found


def _latent(fields: ConfigFields) -> LatentConfig:
    ranked = fields.content.get("q_lora_rank", 1536) is not None
    return LatentConfig(
        rank=fields.size("kv_lora_rank", default=512),
        rotary_dim=fields.size("qk_rope_head_dim", default=64),
        plain_dim=fields.size("qk_nope_head_dim", default=128),
        value_dim=fields.size("v_head_dim", default=128),
        query_rank=fields.size("q_lora_rank", default=1536) if ranked else 0,
        mscale=_latent_mscale(fields),
    )


def _latent_mscale(fields: ConfigFields) -> float:
    rope = fields.rope()
    if rope["rope_type"] == "default" or not (mscale := rope.get("mscale_all_dim")):
        return 1.0
    return yarn_attention_factor(float(rope["factor"]), float(mscale))


def _experts(fields: ConfigFields, native: NativeArchitecture | None, num_layers: int) -> ExpertsConfig | None:
    if native is None or native.experts is None:
        return None
    family = native.experts
    stated, shared_width = bool(fields.get("norm_topk_prob", family.deepseek)), 0
    width = fields.size(family.width)
    if family.shared_width:
        shared_width = fields.size(family.shared_width)
    if family.deepseek:
        shared_width = width * fields.size("n_shared_experts", 1, minimum=0)
    grouped = family.deepseek and fields.get("topk_method") != "greedy"
    return ExpertsConfig(
        count=fields.size("num_experts"),
        active=fields.size("num_experts_per_tok"),
        intermediate_size=width,
        bias=family.bias,
        scoring=family.scoring,
        corrected=family.corrected,
        normalised=stated if family.normalised is None else family.normalised,
        scale=float(fields.get("routed_scaling_factor") or 1.0) if family.deepseek else 1.0,
        groups=fields.size("n_group", 1) if grouped else 1,
        active_groups=fields.size("topk_group", 1) if grouped else 1,
        shared_intermediate_size=shared_width,
        shared_gate=bool(family.shared_width),
        dense_layers=_dense_layers(fields, num_layers) if family.deepseek else 0,
    )


def _dense_layers(fields: ConfigFields, num_layers: int) -> int:
    """Return how many of the first layers have an MLP, where the others have experts."""
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return min(num_layers, fields.size("first_k_dense_replace", 0, minimum=0))
    return kinds.index("sparse") if "sparse" in kinds else num_layers


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


def _eos_token_ids(fields: ConfigFields, folder: Path) -> frozenset[int]:
    generation = read_json(folder / "generation_config.json") or {}
    # transformers' generate() asks the generation config first: where that names ids, the class default is not one.
    named = generation.get("eos_token_id")
    stated = fields.get("eos_token_id") if named is None else fields.content.get("eos_token_id")
    return frozenset(_ids(stated) + _ids(named))
