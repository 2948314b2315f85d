"""Reads, checks and fuses the weights that a program asks for."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch.nn import functional

from octavo.checkpoint.model_config import ExpertsConfig, LatentConfig, ModelConfig
from octavo.errors import CorruptModelError
from octavo.kernels import PackedWeight
from octavo.models.linear import Linear, LinearFactory
from octavo.models.ops import NormWeights
from octavo.models.weights import RawTensor

Split = Literal["outputs", "heads", "whole"]
"""How ranks split a product: by outputs, by heads, or not at all. Only `PackingReader` splits any."""


class Weights(Protocol):
    """Tensors by their Hugging Face names; a subset of `WeightSource`."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...

    def raw(self, name: str) -> RawTensor | None: ...


class WeightReader:
    """Reads weights layer by layer, so that loading needs memory for only one more layer.

    Args:
        linear: factory that determines how weight matrices are stored.

    Raises:
        CorruptModelError: a tensor is missing, or its shape differs from the configuration.
    """

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
        embedding = self.tensor(f"{config.names.hf('embedding')}.weight", *shape)
        if not config.tie_word_embeddings:
            return embedding, self.linear([config.names.hf("head")], [shape[0]], shape[1], bias=config.head_bias)
        # On a CPU a tied head is a second, packed copy, because rows cannot be looked up in oneDNN's packed format, and
        # products with the plain format are slow.
        return embedding, self.keep(embedding, None)

    def norm(self, part: str, layer: int | None, width: int | None = None) -> NormWeights:
        """Return the weights of a norm; `width` is the hidden size if not given."""
        config, name = self._config, self._config.names.hf(part, layer)
        width = config.hidden_size if width is None else width
        description = config.layer
        dtype = self._dtype if description.norm == "rms" else torch.float32
        if description.norm_weights:
            weight = self.tensor(f"{name}.weight", width, dtype=dtype)
        else:
            weight = torch.ones(width, dtype=dtype, device=self._device)
        if description.norm_offset:
            weight = weight + description.norm_offset
        bias = self.tensor(f"{name}.bias", width, dtype=dtype) if description.norm_bias else None
        return NormWeights(weight, bias, config.norm_eps, description.norm == "layer")

    def qkv(self, layer: int) -> Linear:
        config = self._config
        widths = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
        widths.append(config.num_kv_heads * config.value_dim)
        parts = ["q", "k", "v"]
        if "qkv" in config.names.fused:
            parts, widths = ["qkv"], [sum(widths)]
        names = [config.names.hf(part, layer) for part in parts]
        return self.linear(names, widths, config.hidden_size, bias=config.qkv_bias, split="heads")

    def queries(self, layer: int) -> Linear:
        """Return the projection to the queries of latent attention, | rotated | plain | of each head."""
        config, latent = self._config, self._latent()
        outputs = config.num_heads * (latent.rotary_dim + latent.plain_dim)
        name = config.names.hf("q_b" if latent.query_rank else "q", layer)
        return self.linear([name], [outputs], latent.query_rank or config.hidden_size, bias=False)

    def latent_query(self, layer: int) -> Linear:
        """Return the projection to the latent of the queries."""
        name = self._config.names.hf("q_a", layer)
        return self.linear([name], [self._latent().query_rank], self._config.hidden_size, bias=self._config.qkv_bias)

    def latent(self, layer: int) -> Linear:
        """Return the projection to | the rotated part of keys | the latent of keys and values |."""
        latent, name = self._latent(), self._config.names.hf("kv_a", layer)
        outputs = latent.rotary_dim + latent.rank
        return self.linear([name], [outputs], self._config.hidden_size, bias=self._config.qkv_bias)

    def latent_heads(self, layer: int) -> tuple[list[Linear], list[Linear]]:
        """Return each head's projections of the plain part of a query to the latent, and of the latent to a value."""
        config, latent, names = self._config, self._latent(), self._config.names
        if "kv_b" not in names.fused:
            sizes = {"k_b": (latent.rank, latent.plain_dim), "v_b": (latent.value_dim, latent.rank)}
            to_latent, from_latent = (
                [
                    self.linear([names.hf(part, layer, head)], [outputs], inputs, bias=False, split="whole")
                    for head in range(config.num_heads)
                ]
                for part, (outputs, inputs) in sizes.items()
            )
            return to_latent, from_latent
        outputs = config.num_heads * (latent.plain_dim + latent.value_dim)
        both = self.get(f"{names.hf('kv_b', layer)}.weight", outputs, latent.rank)
        plain, heads = latent.plain_dim, both.chunk(config.num_heads)
        return [self.keep(head[:plain].T, None) for head in heads], [self.keep(head[plain:], None) for head in heads]

    def output(self, layer: int) -> Linear:
        config = self._config
        names, width = [config.names.hf("output", layer)], config.attended_width
        return self.linear(names, [config.hidden_size], width, bias=config.output_bias)

    def gate_up(self, layer: int) -> Linear:
        """Return gate and up projections as one product, | gate | up |."""
        config = self._config
        parts = ["gate_up"] if "gate_up" in config.names.fused else ["gate", "up"]
        names = [config.names.hf(part, layer) for part in parts]
        rows = 2 * config.intermediate_size // len(names)
        return self.fused_gate_up(names, rows, config.hidden_size, bias=config.mlp_bias)

    def up(self, layer: int) -> Linear:
        config = self._config
        name = config.names.hf("up", layer)
        return self.linear([name], [config.intermediate_size], config.hidden_size, bias=config.mlp_bias)

    def activation_parameters(self, layer: int) -> tuple[float, ...]:
        """Return what a layer's activation has learnt, see `Activate`."""
        config, stem = self._config, self._config.names.hf("activation", layer)
        if config.hidden_act != "xielu":
            return ()
        # Stored before a softplus that keeps them positive.
        alpha_p, alpha_n = (self.get(f"{stem}.{part}", 1, dtype=torch.float32) for part in ("alpha_p", "alpha_n"))
        beta = self.get(f"{stem}.beta", dtype=torch.float32).item()
        return functional.softplus(alpha_p).item(), functional.softplus(alpha_n).item() + beta, beta

    def down(self, layer: int) -> Linear:
        config = self._config
        name = config.names.hf("down", layer)
        return self.linear([name], [config.hidden_size], config.intermediate_size, bias=config.mlp_bias)

    def router(self, layer: int) -> Linear:
        """Return the product that scores experts, without its bias."""
        config, name = self._config, self._config.names.hf("router", layer)
        return self.linear([name], [self._experts().count], config.hidden_size, bias=False, split="whole")

    def router_bias(self, layer: int) -> torch.Tensor | None:
        """Return float32 [experts], the bias or the correction of the router's scores, or None."""
        experts = self._experts()
        name = self._config.names.hf("router_correction" if experts.corrected else "router", layer)
        biased = experts.bias or experts.corrected
        return self.tensor(f"{name}.bias", experts.count, dtype=torch.float32) if biased else None

    def sinks(self, layer: int) -> torch.Tensor | None:
        """Return the heads' sink logits, float32 [num_heads], or None."""
        config, name = self._config, self._config.names.hf("sinks", layer)
        return self.tensor(f"{name}.weight", config.num_heads, dtype=torch.float32) if config.layer.sinks else None

    def experts(self, layer: int) -> list[tuple[Linear, Linear]]:
        """Return for each expert its products | gate | up |, and down."""
        experts, hidden = self._experts(), self._config.hidden_size
        inner, found = experts.intermediate_size, []
        for expert in range(experts.count):
            gate, up, down = (self._config.names.hf(f"expert_{part}", layer, expert) for part in ("gate", "up", "down"))
            gate_up = self.fused_gate_up([gate, up], inner, hidden, bias=experts.bias)
            found.append((gate_up, self.linear([down], [hidden], inner, bias=experts.bias)))
        return found

    def shared_expert(self, layer: int) -> tuple[Linear, Linear]:
        """Return the products | gate | up |, and down, of the expert that all tokens use."""
        config, inner = self._config, self._experts().shared_intermediate_size
        gate, up, down = (config.names.hf(f"shared_{part}", layer) for part in ("gate", "up", "down"))
        gate_up = self.fused_gate_up([gate, up], inner, config.hidden_size, bias=False)
        return gate_up, self.linear([down], [config.hidden_size], inner, bias=False)

    def shared_expert_gate(self, layer: int) -> Linear:
        name = self._config.names.hf("shared_expert_gate", layer)
        return self.linear([name], [1], self._config.hidden_size, bias=False, split="whole")

    def _latent(self) -> LatentConfig:
        if self._config.latent is None:
            raise ValueError(f"{self._config.architecture} has no latents")
        return self._config.latent

    def _experts(self) -> ExpertsConfig:
        if self._config.experts is None:
            raise ValueError(f"{self._config.architecture} has no experts")
        return self._config.experts

    def finish(self) -> None:
        """Called once when everything has been read."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a checked tensor that is stored unchanged."""
        tensor = self.get(name, *shape, dtype=dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def keep(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Pass a matrix to the factory; a layer that only references `weight` adds no memory."""
        linear = self._make_linear(weight, bias)
        shared = getattr(linear, "weight", None) is weight
        self.nbytes += 0 if shared else linear.nbytes
        return linear

    def linear(
        self, names: list[str], out_features: list[int], in_features: int, *, bias: bool, split: Split = "outputs"
    ) -> Linear:
        """Return one product for the projections `names`, with concatenated outputs."""
        parts = list(zip(names, out_features, strict=True))
        weights = [self.get(f"{name}.weight", rows, in_features) for name, rows in parts]
        biases = [self.get(f"{name}.bias", rows) for name, rows in parts] if bias else []
        weight = weights[0] if len(parts) == 1 else torch.cat(weights)
        linear = self._make_linear(weight, torch.cat(biases) if bias else None)
        self.nbytes += linear.nbytes
        return linear

    def fused_gate_up(self, names: list[str], rows: int, hidden: int, *, bias: bool) -> Linear:
        """Return the product of a gate and an up projection, or of the matrix that holds both."""
        return self.linear(names, [rows] * len(names), hidden, bias=bias)

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a checked tensor for further processing."""
        if not self._weights.has(name):
            raise CorruptModelError(
                f"{self._config.architecture}: tensor {name!r} of shape {list(shape)} is missing from the checkpoint"
            )
        dtype = dtype or self._dtype
        tensor = self._weights.get(name, dtype)
        self.check_shape(name, tuple(tensor.shape), shape)
        return tensor.to(device=self._device, dtype=dtype)

    def check_shape(self, name: str, found: tuple[int, ...], declared: tuple[int, ...]) -> None:
        if found != declared:
            raise CorruptModelError(
                f"{self._config.architecture}: tensor {name!r} has shape {list(found)}, "
                f"the configuration declares {list(declared)}"
            )
