"""Model architectures, independent of any file format and of torch.

The loader fills it from a Hugging Face `config.json` or from GGUF metadata; the decoder, the KV cache and the
calculator read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from octavo.errors import UnsupportedModelError

NATIVE_ROPE_KINDS = ("default", "linear", "llama3")
NATIVE_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeArchitecture:
    """An architecture that the native decoder runs.

    Attributes:
        model_type, gguf_name: what `config.json` and GGUF's `general.architecture` call it.
        biased: the projections that carry a bias whatever the configuration says ("qkv" or none); where
            `bias_option` is set, `attention_bias` in the configuration gives q, k, v and o one.
        rotary_rows_interleaved: GGUF files hold the rows of q and k reordered for interleaved rotation.
        windowed: "always" (every layer, by `sliding_window`), "by_layer" (Qwen's rules) or "never".
        default_kv_heads: what a configuration without `num_key_value_heads` means; None: as many as query heads.
        default_bos, default_eos: what a configuration that does not mention them means.
    """

    model_type: str
    gguf_name: str
    biased: Literal["qkv", "none"] = "none"
    bias_option: bool = False
    qk_norm: bool = False
    rotary_rows_interleaved: bool = False
    windowed: Literal["always", "by_layer", "never"] = "never"
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    default_bos: int | None = None
    default_eos: int | None = None


NATIVE_ARCHITECTURES: Mapping[str, NativeArchitecture] = {
    "LlamaForCausalLM": NativeArchitecture(
        model_type="llama",
        gguf_name="llama",
        bias_option=True,
        rotary_rows_interleaved=True,
        default_bos=1,
        default_eos=2,
    ),
    "MistralForCausalLM": NativeArchitecture(
        model_type="mistral",
        gguf_name="llama",
        rotary_rows_interleaved=True,
        windowed="always",
        default_kv_heads=8,
        default_bos=1,
        default_eos=2,
    ),
    "Qwen2ForCausalLM": NativeArchitecture(
        model_type="qwen2", gguf_name="qwen2", biased="qkv", windowed="by_layer", default_kv_heads=32
    ),
    "Qwen3ForCausalLM": NativeArchitecture(
        model_type="qwen3",
        gguf_name="qwen3",
        bias_option=True,
        qk_norm=True,
        windowed="by_layer",
        default_kv_heads=32,
        default_head_dim=128,
    ),
}


def family_name(architecture: str) -> str:
    """Return the short name of an architecture: 'LlamaForCausalLM' -> 'llama'."""
    native = NATIVE_ARCHITECTURES.get(architecture)
    return architecture.removesuffix("ForCausalLM").lower() if native is None else native.model_type


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling beyond the trained context.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading dimensions of each head that are rotated (all of them in the Llama family).
        kind: "default", "linear" or "llama3" (Llama 3.1's piecewise scaling).
        frequency_factors: per-frequency divisors, as Llama 3 GGUF files carry them (`rope_freqs`); overrides `kind`.
    """

    theta: float = 10000.0
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    frequency_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in NATIVE_ROPE_KINDS:
            raise UnsupportedModelError(f"RoPE scaling {self.kind!r} is not supported ({', '.join(NATIVE_ROPE_KINDS)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only architecture.

    Attributes:
        architecture: the Hugging Face class name, such as "LlamaForCausalLM".
        num_heads, num_kv_heads: query heads and key/value heads (GQA: num_kv_heads < num_heads; MQA: 1).
        head_dim: dimensions of a query and key head; value_dim those of a value head.
        layer_windows: for each layer the sliding window in tokens (a query sees itself and window - 1 tokens
            before it), or None for full attention.
        dtype: the checkpoint's own floating type: "float32", "float16" or "bfloat16".
        eos_token_ids: every id that ends a generation (from `generation_config.json` too, where there is one).
        kv_cache_dtype: the codec of keys and values that the checkpoint asks for (`kv_cache_scheme`); None: none.
        transformers_reason: why the native decoder cannot run it and transformers must; None: it runs natively.
            Where it is set, `rope` is not filled and `layer_windows` only as far as the configuration spells it out.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    layer_windows: tuple[int | None, ...] = field(default=())
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    kv_cache_dtype: str | None = None
    transformers_reason: str | None = None

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if len(self.layer_windows) != self.num_layers:
            raise UnsupportedModelError(
                f"{self.architecture}: {len(self.layer_windows)} layer types for {self.num_layers} layers"
            )
        if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.architecture}: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )

    @property
    def runs_natively(self) -> bool:
        """Whether the native decoder runs it; if not, `transformers_reason` says why."""
        return self.transformers_reason is None
