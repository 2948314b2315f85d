"""A decoder for the Llama family: Llama, Mistral, SmolLM2, Qwen2, Qwen3 and models of the same structure.

The computation for a token:

    tokens -> embedding -> [ norm -> | q | k | v | -> rotate -> blocks, attention -> output -> + -> norm
                             -> | gate | up | -> gated -> down -> + ] x num_layers -> norm -> head -> logits
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional
from tqdm import tqdm

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.checkpoint.model_config import ModelConfig
from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.kernels import PackedWeight
from octavo.kvcache.spec import LayerKVSpec
from octavo.models.base import CausalLM, LaterRows
from octavo.models.fastest_ops import make_layer_ops
from octavo.models.linear import Linear, LinearFactory, make_linear
from octavo.models.ops import ACTIVATIONS, Heads, LayerOps, QKNorm
from octavo.models.rotary import RotaryTable, Rotation
from octavo.models.weights import RawTensor
from octavo.storage.layer_kv import LayerKV

# Seconds of loading before a progress bar is shown; most models are loaded by then.
LOADING_BAR_DELAY = 1.0


class Weights(Protocol):
    """Tensors by their Hugging Face names; a subset of `WeightSource`."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def raw(self, name: str) -> RawTensor | None: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: QKNorm | None
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaDecoder(CausalLM):
    """A Llama-family model whose projections are fused (q, k, v into one product, gate and up into one).

    Args:
        weights: tensors under Hugging Face's names, such as "model.layers.0.self_attn.q_proj.weight".
        dtype: dtype of weights and activations.
        ops: row-wise operations; by default the fastest that run here.
        linear: factory that determines how weight matrices are stored.

    Raises:
        CorruptModelError: a tensor is missing, or its shape differs from the configuration.
        UnsupportedModelError: the activation function is not implemented.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ops: LayerOps | None = None,
        linear: LinearFactory = make_linear,
    ) -> None:
        if config.hidden_act not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.architecture}: activation {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}"
            )
        self.config = config
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_layers = tuple(
            LayerKVSpec(config.num_kv_heads, config.head_dim, config.value_dim, window)
            for window in config.layer_windows
        )
        self._ops = ops or make_layer_ops(dtype, self.device)
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim)
        self._scale = config.head_dim**-0.5
        self._rotary = RotaryTable(config.rope, self.device)
        reader = self._reader(weights, linear)
        self._embedding, self._head = reader.embedding_and_head()
        self._layers = [reader.layer(index) for index in loading_bar(config.num_layers)]
        self._final_norm = reader.tensor("model.norm.weight", config.hidden_size)
        self.weight_bytes = reader.nbytes

    def _reader(self, weights: Weights, linear: LinearFactory) -> WeightReader:
        """Return the reader from which `__init__` takes its matrices."""
        return WeightReader(self.config, weights, self.dtype, self.device, linear)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """See `CausalLM.forward`."""
        return self._apply_head(self._hidden(token_ids, batch, kv, attention, logits_indices))

    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
        num_logits: int,
    ) -> tuple[torch.Tensor, LaterRows]:
        """See `CausalLM.forward_in_part`."""
        hidden = self._hidden(token_ids, batch, kv, attention, logits_indices)
        later = LaterRows(
            logits=lambda first, last: self._apply_head(hidden[first:last]),
            hidden=lambda first, last: hidden[first:last].float(),
        )
        return self._apply_head(hidden[:num_now]), later

    def reserve_positions(self, count: int) -> None:
        """Compute the rotary tables for `count` positions now, so that no step up to there reallocates them."""
        self._rotary.tables(count)

    def _apply_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden).float()

    def _hidden(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Return the input of the head, [rows, hidden_size]."""
        ops, eps = self._ops, self.config.norm_eps
        rotation = self._rotary.at(batch.positions, batch.max_context_len)
        residual = self._embed(token_ids)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = self._attend(layer, hidden, rotation, batch, kv[index], attention)
            if index + 1 == len(self._layers):
                # All keys and values are stored by now, so only the rows that need logits are computed further.
                attended, residual = attended[logits_indices], residual[logits_indices]
                next_norm = self._final_norm
            else:
                next_norm = self._layers[index + 1].input_norm
            hidden, residual = ops.add_rms_norm(layer.output(attended), residual, layer.post_attention_norm, eps)
            hidden = layer.down(ops.gate(layer.gate_up(hidden), self.config.hidden_act))
            hidden, residual = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._embedding, PackedWeight):
            return self._embedding.rows(token_ids, self.dtype)
        return functional.embedding(token_ids, self._embedding)

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        kv: LayerKV,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Compute attention for hidden [num_tokens, hidden_size]; returns [num_tokens, num_heads * value_dim]."""
        query = self._ops.rotate_and_store(
            layer.qkv(hidden), self._heads, layer.qk_norm, rotation, kv, batch, attention
        )
        return attention.attend(kv, query, batch, scale=self._scale).flatten(1)


def loading_bar(num_layers: int) -> Iterable[int]:
    """Iterate over 0 .. num_layers, with a progress bar on a terminal's standard error if loading takes a while."""
    bar: Iterable[int] = tqdm(
        range(num_layers),
        desc="Loading weights",
        unit=" layers",
        delay=LOADING_BAR_DELAY,
        disable=None,
        leave=False,
        dynamic_ncols=True,
    )
    return bar


