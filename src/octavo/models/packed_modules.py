"""Replaces the matrices of a transformers model by packed ones, which Octavo's kernels multiply.

    nn.Linear, Conv1D                   -> PackedProduct
    experts' parameters [n, out, in]    -> n PackedProducts; each multiplies the rows of its tokens
    nn.Embedding tied to the head       -> PackedEmbedding, which looks rows up in the packed head

Other modules with weights of their own keep them, and stay right.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from octavo import kernels
from octavo.kernels import Activation, PackedWeight
from octavo.models.quantised_checkpoint import quantise

_EXPERTS = "octavo_packed"

OnlineFormat = Literal["Q8_0", "Q4_0"]
"""Formats to which float weights are quantised when they are packed."""


class PackedProduct(nn.Module):
    """x [..., inputs] -> x @ weight.T + bias [..., outputs], in x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, format: OnlineFormat | None) -> None:
        """
        Args:
            weight: bfloat16 or float32 [outputs, inputs].
            format: what to quantise it to, where `inputs` is a multiple of 32; None: nothing.
        """
        super().__init__()
        self.matrix = _pack(weight.detach(), format)
        self._dtype = weight.dtype
        # Registered, so that its bytes are counted with the model's.
        self.register_buffer("packed", self.matrix.packed, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix unpacked, [outputs, inputs], for models whose own code multiplies it, such as some routers'."""
        return self.matrix.rows(torch.arange(self.matrix.outputs), self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.rows(rows if rows.is_contiguous() else rows.contiguous()).view(*x.shape[:-1], -1)

    def rows(self, x: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        """Multiply contiguous rows [n, inputs]; `activation`: see `PackedWeight.linear`."""
        return self.matrix.linear(x, self.bias, activation=activation)


class PackedEmbedding(nn.Module):
    """Looks rows up in the matrix of a head that is tied to it."""

    def __init__(self, head: PackedProduct, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.matrix.rows(ids.flatten(), self.dtype).view(*ids.shape, -1)


def can_pack(model: Any) -> bool:
    """Whether the kernels multiply this model's weights: bfloat16 or float32 on a CPU."""
    return kernels.available() and model.device.type == "cpu" and model.dtype in kernels.FLOAT_FORMATS


def pack_modules(model: Any, format: OnlineFormat | None = None) -> None:
    """Pack a model's matrices in place, one at a time.

    Args:
        format: what to quantise them to; a head stays at 8 bits. None: they stay as they are.
    """
    from transformers.pytorch_utils import Conv1D

    head, packed = model.get_output_embeddings(), {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) not in (nn.Linear, Conv1D) or module.weight.dtype not in kernels.FLOAT_FORMATS:
                continue
            if module not in packed:
                weight = module.weight.T if isinstance(module, Conv1D) else module.weight
                wanted: OnlineFormat | None = "Q8_0" if format and module is head else format
                packed[module] = PackedProduct(weight, module.bias, wanted)
                if module is not head:
                    module.weight = None  # frees it
            setattr(parent, name, packed[module])
    if head in packed:
        _tie_embedding(model, head.weight, packed[head])
    _pack_experts(model, format)


def _tie_embedding(model: Any, weight: torch.Tensor, head: PackedProduct) -> None:
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            # Others, such as Gemma's, scale what they look up.
            if type(module) is nn.Embedding and module.weight.data_ptr() == weight.data_ptr():
                setattr(parent, name, PackedEmbedding(head, weight.dtype))


def _pack_experts(model: Any, format: OnlineFormat | None) -> None:
    """Pack the parameters of expert modules that transformers lets others compute (its ExpertsInterface)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if not type(model)._can_set_experts_implementation():
        return
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
    model.set_experts_implementation(_EXPERTS)
    for module in list(model.modules()):
        if getattr(getattr(module, "config", None), "_experts_implementation", None) != _EXPERTS:
            continue
        for first, second in (("gate_up_proj", "down_proj"), ("up_proj", "down_proj")):
            if isinstance(getattr(module, first, None), nn.Parameter) and hasattr(module, "is_transposed"):
                module.packed_in = _pack_parameter(module, first, format)
                module.packed_out = _pack_parameter(module, second, format)


def _pack_parameter(module: Any, name: str, format: OnlineFormat | None) -> nn.ModuleList:
    weights, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    each = weights.detach().transpose(1, 2) if module.is_transposed else weights.detach()
    packed = [PackedProduct(w, None if biases is None else biases[i], format) for i, w in enumerate(each)]
    delattr(module, name)
    return nn.ModuleList(packed)


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function for transformers.

    Args:
        hidden_states: [num_tokens, hidden_size]; top_k_index, top_k_weights: [num_tokens, k].
    """
    order = top_k_index.flatten().argsort(stable=True)
    counts = top_k_index.flatten().bincount(minlength=module.num_experts).tolist()
    tokens = order // top_k_index.shape[1]
    rows, first = hidden_states[tokens], 0
    sums = []
    for expert, count in enumerate(counts[: module.num_experts]):
        if count:
            between = module.packed_in[expert].rows(rows[first : first + count])
            gated = module._apply_gate(between) if module.has_gate else module.act_fn(between)
            sums.append(module.packed_out[expert].rows(gated.contiguous()))
            first += count
    product = torch.cat(sums)
    if module.has_post_expert_norm:
        product = module.post_expert_norm(product)
    product = product * top_k_weights.flatten()[order[:first], None]
    return torch.zeros_like(hidden_states).index_add_(0, tokens[:first], product.to(hidden_states.dtype))


def _pack(weight: torch.Tensor, format: OnlineFormat | None) -> PackedWeight:
    if format is None or weight.shape[1] % 32:
        return PackedWeight.pack(weight.contiguous()).compact()
    rows = quantise(weight, format, "floats").rows
    return PackedWeight.pack_quantised(format, torch.from_numpy(rows), weight.shape[1])
