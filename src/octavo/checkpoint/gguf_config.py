"""Read a GGUF file's metadata as a ModelConfig, and map its tensors to Hugging Face's names.

For the architecture "llama", llama.cpp's converter reorders the rows of each query and key head, because llama.cpp
rotates neighbouring dimensions where Hugging Face rotates the two halves:

    Hugging Face  x0 x1 x2 x3 | y0 y1 y2 y3     (x_i rotates with y_i)
    GGUF          x0 y0 x1 y1 x2 y2 x3 y3
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.model_config import NATIVE_ARCHITECTURES, ModelConfig, NativeArchitecture, RopeConfig
from octavo.errors import CorruptModelError, UnsupportedModelError

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str | None:
    """Map 'blk.3.attn_q.weight' to 'model.layers.3.self_attn.q_proj.weight'; None if the decoder does not use it."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name):
        inner = _IN_A_LAYER.get(match[2])
        return f"model.layers.{match[1]}.{inner}.{match[3]}" if inner else None
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_TOP_LEVEL[stem]}.{kind}" if stem in _TOP_LEVEL else None


def rotary_row_order(gguf_name: str, config: ModelConfig) -> npt.NDArray[np.intp] | None:
    """Return the indices that bring a tensor's rows into Hugging Face's order; None if they are already in it.

    Whole rows move, so the same indices apply to quantised bytes, dequantised values and biases.
    """
    native = NATIVE_ARCHITECTURES.get(config.architecture)
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", gguf_name)
    if match is None or native is None or not native.rotary_rows_interleaved:
        return None
    heads = config.num_heads if match[1] == "q" else config.num_kv_heads
    rows = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Read the architecture of a GGUF file; only the native decoder runs such files.

    Raises:
        CorruptModelError: a required key or tensor is missing; the message names it.
        UnsupportedModelError: an unsupported architecture, a mixture of experts, or RoPE scaling other than linear.
    """
    stated = file.get("general.architecture")
    name, native = _native(stated, file)
    meta = _Keys(file, stated)
    if meta.get("expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: a {stated} mixture of {meta.get('expert_count')} experts")
    num_heads = meta.uniform("attention.head_count")
    hidden_size = meta.uniform("embedding_length")
    head_dim = meta.uniform("attention.key_length", hidden_size // num_heads)
    num_layers = meta.uniform("block_count")
    if (last := f"blk.{num_layers - 1}.attn_norm.weight") not in file.tensors:
        raise CorruptModelError(
            f"{file.path} states a {stated}.block_count of {num_layers}, but holds no tensor {last}"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptModelError(f"{file.path} holds no matrix token_embd.weight")
    window = meta.get("attention.sliding_window", 0) or None
    return ModelConfig(
        architecture=name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta.uniform("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.uniform("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        value_dim=meta.uniform("attention.value_length", head_dim),
        max_position_embeddings=meta.uniform("context_length"),
        rope=_rope(file, meta, head_dim),
        norm_eps=meta.get("attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=native.qk_norm,
        tie_word_embeddings="output.weight" not in file.tensors,
        layer_windows=(window,) * num_layers,
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
        value = self.get(key, *default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise UnsupportedModelError(f"{self.file.path}: {self.prefix}.{key} differs between layers: {value}")
        (size,) = values
        if not isinstance(size, int) or size < 1:
            raise CorruptModelError(f"{self.file.path}: {self.prefix}.{key} must be a positive integer, got {size!r}")
        return size


def _native(stated: str, file: GGUFFile) -> tuple[str, NativeArchitecture]:
    for name, native in NATIVE_ARCHITECTURES.items():
        if native.gguf_name == stated:
            return name, native
    supported = sorted({native.gguf_name for native in NATIVE_ARCHITECTURES.values()})
    raise UnsupportedModelError(
        f"{file.path}: GGUF architecture {stated!r} is not supported ({', '.join(supported)}); "
        "serve the Hugging Face folder of that model instead"
    )


def _rope(file: GGUFFile, meta: _Keys, head_dim: int) -> RopeConfig:
    rotary_dim = meta.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: {rotary_dim} of {head_dim} dimensions of a head are rotated; only all of them is supported"
        )
    scaling = meta.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{file.path}: RoPE scaling {scaling!r} is not supported in GGUF files (none, linear); "
            "serve the Hugging Face folder of that model instead"
        )
    factor = float(meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0)))
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = tuple(float(value) for value in file.dequantize("rope_freqs.weight").reshape(-1))
        if len(factors) != rotary_dim // 2:
            raise CorruptModelError(
                f"{file.path}: rope_freqs.weight holds {len(factors)} factors for {rotary_dim // 2} frequencies"
            )
    return RopeConfig(
        theta=float(meta.get("rope.freq_base", 10000.0)),
        rotary_dim=rotary_dim,
        kind="linear" if factor != 1.0 else "default",
        factor=factor,
        frequency_factors=factors,
    )


def _dtype(file: GGUFFile) -> str:
    """Return the float type of the matrices; bfloat16 if they are quantised."""
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {gguf.GGMLQuantizationType.F32}:
        return "float32"
    if kinds <= {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}:
        return "float16"
    return "bfloat16"