class WeightReader:
    """Reads, checks and fuses weights layer by layer, so that loading needs memory for only one more layer."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device, linear: LinearFactory
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._make_linear = linear
        self.nbytes = 0

    def embedding_and_head(self) -> tuple[torch.Tensor | PackedWeight, Linear]:
        """Return the token embedding [vocab_size, hidden_size], and the projection to logits."""
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        embedding = self.tensor("model.embed_tokens.weight", *shape)
        if not config.tie_word_embeddings:
            return embedding, self.linear(["lm_head"], [shape[0]], shape[1], bias=False)
        # On a CPU a tied head is a second, packed copy, because rows cannot be looked up in oneDNN's packed format, and
        # products with the plain format are slow.
        return embedding, self.keep(embedding, None)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a checked tensor that is stored unchanged."""
        tensor = self.get(name, *shape)
        self.nbytes += tensor.nbytes
        return tensor

    def keep(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Pass a matrix to the factory; a layer that only references `weight` adds no memory."""
        linear = self._make_linear(weight, bias)
        shared = getattr(linear, "weight", None) is weight
        self.nbytes += 0 if shared else linear.nbytes
        return linear

    def linear(self, names: list[str], out_features: list[int], in_features: int, *, bias: bool) -> Linear:
        """Return one product for the projections `names`, with concatenated outputs."""
        parts = list(zip(names, out_features, strict=True))
        weights = [self.get(f"{name}.weight", rows, in_features) for name, rows in parts]
        biases = [self.get(f"{name}.bias", rows) for name, rows in parts] if bias else []
        weight = weights[0] if len(parts) == 1 else torch.cat(weights)
        linear = self._make_linear(weight, torch.cat(biases) if bias else None)
        self.nbytes += linear.nbytes
        return linear

    def gate_up(self, names: list[str], inner: int, hidden: int, *, bias: bool) -> Linear:
        """Return gate and up projections as one product, | gate | up |."""
        return self.linear(names, [inner, inner], hidden, bias=bias)

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        hidden, inner = config.hidden_size, config.intermediate_size
        key_width, value_width = config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_dim
        return DecoderLayer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.linear(
                [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"],
                [config.num_heads * config.head_dim, key_width, value_width],
                hidden,
                bias=config.qkv_bias,
            ),
            qk_norm=QKNorm(
                self.tensor(f"{attention}.q_norm.weight", config.head_dim),
                self.tensor(f"{attention}.k_norm.weight", config.head_dim),
                config.norm_eps,
            )
            if config.qk_norm
            else None,
            output=self.linear(
                [f"{attention}.o_proj"], [hidden], config.num_heads * config.value_dim, bias=config.output_bias
            ),
            post_attention_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.gate_up([f"{mlp}.gate_proj", f"{mlp}.up_proj"], inner, hidden, bias=config.mlp_bias),
            down=self.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
        )

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """Return a checked tensor for further processing."""
        if not self._weights.has(name):
            raise CorruptModelError(
                f"{self._config.architecture}: tensor {name!r} of shape {list(shape)} is missing from the checkpoint"
            )
        tensor = self._weights.get(name, self._dtype)
        self.check_shape(name, tuple(tensor.shape), shape)
        return tensor.to(device=self._device, dtype=self._dtype)

    def check_shape(self, name: str, found: tuple[int, ...], declared: tuple[int, ...]) -> None:
        if found != declared:
            raise CorruptModelError(
                f"{self._config.architecture}: tensor {name!r} has shape {list(found)}, "
                f"the configuration declares {list(declared)}"
            )
