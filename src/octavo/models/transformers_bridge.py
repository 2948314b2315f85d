"""The bridge to transformers, which runs other decoder-only architectures with Octavo's attention.

Importing transformers takes seconds, so it happens in the functions that need it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.checkpoint.hf_config import merged, read_json
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.base import CausalLM, LaterRows
from octavo.models.fused_modules import FusedLayers, fuse_modules
from octavo.models.packed_modules import OnlineFormat, can_pack, pack_modules
from octavo.models.transformers_attention import ATTENTION, PagedStep, probe_layers, register_attention, run_through
from octavo.storage.layer_kv import LayerKV

logger = logging.getLogger(__name__)

# Rows up to which torch's operations take one thread. More threads spin after each of these short operations, on cores
# that the kernels' threads need: with 8 rows, a step took three times the processor time.
_FEW_ROWS = 64


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
        register_attention()
        _refuse_unsupported(type(model), model.config)
        model.set_attn_implementation(ATTENTION)
        self._model = model.eval()
        # ModernBERT calls its head the decoder.
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        self._decoder = model.base_model if decoder is head else decoder
        self.dtype = model.dtype
        self.device = model.device
        self._packed = packed and can_pack(model)
        self._fused = FusedLayers()
        text_config = model.config.get_text_config(decoder=True)
        self.architecture = type(model).__name__
        self.vocab_size = text_config.vocab_size
        self.max_position_embeddings = text_config.max_position_embeddings
        _fix_frequencies(model, max_len or self.max_position_embeddings)
        self.eos_token_ids = _eos_token_ids(model.generation_config, text_config)
        if self._packed:
            try:
                self._fused = fuse_modules(model, self.max_position_embeddings, format)
            except Exception as error:  # the model's own code, for inputs that it may not expect
                logger.warning("%s: some modules run slower than they could: %r", self.architecture, error)
            pack_modules(model, format)
        probe = probe_layers(model, self.max_position_embeddings)
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
        from huggingface_hub.errors import StrictDataclassError
        from transformers.quantizers.auto import AutoHfQuantizer

        if not (Path(folder) / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} has no config.json")
        register_attention()
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
                name = type(config).__name__
                raise UnsupportedModelError(f"{name}: transformers has no causal language model for it")
            _refuse_unsupported(model_class, config)
            quantization = raw.get("quantization_config")
            # transformers would take the stored numbers for the weights.
            if quantization and not AutoHfQuantizer.supports_quant_method(quantization):
                raise UnsupportedModelError(
                    f"{folder}: transformers cannot read weights quantised by {quantization.get('quant_method')!r}"
                )
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION,
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
        except (StrictDataclassError, KeyError, TypeError, AttributeError) as error:
            problem = str(error) if isinstance(error, StrictDataclassError) else repr(error)
            if isinstance(error, KeyError):
                problem = f"transformers does not know {error}, or needs a field of that name"
            raise UnsupportedModelError(f"{folder}: transformers cannot read its configuration: {problem}") from error
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
        threads = torch.get_num_threads()
        if self._packed and (self._fused.all or len(token_ids) <= _FEW_ROWS):
            torch.set_num_threads(1)
        hook = self._decoder.register_forward_hook(lambda module, inputs, output: kept.append(output))
        try:
            rows = logits_indices if self._fused.keep_rows else None
            step = PagedStep(self._layer_of, batch, kv, attention, rows)
            now = logits_indices[:num_now] if rows is None else torch.arange(num_now)
            logits = run_through(self._model, step, token_ids, batch.positions, now).float()
        finally:
            hook.remove()
            torch.set_num_threads(threads)
        hidden, output_type = kept[0].last_hidden_state[0], type(kept[0])
        places = logits_indices if rows is None else torch.arange(len(rows))
        return logits, LaterRows(
            logits=lambda first, last: self._head(hidden[places[first:last]], output_type),
            hidden=lambda first, last: hidden[places[first:last]].float(),
        )

    def _head(self, hidden: torch.Tensor, output_type: Any) -> torch.Tensor:
        """Return the logits of rows of the decoder's hidden states.

        Classes differ in what they do to them and to the logits. So the model runs as always, but its decoder
        returns these rows.
        """
        decoder, rows = self._decoder, torch.arange(len(hidden), device=hidden.device)
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
