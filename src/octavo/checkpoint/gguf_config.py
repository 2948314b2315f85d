"""Read a GGUF file's metadata as a ModelConfig."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import gguf

from octavo.checkpoint.config_fields import uniform_size
from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.model_config import (
    ExpertsConfig,
    LatentConfig,
    LayerDescription,
    ModelConfig,
    RopeConfig,
    yarn_attention_factor,
)
from octavo.checkpoint.native_architecture import NativeArchitecture
from octavo.checkpoint.tensor_names import TensorNames
from octavo.checkpoint.text_models import GGUF_TEXT_MODELS
from octavo.errors import CorruptModelError, UnsupportedModelError


def tensor_names(file: GGUFFile) -> TensorNames:
    """Return what Hugging Face calls the tensors of a file's architecture.

    Raises:
        UnsupportedModelError: the native decoder does not run it.
    """
    names = _native(file)[1].names
    if "blk.0.attn_k_b.weight" in file.tensors:  # since llama.cpp caches latents, their projections are apart
        names = replace(names, fused=names.fused - {"kv_b"})
    if "blk.0.attn_norm_2.weight" in file.tensors:
        names = replace(names, gguf={"attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"})
    fused = "blk.0.attn_qkv.weight" in file.tensors
    return replace(names, fused=names.fused | {"qkv"} if fused else names.fused - {"qkv"})


def gguf_model_config(file: GGUFFile, max_len: int | None = None) -> ModelConfig:
    """Read the architecture of a GGUF file; only the native decoder runs such files.

    Args:
        max_len: the longest sequence, by which "longrope" chooses frequencies; the model's limit if None.

    Raises:
        CorruptModelError: a required key or tensor is missing; the message names it.
        UnsupportedModelError: an unsupported architecture or RoPE scaling.
    """
    stated = file.get("general.architecture")
    name, native = _native(file)
    meta = _Keys(file, stated)
    experts = _experts(meta, native)
    num_heads = meta.uniform("attention.head_count")
    hidden_size = meta.uniform("embedding_length")
    head_dim = meta.uniform("attention.key_length", hidden_size // num_heads)
    if meta.get("attention.clamp_kqv", 0.0):
        raise UnsupportedModelError(f"{file.path}: queries, keys and values are clipped, which is not supported")
    # Layers that predict further tokens come last, and are not computed.
    num_layers = meta.uniform("block_count") - int(meta.get("nextn_predict_layers", 0))
    if (last := f"blk.{num_layers - 1}.attn_output.weight") not in file.tensors:
        raise CorruptModelError(f"{file.path} has a {stated}.block_count of {num_layers}, but has no tensor {last}")
    latent = _latent(meta, native)
    rotary_dim = latent.rotary_dim if latent else head_dim
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptModelError(f"{file.path} has no matrix token_embd.weight")
    windows = _windows(meta, native, num_layers)
    max_position = meta.uniform("context_length")
    ropes = _layer_ropes(file, meta, native, rotary_dim, windows, max_len or max_position)
    return ModelConfig(
        architecture=name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta.uniform("feed_forward_length", *([experts.intermediate_size] if experts else ())),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.uniform("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        value_dim=meta.uniform("attention.value_length", head_dim),
        max_position_embeddings=max_position,
        rope=next((rope for rope in reversed(ropes) if rope), RopeConfig(rotary_dim=rotary_dim)),
        norm_eps=meta.get(f"attention.layer_norm{'' if native.layer.norm == 'layer' else '_rms'}_epsilon"),
        hidden_act=native.activation or native.defaults.get("hidden_act", "silu"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        head_bias="output.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        layer=_layer(meta, native),
        names=tensor_names(file),
        layer_windows=windows,
        layer_ropes=tuple(ropes),
        rotary_interleaved=native.rotary_interleaved != "none",
        experts=experts,
        latent=latent,
        **_scalars(meta, native, num_layers, num_heads, hidden_size),
        dtype=_dtype(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", None),
        eos_token_ids=gguf_eos_token_ids(file),
    )


def gguf_eos_token_ids(file: GGUFFile) -> frozenset[int]:
    """Return the ids for end of text and, if the file names them, for end of turn and end of message."""
    ids = (file.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom"))
    return frozenset(token_id for token_id in ids if token_id is not None)


class _Keys:
    """Metadata keys with the architecture's prefix."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    def get(self, key: str, *default: Any) -> Any:
        return self.file.get(f"{self.prefix}.{key}", *default)

    def uniform(self, key: str, *default: int) -> int:
        """Return a positive size; a file may give one per layer, which then must all be equal."""
        return uniform_size(self.get(key, *default), f"{self.prefix}.{key}", self.file.path)


