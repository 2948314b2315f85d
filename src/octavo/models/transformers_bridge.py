"""The bridge to transformers, which runs other decoder-only architectures with their attention replaced by ours.

transformers looks up attention functions by name (its AttentionInterface). Octavo registers one function. A probe finds
out once which layers call it, and what their masks mean:

    probe   3 tokens, ordinary masked attention -> the shape of each layer's keys and values, and its window
    step    ragged tokens as one row [1, num_tokens], keys and values written to blocks, attention over block tables

Importing transformers takes seconds, so it happens in the functions that need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.reference import attend_dense
from octavo.checkpoint.hf_config import merged, read_json
from octavo.errors import CorruptModelError, ModelNotFoundError, OctavoError, UnsupportedModelError
from octavo.kvcache.spec import LayerKVSpec
from octavo.models.base import CausalLM, LaterRows
from octavo.models.packed_modules import OnlineFormat, can_pack, pack_modules
from octavo.storage.layer_kv import LayerKV

_ATTENTION = "octavo_paged"
_PROBE_TOKENS = 3
# Additional arguments that some architectures pass to attention, and that no backend supports.
_UNSUPPORTED_ARGUMENTS = ("indices", "block_indices", "position_bias", "score_mod", "head_mask")


class TransformersModel(CausalLM):
    """A `PreTrainedModel` with a causal head, computed over block tables.

    Args:
        model: a model with any attention implementation, which is switched to Octavo's.
        packed: whether Octavo's kernels multiply its matrices, where they can: this replaces the modules of `model`.
        format: what to quantise packed matrices to.
        max_len: the longest sequence, by which RoPE scalings of the kinds "longrope" and "dynamic" choose frequencies,
            once for all sequences; the model's own limit if None.

    Raises:
        UnsupportedModelError: the model cannot be run; the message has its class and the reason.
    """

    budget_refusal = "transformers computes this model, and rotates queries only once (docs/serve/models.md)"

    def __init__(
        self,
        model: Any,
        *,
        packed: bool = False,
        format: OnlineFormat | None = None,
        max_len: int | None = None,
    ) -> None:
        _register_attention()
        _refuse_unsupported(type(model), model.config)
        model.set_attn_implementation(_ATTENTION)
        self._model = model.eval()
        self.dtype = model.dtype
        self.device = model.device
        if packed and can_pack(model):
            pack_modules(model, format)
        text_config = model.config.get_text_config(decoder=True)
        self.architecture = type(model).__name__
        self.vocab_size = text_config.vocab_size
        self.max_position_embeddings = text_config.max_position_embeddings
        _fix_frequencies(model, max_len or self.max_position_embeddings)
        self.eos_token_ids = _eos_token_ids(model.generation_config, text_config)
        probe = _probe(model, self.max_position_embeddings)
        self.kv_layers = tuple(probe.layers)
        self._layer_of = probe.layer_of
        # Tied tensors count once.
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        self.weight_bytes = sum(tensors.values())

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        packed: bool = False,
        format: OnlineFormat | None = None,
        max_len: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> TransformersModel:
        """Load a Hugging Face folder.

        Args:
            packed, format, max_len: as above.
            overrides: fields that replace those of its config.json.

        Raises:
            ModelNotFoundError: the configuration or the weights cannot be read.
            UnsupportedModelError: it is not a decoder-only language model that both transformers and Octavo can run.
            CorruptModelError: weights are missing from the checkpoint.
        """
        import transformers

        if not (Path(folder) / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} holds no config.json")
        _register_attention()
        try:
            raw = merged(read_json(Path(folder) / "config.json") or {}, overrides or {})
            if overrides:
                config = transformers.AutoConfig.for_model(**raw)
            else:
                config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
            if model_class is None:  # a wrapper around a text model, which serves text alone
                model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
            if model_class is None:
                raise UnsupportedModelError(f"{type(config).__name__}: transformers has no causal language model of it")
            _refuse_unsupported(model_class, config)
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                output_loading_info=True,
                # Reading pickled weights could run code.
                use_safetensors=True,
                trust_remote_code=False,
            )
        except OSError as error:
            raise ModelNotFoundError(f"{folder}: {error}") from error
        except (ImportError, RuntimeError) as error:  # of packages or devices that a quantisation method needs
            raise UnsupportedModelError(f"{folder}: transformers cannot load it here: {error}") from error
        except ValueError as error:
            if "trust_remote_code" in str(error):
                raise UnsupportedModelError(
                    f"{folder} brings code of its own (auto_map in config.json), which Octavo does not run: use a "
                    "model whose architecture transformers itself has"
                ) from error
            raise UnsupportedModelError(f"{folder}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise UnsupportedModelError(f"{folder}: transformers cannot read its configuration: {error!r}") from error
        if missing := sorted(report["missing_keys"]):
            raise CorruptModelError(
                f"{model_class.__name__}: {len(missing)} tensors are missing from {folder}, the first is {missing[0]!r}"
            )
        _drop_encoders(model)
        return cls(model.to(device), packed=packed, format=format, max_len=max_len)

    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
    ) -> tuple[torch.Tensor, LaterRows]:
        """See `CausalLM.forward_in_part`."""
        kept: list[Any] = []
        hook = self._model.get_decoder().register_forward_hook(lambda module, inputs, output: kept.append(output))
        try:
            step = _Step(self._layer_of, batch, kv, attention)
            logits = _run(self._model, step, token_ids, batch.positions, logits_indices[:num_now]).float()
        finally:
            hook.remove()
        hidden, output_type = kept[0].last_hidden_state[0], type(kept[0])
        return logits, LaterRows(
            logits=lambda first, last: self._head(hidden[logits_indices[first:last]], output_type),
            hidden=lambda first, last: hidden[logits_indices[first:last]].float(),
        )

    def _head(self, hidden: torch.Tensor, output_type: Any) -> torch.Tensor:
        """Return the logits of rows of the decoder's hidden states.

        Classes differ in what they do to them and to the logits. So the model runs as always, but its decoder
        returns these rows.
        """
        decoder, rows = self._model.get_decoder(), torch.arange(len(hidden), device=hidden.device)
        decoder.forward = lambda *_, **__: output_type(last_hidden_state=hidden[None])
        try:
            output = self._model(
                input_ids=torch.zeros_like(rows)[None],
                position_ids=rows[None],
                use_cache=False,
                logits_to_keep=rows,
                return_dict=True,
            )
        finally:
            del decoder.forward
        logits: torch.Tensor = output.logits[0].float()
        return logits


class _Attention(Protocol):
    """The implementation behind a layer's attention call: a step over blocks, or the probe."""

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        """Attend with query, key, value [num_tokens, heads, dim]; returns [num_tokens, num_heads, value_dim]."""

    def mask(self, mask_function: Callable[..., torch.Tensor], length: int) -> torch.Tensor | None:
        """Return the mask over `length` tokens for the layers of one kind."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The remaining arguments of one attention call."""

    mask: torch.Tensor | None
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step over block tables. `layer_of` maps id(attention module) to its index in `kv`."""

    layer_of: dict[int, int]
    batch: AttentionBatch
    kv: Sequence[LayerKV]
    attention: AttentionBackend

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        kv = self.kv[self.layer_of[id(module)]]
        self.attention.write(kv, key, value, self.batch)
        return self.attention.attend(kv, query, self.batch, scale=call.scale, softcap=call.softcap, sinks=call.sinks)

    def mask(self, mask_function: Callable[..., torch.Tensor], length: int) -> torch.Tensor | None:
        return None


@dataclass(slots=True)
class _Probe:
    """Learns each layer's shapes and window from one forward pass over a few tokens."""

    model_name: str
    max_positions: int
    layers: list[LayerKVSpec] = field(default_factory=list)
    layer_of: dict[int, int] = field(default_factory=dict)

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: _Call
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

    def _window(self, call: _Call, place: str) -> int | None:
        """Return the layer's window, from its mask if there is one, else from its arguments."""
        if call.mask is None:
            window = call.arguments.get("sliding_window")
            return window if window is not None and window < self.max_positions else None
        if call.mask.dtype is not torch.int64:
            raise UnsupportedModelError(f"{place}: it brings a mask of its own, which block tables cannot honour")
        return int(call.mask.flatten()[0]) or None


