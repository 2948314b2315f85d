"""What a row of `families.py` says about a family of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

from octavo.checkpoint.model_config import LayerDescription
from octavo.checkpoint.tensor_names import TensorNames


class Scalar(NamedTuple):
    """A number of a family's own.

    Attributes:
        hf_key, gguf_key: its keys in `config.json` and in GGUF's metadata.
        power: to which the stated number is raised.
        default: the number where `config.json` has no such key.
        times: a size by whose power what `config.json` states is multiplied, and that power.
        gguf_power: the power to which GGUF's number is raised, if it is another.
        gguf_default: whether `default` is also the number where GGUF's metadata has no such key.
    """

    hf_key: str
    gguf_key: str = ""
    power: float = 1.0
    default: float | None = None
    times: tuple[Literal["hidden_size", "num_hidden_layers"], float] | None = None
    gguf_power: float | None = None
    gguf_default: bool = False

    def of(self, stated: float, hidden_size: int, num_layers: int) -> float:
        """Return the factor that a configuration of these sizes states."""
        value = math.pow(stated, self.power)
        if self.times is None:
            return value
        size, power = self.times
        return value * math.pow({"hidden_size": hidden_size, "num_hidden_layers": num_layers}[size], power)


class Experts(NamedTuple):
    """A family's mixture of experts.

    Attributes:
        width: the key of an expert's intermediate size in `config.json`.
        normalised: see `ExpertsConfig`; None if `norm_topk_prob` decides it, and in GGUF files `gguf_normalised`.
        bias: whether router and experts have biases.
        shared_width: the key of the shared expert's intermediate size, if there is one; it has a gate.
        scoring, corrected: see `ExpertsConfig`.
        deepseek: whether the configuration states groups, a factor of the weights, shared experts of the same width
            without a gate, and dense layers, under DeepSeek's keys.
    """

    width: str
    normalised: bool | None = True
    gguf_normalised: bool = True
    bias: bool = False
    shared_width: str = ""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    deepseek: bool = False


@dataclass(frozen=True, slots=True)
class NativeArchitecture:
    """An architecture that the native decoder runs.

    Attributes:
        model_type, gguf_name: what `config.json` and GGUF's `general.architecture` call it; None: its GGUF files are
            not supported.
        biased: the projections that carry a bias whatever the configuration says ("qkv", "mlp" or none).
        bias_option: the projections of attention to which `attention_bias` or `use_bias` gives one.
        mlp_bias_option: the key that gives the MLP's projections one; None: they have none.
        head_bias: whether the projection to logits has one.
        rotary_interleaved: the files whose rows of q and k are ordered for interleaved rotation: "gguf", "both" kinds,
            or "none".
        qkv_by_head: see `ModelConfig`; of Hugging Face's files.
        windowed: "always" (every layer, by `sliding_window`), "by_layer" (Qwen's rules), "never", or a number n: all
            but every n-th layer, unless the configuration has `layer_types`.
        unrotated: layers without rotary embedding: "listed" (`no_rope_layers`, or every fourth), "full_attention",
            "full_if_windowed" (the same where others have a window), or "unstated" (all, unless the configuration's
            `position_embedding_type` is "rope").
        mlp_width: the key of the MLP's intermediate size.
        partial_rotary: the part of a head that rotates if `partial_rotary_factor` says nothing else; None: all of it,
            and the factor is not one of this family's.
        latent: whether keys and values are projected from a latent, see `LatentConfig`.
        experts: the mixture of experts in each layer, if there is one.
        activation: of the MLP, whatever the configuration says; see `NATIVE_ACTIVATIONS`.
        yarn_truncates: see `RopeConfig.truncate`; of GGUF files, which do not say it.
        scalars: fields of `ModelConfig` that the configuration sets by numbers of the family's own.
        local_rope_theta: base of the frequencies in windowed layers, if they have their own.
        scales_embedding: whether embeddings are multiplied by the root of their width.
        head_dim_scaled_layers: in GGUF files, the number of layers of the one model whose attention is scaled by
            hidden_size / num_heads instead of head_dim.
        defaults: what `config.json` means where it does not mention a key, if not what Llama's means.
    """

    model_type: str
    gguf_name: str | None
    _: KW_ONLY
    layer: LayerDescription = field(default_factory=LayerDescription)
    names: TensorNames = field(default_factory=TensorNames)
    biased: Literal["qkv", "mlp", "none"] = "none"
    bias_option: Literal["qkv", "all", "none"] = "none"
    mlp_bias_option: str | None = None
    head_bias: bool = False
    rotary_interleaved: Literal["gguf", "both", "none"] = "none"
    qkv_by_head: bool = False
    windowed: Literal["always", "by_layer", "never"] | int = "never"
    unrotated: Literal["listed", "full_attention", "full_if_windowed", "unstated", "none"] = "none"
    mlp_width: str = "intermediate_size"
    partial_rotary: float | None = None
    latent: bool = False
    experts: Experts | None = None
    activation: str | None = None
    yarn_truncates: bool = True
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    local_rope_theta: float | None = None
    scales_embedding: bool = False
    head_dim_scaled_layers: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


def config_defaults(
    others: Mapping[str, Any] | None = None,
    /,
    *,
    ids: tuple[int | None, int | list[int]] | None = None,
    eps: float | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    experts: tuple[int, ...] = (),
    **stated: Any,
) -> dict[str, Any]:
    """Return the defaults of a row: `others`, such as another row's, and what is stated, under `config.json`'s keys.

    Args:
        ids: of the tokens that begin and end a text.
        experts: their number, how many of them a token uses and, if it has a key of its own, their width.
    """
    keys: dict[str, Any] = {"rms_norm_eps": eps, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    keys |= zip(("bos_token_id", "eos_token_id"), ids or (), strict=False)
    keys |= zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), experts, strict=False)
    return {**(others or {}), **{key: value for key, value in keys.items() if value is not None}, **stated}
