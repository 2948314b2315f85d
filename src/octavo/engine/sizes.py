"""The sizes of an engine: of its weights, cache and host memory, before the model is loaded and after."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.gguf_requantize import loaded_bytes
from octavo.checkpoint.model_source import ModelFormat, stored_format
from octavo.config import EngineConfig
from octavo.engine.model_loading import LoadTarget, dtype_name
from octavo.errors import ModelError
from octavo.models.base import CausalLM
from octavo.models.linear import PackedLinear
from octavo.planner.machine import CPU_MEMORY_SHARE, available_memory, limited_memory
from octavo.planner.model_shape import shape_of_checkpoint
from octavo.planner.sizing import Sizing
from octavo.planner.sources import shape_of_source


def size_before_loading(target: LoadTarget, set_aside: int) -> Sizing:
    """Compute the sizes from the configuration alone, so that a model that cannot fit is refused before it is loaded.

    Raises:
        ConfigError: max_model_len exceeds what the model supports, or there is too little memory.
    """
    config, native = target.config, target.runs_on_kernels
    packed = PackedLinear.supports(torch.empty(0, dtype=target.dtype, device=target.device))
    try:
        shape = shape_of_source(target.source, target.model)
    except ModelError:
        # Leave it to the loader to refuse such a model; otherwise it is sized once it is loaded.
        shape = shape_of_checkpoint(target.source.name, target.model, 0)
    sizing = Sizing(
        config=config,
        shape=shape,
        dtype=dtype_name(target.dtype),
        available=limited_memory(
            available_memory() - set_aside if target.on_cpu else _available_on_gpu(config, target.device)
        ),
        cache_share=CPU_MEMORY_SHARE if target.on_cpu else 1.0,
        tied_head_copied=target.model.runs_natively and packed and not native,
        loaded_weights=_stored_bytes(target) if native else None,
        host_available=None if target.on_cpu else limited_memory(available_memory()),
    )
    sizing.num_host_blocks(sizing.pool())
    return sizing


def size_loaded(sizing: Sizing, config: EngineConfig, model: CausalLM, weight_bytes: int) -> Sizing:
    """Return the sizes with the actual memory of the loaded model."""
    kv_layers = model.kv_layers if config.num_ranks == 1 else sizing.shape.kv_layers
    whole = replace(sizing.shape.config, max_position_embeddings=model.max_position_embeddings)
    shape = replace(sizing.shape, kv_layers=kv_layers, config=whole)
    return replace(sizing, shape=shape, dtype=dtype_name(model.dtype), loaded_weights=weight_bytes)


def _stored_bytes(target: LoadTarget) -> int | None:
    """Return the bytes of weights that stay quantised; None if they are dequantised."""
    config, source = target.config, target.source
    if config.quantization == "none" or target.dtype is torch.float32:
        return None
    if source.format is not ModelFormat.GGUF:
        # The kernels' formats take up to a fifth more than the file; the loaded model is counted exactly.
        files = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
        share = {"q8_0": 0.55, "q4_0": 0.3}.get(config.quantization, 1.2)
        return int(files * share) if share < 1 or stored_format(source) != "none" else None
    return loaded_bytes(GGUFFile(source.path))


def _available_on_gpu(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1.0 - config.gpu_memory_utilization))
