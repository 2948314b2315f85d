"""Replaces what modules of a transformers model compute by a few calls of Octavo's kernels.

    RMS norm                        -> one call
    gated MLP                       -> one product of gate and up that ends with the activation, and down
    attention with q, k and v       -> one product; rotation and storing in one call; attention; the output's product
    layer of norms, the above two   -> those calls; a norm also adds to the residual

A module is recognised by its parts and its results, whatever its class: on random inputs, small, ordinary and large, at
the first position, in the middle and at the last, `LayerOps` must return what the module does, within rounding. Other
modules keep transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional

from octavo.kernels import Activation
from octavo.models.kernel_ops import KernelOps
from octavo.models.ops import ACTIVATIONS, Heads, LayerOps, NormWeights, QKNorm
from octavo.models.packed_modules import OnlineFormat, PackedProduct
from octavo.models.packing import TILE
from octavo.models.transformers_attention import Attention, AttentionCall, current, rotation_by, run_through

_SCALES = (1e-3, 1.0, 30.0)  # of random rows: small ones show a norm's epsilon, large ones what is clipped
_TOLERANCES = {torch.bfloat16: 2.0**-6, torch.float32: 1e-4}  # relative to the largest number of a row
_PLAIN, _OPS = LayerOps(), KernelOps()

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Projection = tuple[torch.Tensor, torch.Tensor | None]


class _Trial(Attention):
    """Attention that returns random numbers, and keeps what each module called it with."""

    def __init__(self) -> None:
        self.rows = None
        self.seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall]] = {}

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        self.seen[module] = query, key, value, call
        return _random(query.new_empty(*query.shape[:2], value.shape[2]))

    def mask(self, mask_function: Callable[..., torch.Tensor], length: int) -> torch.Tensor | None:
        return torch.zeros(1, 1, length, length, dtype=torch.int64)  # as the probe's


@dataclass(frozen=True, slots=True)
class _Norm:
    weights: NormWeights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return _OPS.rms_norm(rows, self.weights.weight, self.weights.eps).view(x.shape)


@dataclass(frozen=True, slots=True)
class _GatedMLP:
    gate_up: PackedProduct
    down: PackedProduct
    activation: Activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.rows(self.gate_up.rows(x, self.activation))


@dataclass(frozen=True, slots=True)
class _Attention:
    module: nn.Module
    qkv: PackedProduct
    output: PackedProduct
    heads: Heads
    norm: QKNorm | None
    rotates: bool
    call: AttentionCall

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        return self.output.rows(self.attend(hidden_states[0], position_embeddings, attention_mask))[None], None

    def attend(self, x: torch.Tensor, angles: Any, mask: torch.Tensor | None) -> torch.Tensor:
        """Return what `output` multiplies."""
        call = self.call if mask is None else replace(self.call, mask=mask)
        qkv, angles = self.qkv.rows(x), angles if self.rotates else None
        return current.get().rotate_and_attend(self.module, qkv, self.heads, self.norm, angles, call).flatten(1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer that adds to the residual what attention and then the MLP make of its norms, or norms of that."""

    attention: _Attention
    mlp: _GatedMLP
    attention_norm: NormWeights
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights
    mlp_post_norm: NormWeights | None
    is_last: bool = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        residual = hidden_states[0]
        hidden = _OPS.norm(residual, self.attention_norm)
        attended = self.attention.attend(hidden, position_embeddings, attention_mask)
        if self.is_last and (rows := current.get().rows) is not None:
            attended, residual = attended[rows], residual[rows]
        branch = self.attention.output.rows(attended)
        hidden, residual = _OPS.add_norm(_OPS.norm(branch, self.attention_post_norm), residual, self.mlp_norm)
        return _OPS.norm(self.mlp.rows(hidden), self.mlp_post_norm).add_(residual)[None]


_Fused = _Norm | _GatedMLP | _Attention | _Layer


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """What is known of a model's layers after `fuse_modules`.

    Attributes:
        all: whether the kernels compute all layers.
        keep_rows: whether the last layer may return only the rows that become logits (`Attention.rows`).
    """

    all: bool = False
    keep_rows: bool = False


