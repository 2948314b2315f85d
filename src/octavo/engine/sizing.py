"""Divides the memory of the device between weights and cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.gguf_requantize import loaded_bytes
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.models.base import CausalLM
from octavo.models.linear import PackedLinear
from octavo.models.native_decoder import NativeDecoder
from octavo.planner.machine import CPU_MEMORY_SHARE, available_memory, limited_memory
from octavo.planner.model_shape import ModelShape, shape_of_checkpoint
from octavo.planner.sources import shape_of_source
from octavo.planner.startup import StartSizing


def size_before_loading(
    config: EngineConfig, source: ModelSource, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> StartSizing:
    """Compute the sizes from the configuration alone, so that a model that cannot fit is refused before it is loaded.

    Raises:
        ConfigError: max_model_len exceeds what the model supports, or there is too little memory.
    """
    on_cpu = device.type == "cpu"
    packed = PackedLinear.supports(torch.empty(0, dtype=dtype, device=device))
    native = model_config.runs_natively and NativeDecoder.supports(model_config, dtype, device)
    native = native and config.attention_backend not in ("reference", "triton")
    shape = _promised_shape(source, model_config)
    sizing = StartSizing(
        config=config,
        shape=shape,
        dtype=_name(dtype),
        kv_dtype=shape.kv_dtype(config.kv_cache_dtype, _name(dtype)),
        available=limited_memory(available_memory() if on_cpu else _available_on_gpu(config, device)),
        cache_share=CPU_MEMORY_SHARE if on_cpu else 1.0,
        tied_head_copied=model_config.runs_natively and packed and not native,
        loaded_weights=_stored_bytes(config, source, dtype) if native else None,
        host_available=None if on_cpu else limited_memory(available_memory()),
    )
    sizing.num_host_blocks(sizing.pool())
    return sizing


def size_loaded(sizing: StartSizing, config: EngineConfig, model: CausalLM) -> StartSizing:
    """Return the sizes with the actual memory of the loaded model."""
    shape = replace(sizing.shape, kv_layers=model.kv_layers, max_position_embeddings=model.max_position_embeddings)
    return replace(
        sizing,
        shape=shape,
        kv_dtype=shape.kv_dtype(config.kv_cache_dtype, _name(model.dtype)),
        loaded_weights=model.weight_bytes,
    )


def _stored_bytes(config: EngineConfig, source: ModelSource, dtype: torch.dtype) -> int | None:
    """Return the bytes of weights that stay quantised; None if they are dequantised."""
    if source.format is not ModelFormat.GGUF or config.quantization == "none" or dtype is torch.float32:
        return None
    return loaded_bytes(GGUFFile(source.path))


def _promised_shape(source: ModelSource, model_config: ModelConfig) -> ModelShape:
    try:
        return shape_of_source(source, model_config)
    except ModelError:
        # Leave it to the loader to refuse such a model; otherwise it is sized once it is loaded.
        return shape_of_checkpoint(source.name, model_config, 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _available_on_gpu(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1.0 - config.gpu_memory_utilization))