def _native(file: GGUFFile) -> tuple[str, NativeArchitecture]:
    stated = file.get("general.architecture")
    mixture = bool(file.get(f"{stated}.expert_count", 0))
    scoring = {1: "softmax", 2: "sigmoid"}.get(file.get(f"{stated}.expert_gating_func", 0))
    for name, native in NATIVE_ARCHITECTURES.items():
        if native.gguf_name != GGUF_TEXT_MODELS.get(stated, stated) or (native.experts is not None) != mixture:
            continue
        if native.windowed == "never" and file.get(f"{stated}.attention.sliding_window", 0):
            continue
        if native.experts is None or scoring in (None, native.experts.scoring):
            return name, native
    stated = f"{stated} with experts" if mixture else stated
    supported = sorted({native.gguf_name for native in NATIVE_ARCHITECTURES.values() if native.gguf_name})
    raise UnsupportedModelError(
        f"{file.path}: GGUF architecture {stated!r} is not supported ({', '.join(supported)}); "
        "serve the Hugging Face folder of that model instead"
    )


def _experts(meta: _Keys, native: NativeArchitecture) -> ExpertsConfig | None:
    """Return the mixture of experts, with the sizes of its tensors, since not all files state them."""
    if native.experts is None:
        return None
    path, tensors, family = meta.file.path, meta.file.tensors, native.experts
    dense_layers = int(meta.get("leading_dense_block_count", 0)) if family.deepseek else 0
    name = f"blk.{dense_layers}.ffn_gate_exps.weight"
    gates = tensors.get(name)
    if gates is None or len(gates.shape) != 3:
        raise UnsupportedModelError(f"{path} does not hold its experts in one tensor, {name}: convert the model again")
    shared = tensors.get(f"blk.{dense_layers}.ffn_gate_shexp.weight")
    if not family.deepseek and (shared is None) == bool(family.shared_width):
        raise UnsupportedModelError(
            f"{path}: {meta.prefix} {'without' if shared is None else 'with'} a shared expert is not supported"
        )
    return ExpertsConfig(
        count=gates.shape[0],
        active=meta.uniform("expert_used_count"),
        intermediate_size=gates.shape[1],
        bias=family.bias,
        scoring=family.scoring,
        corrected=family.corrected,
        normalised=bool(meta.get("expert_weights_norm", family.gguf_normalised)),
        scale=float(meta.get("expert_weights_scale", 1.0)) or 1.0,
        groups=int(meta.get("expert_group_count", 1)) or 1,
        active_groups=int(meta.get("expert_group_used_count", 1)) or 1,
        shared_intermediate_size=0 if shared is None else shared.shape[0],
        shared_gate=shared is not None and not family.deepseek,
        dense_layers=dense_layers,
    )


def _latent(meta: _Keys, native: NativeArchitecture) -> LatentConfig | None:
    if not native.latent:
        return None
    rotary_dim = meta.uniform("rope.dimension_count")
    key, value = (meta.get(f"attention.{part}_length_mla", None) for part in ("key", "value"))
    return LatentConfig(
        rank=meta.uniform("attention.kv_lora_rank"),
        rotary_dim=rotary_dim,
        plain_dim=(key or meta.uniform("attention.key_length")) - rotary_dim,
        value_dim=value or meta.uniform("attention.value_length"),
        query_rank=int(meta.get("attention.q_lora_rank", 0)),
        mscale=_latent_mscale(meta),
    )


def _latent_mscale(meta: _Keys) -> float:
    if meta.get("rope.scaling.type", "none") != "yarn":
        return 1.0
    factor = float(meta.get("rope.scaling.factor", 1.0))
    return 1.0 + float(meta.get("rope.scaling.yarn_log_multiplier", 0.0)) * math.log(factor)


def _layer(meta: _Keys, native: NativeArchitecture) -> LayerDescription:
    layer = native.layer
    if not meta.get("use_parallel_residual", True):
        layer = replace(layer, parallel=None)
    if "blk.0.attn_norm_2.weight" in meta.file.tensors:
        layer = replace(layer, parallel="two norms")
    if layer.qk_norm == "head" and "blk.0.attn_q_norm.weight" not in meta.file.tensors:
        layer = replace(layer, qk_norm="none")
    return layer