def fuse_modules(model: Any, max_positions: int, format: OnlineFormat | None = None) -> FusedLayers:
    """Replace `forward` of the modules that are recognised, and pack their matrices.

    Args:
        max_positions: the longest sequence.
        format: see `pack_modules`.

    Raises:
        Exception: whatever the model's own code raises for the trial's inputs. The model computes the same as before.
    """
    trial = _Trial()
    calls: dict[nn.Module, _Call] = {}
    fused: dict[nn.Module, _Fused] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, *call: calls.__setitem__(module, call), with_kwargs=True)
        for module in model.modules()
    ]
    positions = torch.tensor([0, max_positions // 2, max_positions - 1])
    token = current.set(trial)
    try:
        with torch.inference_mode():
            run_through(model, trial, torch.zeros_like(positions), positions, torch.zeros_like(positions))
            for hook in hooks:
                hook.remove()
            while calls:  # the last ones first: parts come before what has them, and what they had is freed
                module, call = calls.popitem()
                found = _recognise(module, call, trial, fused, format)
                if found is not None:
                    fused[module] = found
                    module.forward = found.forward
            layers = [(module, layer) for module, layer in fused.items() if isinstance(layer, _Layer)]
            if not layers:
                return FusedLayers()
            module, layer = layers[0]
            module.forward = replace(layer, is_last=True).forward
            return FusedLayers(len(layers) == len(trial.seen), _may_keep_rows(model, trial, positions))
    finally:
        for hook in hooks:
            hook.remove()
        current.reset(token)


def _may_keep_rows(model: Any, trial: _Trial, positions: torch.Tensor) -> bool:
    """Whether logits stay the same if the last layer returns only their rows: whether nothing else reads the others."""
    token_ids, rows = torch.arange(len(positions)), torch.tensor([2, 0])
    whole = run_through(model, trial, token_ids, positions, rows)
    trial.rows = rows
    try:
        return _agree(run_through(model, trial, token_ids, positions, torch.arange(len(rows))), whole)
    except (RuntimeError, IndexError, ValueError):  # of code that needs all of them
        return False


def _recognise(
    module: nn.Module, call: _Call, trial: _Trial, fused: dict[nn.Module, _Fused], format: OnlineFormat | None
) -> _Fused | None:
    args, kwargs = call
    x = args[0] if args else kwargs.get("hidden_states")
    if (
        len(args) > 1
        or not isinstance(x, torch.Tensor)
        or x.dtype not in _TOLERANCES
        or x[..., 0].numel() < len(_SCALES)
    ):
        return None
    x, others = _random(x), {name: value for name, value in kwargs.items() if name != "hidden_states"}
    parts = dict(module.named_children())
    matrices = [part for part in parts.values() if type(part) is nn.Linear and part.weight.dtype is x.dtype]
    norms = {name: part.weights for name, child in parts.items() if isinstance(part := fused.get(child), _Norm)}
    attentions = [part for child in parts.values() if isinstance(part := fused.get(child), _Attention)]
    mlps = [part for child in parts.values() if isinstance(part := fused.get(child), _GatedMLP)]
    if module in trial.seen and len(matrices) in (2, 4):
        return _as_attention(module, x, others, trial, matrices, norms, format)
    if len(attentions) == len(mlps) == 1:
        return _as_layer(module, x, others, attentions[0], mlps[0], list(norms.values()))
    if not parts and not others:
        return _as_norm(module, x)
    if not others:
        return _as_gated_mlp(module, x, matrices, format)
    return None


def _as_norm(module: Any, x: torch.Tensor) -> _Norm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or weight is None or weight.shape != x.shape[-1:]:
        return None
    theirs, weight = module(x), weight.detach()
    found = [NormWeights(each, None, eps) for each in (weight, weight.float(), weight.float() + 1)]
    norm = min(found, key=lambda each: _error(_PLAIN.norm(x, each), theirs))
    return _Norm(norm) if _agree(_PLAIN.norm(x, norm), theirs) else None


def _as_gated_mlp(
    module: nn.Module, x: torch.Tensor, matrices: list[nn.Linear], format: OnlineFormat | None
) -> _GatedMLP | None:
    if len(matrices) not in (2, 3):
        return None
    inputs: dict[nn.Module, torch.Tensor] = {}
    hooks = [each.register_forward_pre_hook(lambda each, args: inputs.update({each: args[0]})) for each in matrices]
    theirs = module(x)
    for hook in hooks:
        hook.remove()
    for gate, up, down in _gates(matrices):
        sums = functional.linear(x, *gate), functional.linear(x, *up)
        inner = {name: ACTIVATIONS[name](sums[0]) * sums[1] for name in get_args(Activation)}
        name = min(inner, key=lambda name: _error(inner[name], inputs.get(down)))  # GELUs differ by less than rounding
        if _agree(inner[name], inputs.get(down)) and _agree(down(inner[name]), theirs):
            biases = _biases([gate, up])
            bias = _interleaved(*biases) if biases else None
            packed = PackedProduct(_interleaved(gate[0], up[0]), bias, format)
            return _GatedMLP(*_replace(module, matrices, packed, down, format), name)
    return None


def _gates(matrices: list[nn.Linear]) -> Iterator[tuple[_Projection, _Projection, nn.Linear]]:
    """Yield what may be a gate and what it gates, and the matrix that may follow."""
    for *before, down in permutations(matrices):
        parts: list[_Projection] = [(matrix.weight, matrix.bias) for matrix in before]
        if len(before) == 1:
            weight, bias = parts[0]
            halves = (None, None) if bias is None else bias.chunk(2)
            parts = list(zip(weight.chunk(2), halves, strict=True))
        if {len(weight) for weight, _ in parts} == {down.in_features} and down.in_features % TILE == 0:
            yield parts[0], parts[1], down
            if len(before) == 1:
                yield parts[1], parts[0], down


def _biases(parts: list[_Projection]) -> list[torch.Tensor]:
    """Return the biases of matrices that become one, zeros where some have none; nothing if none has any."""
    if all(bias is None for _, bias in parts):
        return []
    return [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """| 16 gates | 16 ups | 16 gates | …, see `PackedWeight.linear`."""
    return torch.stack([each.view(-1, TILE, *each.shape[1:]) for each in (gate, up)], dim=1).flatten(0, 2)


def _as_attention(
    module: nn.Module,
    x: torch.Tensor,
    others: dict[str, Any],
    trial: _Trial,
    matrices: list[nn.Linear],
    norms: dict[str, NormWeights],
    format: OnlineFormat | None,
) -> _Attention | None:
    result = module(hidden_states=x, **others)
    *theirs, call = trial.seen[module]
    passed = others.get("attention_mask")
    if type(result) is not tuple or len(result) != 2 or result[1] is not None or call.mask is not passed:
        return None
    query, key, value = theirs
    heads = Heads(query.shape[1], key.shape[1], key.shape[2], value.shape[2])
    attended = trial.attend(module, query, key, value, call).flatten(1)
    own = {name[0]: norm for name, norm in norms.items() if norm.weight.shape == key.shape[2:]}
    norm = QKNorm(own["q"], own["k"]) if own.keys() == {"q", "k"} else None
    angles = others.get("position_embeddings")
    if not isinstance(angles, tuple) or any(table.shape[:-1] != x.shape[:-1] for table in angles):
        angles = None
    for *projections, output in permutations(matrices):
        if output.in_features != attended.shape[1] or not _agree(output(attended), result[0][0]):
            continue
        qkv = torch.cat([projection(x[0]) for projection in projections], dim=1)
        if qkv.shape[1] != sum(part[0].numel() for part in theirs):
            continue
        for turned in (angles, None):
            ours = _PLAIN.rotate_heads(qkv, heads, norm, rotation_by(turned, len(qkv)))
            if all(map(_agree, ours, theirs)):
                parts: list[_Projection] = [(each.weight, each.bias) for each in projections]
                biases = _biases(parts)
                weight, bias = torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
                packed = _replace(module, matrices, PackedProduct(weight, bias, format), output, format)
                return _Attention(module, *packed, heads, norm, turned is not None, replace(call, mask=None))
    return None


def _as_layer(
    module: nn.Module,
    x: torch.Tensor,
    others: dict[str, Any],
    attention: _Attention,
    mlp: _GatedMLP,
    norms: list[NormWeights],
) -> _Layer | None:
    theirs = module(x, **others)
    orders: list[Any] = []
    if len(norms) == 2:
        orders = [(norms[0], None, norms[1], None)]
    elif len(norms) == 4:
        orders = [norms, [norms[i] for i in (0, 2, 1, 3)]]
    layers = (_Layer(attention, mlp, *order) for order in orders)
    return next((layer for layer in layers if _agree(layer.forward(x, **others), theirs)), None)


def _replace(
    module: nn.Module, matrices: list[nn.Linear], first: PackedProduct, last: nn.Linear, format: OnlineFormat | None
) -> tuple[PackedProduct, PackedProduct]:
    """Let a module have two packed matrices in place of its own."""
    packed = first, PackedProduct(last.weight, last.bias, format)
    for name, child in list(module.named_children()):
        if child in matrices:
            delattr(module, name)
    module.packed_in, module.packed_out = packed
    return packed


def _random(like: torch.Tensor) -> torch.Tensor:
    """Rows of random numbers of the shape and dtype of a tensor, each of another size."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(like.shape, generator=generator).view(-1, like.shape[-1])
    scales = torch.tensor(_SCALES)[torch.arange(len(rows)) * len(_SCALES) // len(rows)]
    return (rows * scales[:, None]).view(like.shape).to(like.dtype)


def _agree(ours: torch.Tensor, theirs: Any) -> bool:
    return _error(ours, theirs) <= _TOLERANCES[ours.dtype]


def _error(ours: torch.Tensor, theirs: Any) -> float:
    """Return the largest difference in a row, relative to the row's largest number."""
    if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape:
        return torch.inf
    difference = (ours.float() - theirs.float()).abs().amax(dim=-1) / theirs.float().abs().amax(dim=-1)
    return float(difference.nan_to_num(torch.inf).max())