_current: ContextVar[_Attention] = ContextVar("_current")


def _run(
    model: Any, attention: _Attention, token_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor
) -> torch.Tensor:
    """Run a forward pass whose layers attend through `attention`; returns logits [rows, vocab_size]."""
    token = _current.set(attention)
    try:
        output = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
            return_dict=True,
        )
    finally:
        _current.reset(token)
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
    attention = _current.get(None)
    if attention is None:
        raise OctavoError(f"{type(module).__name__} was called outside of a step")
    call = _Call(
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
    attention = _current.get(None)
    return None if attention is None else attention.mask(mask_function, q_length)


def _register_attention() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _paged_attention)
    AttentionMaskInterface.register(_ATTENTION, _mask)


def _probe(model: Any, max_positions: int) -> _Probe:
    name = type(model).__name__
    probe = _Probe(name, max_positions)
    token_ids = torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    with torch.inference_mode():
        _run(model, probe, token_ids, positions, positions)
    if not probe.layers:
        raise UnsupportedModelError(f"{name}: its layers do not attend through transformers' AttentionInterface")
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(probe.layers) < expected:
        raise UnsupportedModelError(f"{name}: only {len(probe.layers)} of its {expected} layers are attention layers")
    return probe


def _refuse_unsupported(model_class: Any, config: Any) -> None:
    """Refuse unsupported configurations before the weights are read.

    Raises:
        UnsupportedModelError: the model is not supported; the message has its class and the reason.
    """
    text_config = config.get_text_config(decoder=True)
    reason = None
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    ropes = {str(value.get("rope_type")) for value in nested}
    attends = bool(layer_types) and layer_types <= {"full_attention", "sliding_attention"}
    if config.is_encoder_decoder or getattr(text_config, "add_cross_attention", False):
        reason = "an encoder's states do not live in blocks"
    elif getattr(model_class, "_is_stateful", False) and not attends:
        reason = "it carries a recurrent state, which blocks of keys and values do not hold"
    elif unknown := layer_types - {"full_attention", "sliding_attention"}:
        reason = f"layers of type {min(unknown)!r} are not supported"
    elif not model_class._can_set_attn_implementation():
        reason = "its layers do not attend through transformers' AttentionInterface"
    elif "position_ids" not in inspect.signature(model_class.forward).parameters:
        reason = "it counts positions by itself, and takes none for tokens in the middle of a sequence"
    elif moving := ropes & {"dynamic", "longrope"}:
        reason = f"RoPE scaling {min(moving)!r} of single kinds of layers changes with the length of the batch"
    if reason is not None:
        raise UnsupportedModelError(f"{model_class.__name__}: {reason}")


def _fix_frequencies(model: Any, max_len: int) -> None:
    """Choose RoPE's frequencies by the longest sequence that is served, where they would change with the batch's.

    Keys in the cache are rotated already, so one sequence cannot change its frequencies.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) in ("longrope", "dynamic"):
            frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[module.rope_type](
                module.config, module.inv_freq.device, seq_len=max_len
            )
            module.inv_freq.copy_(frequencies)
            module.rope_type = "default"


def _drop_encoders(model: Any) -> None:
    """Free the parts of a wrapper that read images and sounds."""
    for name, _ in list(model.base_model.named_children()):
        if name in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower"):
            setattr(model.base_model, name, None)


def _eos_token_ids(*configs: Any) -> frozenset[int]:
    ids: set[int] = set()
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
