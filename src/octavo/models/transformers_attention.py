"""Octavo's attention as an attention function of transformers, which looks such functions up by name.

One function is registered. What a layer's call of it does depends on the pass that is running:

    probe   3 tokens, ordinary masked attention -> the shape of each layer's keys and values, and its window
    step    ragged tokens as one row [1, num_tokens], keys and values written to blocks, attention over block tables
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.reference import attend_dense
from octavo.errors import OctavoError, UnsupportedModelError
from octavo.kvcache.spec import LayerKVSpec
from octavo.models.kernel_ops import KernelOps
from octavo.models.ops import Heads, LayerOps, QKNorm
from octavo.models.rotary import Rotation
from octavo.storage.layer_kv import LayerKV

ATTENTION = "octavo_paged"
"""The name under which transformers finds the function."""

_OPS = KernelOps()
_PROBE_TOKENS = 3
# Additional arguments that some architectures pass to attention, and that no backend supports.
_UNSUPPORTED_ARGUMENTS = ("indices", "block_indices", "position_bias", "score_mod", "head_mask")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The remaining arguments of one attention call."""

    mask: torch.Tensor | None
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    arguments: dict[str, Any]


class Attention(ABC):
    """The implementation behind a layer's attention call: a step over blocks, the probe, or a trial of modules.

    Attributes:
        rows: int64, the only tokens that a last layer in `fused_modules.py` returns; None: all.
    """

    rows: torch.Tensor | None

    @abstractmethod
    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attend with query, key, value [num_tokens, heads, dim]; returns [num_tokens, num_heads, value_dim]."""

    def rotate_and_attend(
        self,
        module: torch.nn.Module,
        qkv: torch.Tensor,
        heads: Heads,
        norm: QKNorm | None,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        """Attend with a fused projection [num_tokens, ...], which may be overwritten.

        Args:
            angles: what transformers calls position_embeddings, see `rotation_by`; None: nothing rotates.
        """
        return self.attend(module, *LayerOps().rotate_heads(qkv, heads, norm, rotation_by(angles, len(qkv))), call)

    @abstractmethod
    def mask(self, mask_function: Callable[..., torch.Tensor], length: int) -> torch.Tensor | None:
        """Return the mask over `length` tokens for the layers of one kind."""


def rotation_by(angles: tuple[torch.Tensor, torch.Tensor] | None, num_tokens: int) -> Rotation:
    """Return the rotation by the cosines and sines of a step, [1, num_tokens, rotary_dim] with two equal halves."""
    if angles is None:
        return Rotation.none(torch.zeros(num_tokens, dtype=torch.int64))
    half = angles[0].shape[-1] // 2
    cos, sin = (table[0, :, :half].float().contiguous() for table in angles)
    return Rotation(cos, sin, torch.arange(num_tokens))


@dataclass(frozen=True, slots=True)
class PagedStep(Attention):
    """One step over block tables. `layer_of` maps id(attention module) to its index in `kv`."""

    layer_of: dict[int, int]
    batch: AttentionBatch
    kv: Sequence[LayerKV]
    attention: AttentionBackend
    rows: torch.Tensor | None = None
    _rotations: dict[int, tuple[Any, Rotation]] = field(default_factory=dict)  # by the id of angles, which it keeps

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        kv = self.kv[self.layer_of[id(module)]]
        self.attention.write(kv, key, value, self.batch)
        return self.attention.attend(kv, query, self.batch, scale=call.scale, softcap=call.softcap, sinks=call.sinks)

    def rotate_and_attend(
        self,
        module: torch.nn.Module,
        qkv: torch.Tensor,
        heads: Heads,
        norm: QKNorm | None,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        if (known := self._rotations.get(id(angles))) is None:
            known = self._rotations[id(angles)] = angles, rotation_by(angles, len(qkv))
        kv = self.kv[self.layer_of[id(module)]]
        query = _OPS.rotate_and_store(qkv, heads, norm, known[1], kv, self.batch, self.attention)
        return self.attention.attend(kv, query, self.batch, scale=call.scale, softcap=call.softcap, sinks=call.sinks)

    def mask(self, mask_function: Callable[..., torch.Tensor], length: int) -> torch.Tensor | None:
        return None


@dataclass(slots=True)
class LayerProbe(Attention):
    """Finds each layer's shapes and window in one forward pass over a few tokens."""

    model_name: str
    max_positions: int
    layers: list[LayerKVSpec] = field(default_factory=list)
    layer_of: dict[int, int] = field(default_factory=dict)
    rows: torch.Tensor | None = None

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        place = f"{self.model_name}, attention layer {len(self.layers)}"
        if id(module) in self.layer_of:
            raise UnsupportedModelError(f"{place}: one attention module is called twice in a pass")
        if key.shape[0] != _PROBE_TOKENS:
            raise UnsupportedModelError(f"{place}: it attends to {key.shape[0]} keys of a {_PROBE_TOKENS}-token prompt")
        if not call.arguments.get("is_causal", getattr(module, "is_causal", True)):
            raise UnsupportedModelError(f"{place}: its attention is not causal")
        for name in _UNSUPPORTED_ARGUMENTS:
            if call.arguments.get(name) is not None:
                raise UnsupportedModelError(f"{place}: attention with {name!r} is not supported")
        window = self._window(call, place)
        self.layer_of[id(module)] = len(self.layers)
        self.layers.append(LayerKVSpec(key.shape[1], key.shape[2], value.shape[2], window))
        attended = attend_dense(
            query,
            key.float().permute(1, 2, 0),
            value.float().transpose(0, 1),
            scale=call.scale,
            window=window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return attended.to(query.dtype)

    def mask(self, mask_function: Callable[..., torch.Tensor], length: int) -> torch.Tensor | None:
        """Return a mask in which every entry is the window, 0 for full attention, so that each layer receives its
        window.

        The window is determined by evaluating the mask function at the model's last positions, far beyond the probe's
        tokens.
        """
        end = max(self.max_positions, length)
        windows = {self._window_at(mask_function, query, end) for query in (end - 2, end - 1)}
        if windows <= {end - 1, end}:
            windows = {0}
        if len(windows) > 1:
            raise UnsupportedModelError(f"{self.model_name}: its window changes with the position (chunked attention)")
        return torch.full((1, 1, length, length), windows.pop(), dtype=torch.int64)

    def _window_at(self, mask_function: Callable[..., torch.Tensor], query: int, end: int) -> int:
        zero = torch.zeros((), dtype=torch.int64)
        keys = torch.arange(end)
        visible = mask_function(zero, zero, torch.tensor(query), keys).expand(end)
        window = int(visible.sum())
        if not bool(visible[query + 1 - window : query + 1].all()):
            raise UnsupportedModelError(
                f"{self.model_name}: its mask is not causal over a window (token {query} sees {window} others)"
            )
        return window

    def _window(self, call: AttentionCall, place: str) -> int | None:
        """Return the layer's window, from its mask if there is one, else from its arguments."""
        if call.mask is None:
            window = call.arguments.get("sliding_window")
            return window if window is not None and window < self.max_positions else None
        if call.mask.dtype is not torch.int64:
            raise UnsupportedModelError(f"{place}: it applies a mask of its own, which block tables cannot express")
        return int(call.mask.flatten()[0]) or None


current: ContextVar[Attention] = ContextVar("current")
"""What the layers of the pass that is running attend through."""


def run_through(
    model: Any, attention: Attention, token_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor
) -> torch.Tensor:
    """Run a forward pass whose layers attend through `attention`; returns logits [rows, vocab_size]."""
    token = current.set(attention)
    try:
        output = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
            return_dict=True,
        )
    finally:
        current.reset(token)
    logits: torch.Tensor = output.logits[0]
    return logits


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for transformers: [1, heads, num_tokens, dim] each -> [1, num_tokens, heads, dim].

    `s_aux` is transformers' name for sinks.
    """
    attention = current.get(None)
    if attention is None:
        raise OctavoError(f"{type(module).__name__} was called outside of a step")
    call = AttentionCall(
        mask=attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        arguments=arguments,
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    # Contiguous, because some architectures call `view` on the result.
    return attention.attend(module, query.contiguous(), key, value, call).contiguous()[None], None


def _mask(*, mask_function: Callable[..., torch.Tensor], q_length: int, **_: Any) -> torch.Tensor | None:
    """The mask function for transformers."""
    attention = current.get(None)
    return None if attention is None else attention.mask(mask_function, q_length)


def register_attention() -> None:
    """Register the functions with transformers, under the name `ATTENTION`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _paged_attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def probe_layers(model: Any, max_positions: int) -> LayerProbe:
    """Run a few tokens through the model, and return what its layers showed.

    Args:
        max_positions: the longest sequence; a window of this length or more is none.

    Raises:
        UnsupportedModelError: a layer's attention cannot be computed over blocks.
    """
    name = type(model).__name__
    probe = LayerProbe(name, max_positions)
    token_ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    try:
        with torch.inference_mode():
            run_through(model, probe, token_ids, positions, positions)
    except OctavoError:
        raise
    except Exception as error:  # whatever a model's own code may do with packed matrices and tokens in one row
        raise UnsupportedModelError(f"{name}: a pass over {_PROBE_TOKENS} tokens ends with {error!r}") from error
    if not probe.layers:
        raise UnsupportedModelError(f"{name}: its layers do not attend through transformers' AttentionInterface")
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(probe.layers) < expected:
        raise UnsupportedModelError(f"{name}: only {len(probe.layers)} of its {expected} layers are attention layers")
    return probe
