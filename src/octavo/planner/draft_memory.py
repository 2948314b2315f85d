"""The options and the memory of a draft model: the same when it is loaded and when a deployment is planned."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.model_shape import ModelShape
from octavo.planner.sizing import Sizing

# Drafts are for sequences of up to so many tokens, and for so many sequences at once that their tokens fit together.
_CACHE_TOKENS = 16_384
_MAX_NUM_SEQS = 64
_BLOCK_SIZE = 16
# Tokens that it computes in a step, while it catches up with a prompt.
_MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of a draft model, in bytes."""

    weights: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache


NO_DRAFT_MODEL = DraftMemory(0, 0, 0)


def draft_config(config: EngineConfig, model: str, shape: ModelShape, longest: int) -> EngineConfig:
    """Return the options of a draft model with this shape, for an engine with `config`.

    Args:
        longest: the engine's longest sequence, in tokens.
    """
    max_model_len = min(shape.config.max_position_embeddings, _CACHE_TOKENS - _BLOCK_SIZE, longest)
    max_num_seqs = min(config.max_num_seqs, _MAX_NUM_SEQS)
    num_tokens = min(_CACHE_TOKENS, max_num_seqs * (max_model_len + _BLOCK_SIZE))
    num_groups = len(KVCacheSpec.build(shape.kv_layers, _BLOCK_SIZE, "bfloat16").groups)
    return EngineConfig(
        model=model,
        hf_token=config.hf_token,
        max_model_len=max_model_len,
        dtype=config.dtype,
        num_blocks=1 + num_groups * (num_tokens // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(_MAX_NUM_BATCHED_TOKENS, max_num_seqs),
        preemption_mode="recompute",
        enable_prefix_caching=False,
        device=config.device,
        attention_backend=config.attention_backend,
        num_threads=config.num_threads,
        cpu_list=config.cpu_list,
    )


def draft_memory(config: EngineConfig, longest: int, dtype: str, *, on_cpu: bool, available: int) -> DraftMemory:
    """Return what the draft model of an engine with these options takes, zeros without one.

    Args:
        longest: the engine's longest sequence, in tokens.
        available: bytes of the device.

    Raises:
        ModelError, ConfigError: it cannot be found or counted, or does not fit.
    """
    if (name := config.draft_model) is None:
        return NO_DRAFT_MODEL
    # Imported here: it needs numpy, which most plans do without.
    from octavo.planner.sources import find_shape

    shape = find_shape(name)
    sizing = Sizing(
        config=draft_config(config, name, shape, longest),
        shape=shape,
        dtype=dtype,
        available=available,
        cache_share=1.0,
        loaded_weights=shape.packed_bytes if on_cpu and dtype != "float32" else None,
        host_available=None if on_cpu else available,
    )
    return DraftMemory(sizing.budget.weights, sizing.activations, sizing.pool().num_bytes)