def _scalars(
    meta: _Keys, native: NativeArchitecture, num_layers: int, num_heads: int, hidden_size: int
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that metadata sets by numbers of the family's own."""
    found: dict[str, Any] = {}
    for name, scalar in native.scalars.items():
        if scalar.gguf_key and (stated := meta.get(scalar.gguf_key, None)):
            found[name] = float(stated) ** (scalar.gguf_power or scalar.power)
        elif scalar.gguf_default and scalar.default is not None:
            found[name] = scalar.of(scalar.default, hidden_size, num_layers)
    if native.scales_embedding:
        found["embedding_scale"] = hidden_size**0.5
    if num_layers == native.head_dim_scaled_layers:
        found["attention_scale"] = (hidden_size / num_heads) ** -0.5
    return found


def _windows(meta: _Keys, native: NativeArchitecture, num_layers: int) -> tuple[int | None, ...]:
    window = meta.get("attention.sliding_window", 0) or None
    if not isinstance(native.windowed, int):
        return (window,) * num_layers
    every = native.windowed
    return tuple(window if (layer + 1) % every else None for layer in range(num_layers))


def _layer_ropes(
    file: GGUFFile,
    meta: _Keys,
    native: NativeArchitecture,
    head_dim: int,
    windows: tuple[int | None, ...],
    max_len: int,
) -> list[RopeConfig | None]:
    rope = _rope(file, meta, native, head_dim, max_len)
    if native.unrotated == "unstated" and not meta.get("rope.scaling.finetuned", True):
        return [None] * len(windows)
    if native.unrotated == "full_attention" or (native.unrotated == "full_if_windowed" and any(windows)):
        return [None if window is None else rope for window in windows]
    if native.unrotated == "listed":  # llama.cpp knows no other list either
        return [rope if (layer + 1) % 4 else None for layer in range(len(windows))]
    if native.local_rope_theta is None:
        return [rope] * len(windows)
    local = RopeConfig(theta=float(meta.get("rope.freq_base_swa", native.local_rope_theta)), rotary_dim=rope.rotary_dim)
    return [rope if window is None else local for window in windows]


def _rope(file: GGUFFile, meta: _Keys, native: NativeArchitecture, head_dim: int, max_len: int) -> RopeConfig:
    rotary_dim = meta.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and native.partial_rotary is None:
        raise UnsupportedModelError(
            f"{file.path}: {rotary_dim} of {head_dim} dimensions of a head are rotated; only all are supported"
        )
    scaling = meta.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in file.tensors:
        scaling = "longrope"
    elif scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: RoPE scaling {scaling!r} is not supported in GGUF files (none, linear, yarn); "
            "serve the Hugging Face folder of that model instead"
        )
    factor = float(meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0)))
    original = meta.get("rope.scaling.original_context_length", max_len)
    if meta.get("attention.temperature_scale", 0.0) and max_len > original:
        raise UnsupportedModelError(
            f"{file.path}: queries are scaled beyond {original} positions, which is not supported in GGUF files; with "
            f"--max-model-len {original} it runs"
        )
    factors, name, others = None, "rope_freqs.weight", dict[str, Any]()
    if scaling == "longrope":
        long = max_len > meta.uniform("rope.scaling.original_context_length", meta.uniform("context_length"))
        name = f"rope_factors_{'long' if long else 'short'}.weight"
        others = {"attention_factor": float(meta.get("rope.scaling.attn_factor", 1.0))}
    if name in file.tensors:
        factors = tuple(float(value) for value in file.dequantize(name).reshape(-1))
        if len(factors) != rotary_dim // 2:
            raise CorruptModelError(f"{file.path}: {name} has {len(factors)} factors for {rotary_dim // 2} frequencies")
    if scaling == "yarn":
        others = {
            "beta_fast": float(meta.get("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(meta.get("rope.scaling.yarn_beta_slow", 1.0)),
            "truncate": native.yarn_truncates,
            "original_max_position": meta.uniform("rope.scaling.original_context_length"),
            "attention_factor": float(meta.get("rope.scaling.attn_factor", 1.0)) * _yarn_factor(meta, native, factor),
        }
    return RopeConfig(
        theta=float(meta.get("rope.freq_base", 10000.0)),
        rotary_dim=rotary_dim,
        **others,
        kind=scaling if scaling in ("yarn", "longrope") else "linear" if factor != 1.0 else "default",
        factor=factor,
        frequency_factors=factors,
    )


def _yarn_factor(meta: _Keys, native: NativeArchitecture, factor: float) -> float:
    if native.latent:  # which scales its scores instead
        return 1.0
    below = float(meta.get("rope.scaling.yarn_log_multiplier", 0.0))
    return yarn_attention_factor(factor) / yarn_attention_factor(factor, below)


def _dtype(file: GGUFFile) -> str:
    """Return the float type of the matrices; bfloat16 if they are quantised."""
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {gguf.GGMLQuantizationType.F32}:
        return "float32"
    if kinds <= {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}:
        return "float16"
    return "bfloat16"
