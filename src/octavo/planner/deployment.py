"""The memory of a deployment: one model with one set of options of `octavo plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.checkpoint.share import Share
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.calculator import (
    WEIGHT_BITS,
    MemoryBudget,
    PoolSize,
    SequenceCost,
    block_tokens,
    counted_dtype,
    weight_bytes,
)
from octavo.planner.draft_memory import DraftMemory, draft_memory
from octavo.planner.machine import CPU_MEMORY_SHARE
from octavo.planner.model_shape import ModelShape, divide
from octavo.planner.plan_options import DEFAULT_MAX_NUM_SEQS, PlanOptions
from octavo.planner.sizing import UNLIMITED, Sizing

_AS_STORED = "the GGUF file's"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model with one set of options. Bytes are per device, unless a name says otherwise.

    Raises:
        ConfigError: the context exceeds max_model_len, max_model_len exceeds what the model supports, or the ranks of a
            CPU cannot share the model.
        UnsupportedModelError: there are more devices than query heads.
    """

    model: ModelShape
    options: PlanOptions

    def __post_init__(self) -> None:
        limit, budget = self.model.config.max_position_embeddings, self.kv_budget
        if (budget is None or not budget.slides) and self.max_model_len > limit:
            raise ConfigError(f"max_model_len is {self.max_model_len}, but {self.model.name} supports at most {limit}")
        if self.context > self.max_model_len:
            raise ConfigError(
                f"a context of {self.context} tokens is over max_model_len, which is {self.max_model_len} "
                f"({self.model.name} supports at most {limit})"
            )
        least = 2 * block_tokens(self.options.block_size, self.max_model_len)
        if budget is not None and not least <= budget.tokens <= limit:
            raise ConfigError(
                f"kv_budget keeps {budget.tokens} tokens; it may keep from {least}, two blocks, to {limit}, the "
                f"context of {self.model.name}"
            )
        divide(self.model, self.options.tensor_parallel_size)
        if self.options.device == "cpu":
            Share(self.model.config, count=self.options.tensor_parallel_size)

    @property
    def kv_budget(self) -> KVBudget | None:
        return None if self.options.kv_budget is None else KVBudget.parse(self.options.kv_budget)

    @property
    def shape(self) -> ModelShape:
        """The part of the model that one device holds."""
        return divide(self.model, self.options.tensor_parallel_size)

    @property
    def dtype(self) -> str:
        return counted_dtype(self.options.dtype)

    @property
    def kv_dtype(self) -> str:
        return self.model.kv_dtype(self.options.kv_cache_dtype, self.dtype)

    @property
    def max_model_len(self) -> int:
        return self.options.max_model_len or self.model.config.max_position_embeddings

    @property
    def context(self) -> int:
        return self.options.context or self.max_model_len

    @property
    def sizing(self) -> Sizing:
        """The same sizes that the engine would compute when it starts; the memory is unlimited if none is given."""
        on_cpu, config = self.options.device == "cpu", self._config
        return Sizing(
            config=config,
            shape=self.shape,
            dtype=self.dtype,
            available=self._available - self.draft_model.total,
            cache_share=CPU_MEMORY_SHARE if on_cpu else 1.0,
            loaded_weights=self.weights,
            host_available=None if on_cpu else UNLIMITED,
        )

    @property
    def draft_model(self) -> DraftMemory:
        """Memory of the draft model; zeros without one."""
        on_cpu = self.options.device == "cpu"
        return draft_memory(self._config, self.max_model_len, self.dtype, on_cpu=on_cpu, available=self._available)

    @property
    def _available(self) -> int:
        if self.options.memory is None:
            return UNLIMITED
        return int(self.options.memory * (1.0 if self.options.device == "cpu" else self.options.gpu_memory_utilization))

    @property
    def _config(self) -> EngineConfig:
        options = self.options
        size = options.kv_disk_size
        disk: dict[str, Any] = {"kv_disk": ".", "kv_disk_size": size} if size else {}
        return EngineConfig(
            model=self.model.name,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            speculative_config=options.speculative_config,
            swap_space=options.swap_space,
            kv_host_memory=options.kv_host_memory,
            kv_remote=options.kv_remote,
            kv_budget=options.kv_budget,
            **disk,
        )

    @property
    def spec(self) -> KVCacheSpec:
        return self.spec_of(self.kv_dtype, self.options.block_size)

    @property
    def cost(self) -> SequenceCost:
        return self.cost_of(self.spec)

    @property
    def weights(self) -> int:
        kind = self.weight_kind
        if kind == _AS_STORED:
            return -(-(self.model.packed_bytes or 0) // self.options.tensor_parallel_size)
        if kind != self.dtype:
            return int(self.shape.parameters.total * WEIGHT_BITS[kind] / 8)
        # With the compiled kernels a tied head is multiplied from the embedding itself.
        return weight_bytes(self.shape, self.dtype, tied_head_copied=False)

    @property
    def weight_kind(self) -> str:
        options = self.options
        if options.weights != "auto":
            return str(options.weights)
        stays = options.device == "cpu" and self.dtype != "float32" and options.quantization != "none"
        if self.model.packed_bytes:
            return _AS_STORED if stays else self.dtype
        return options.quantization if stays and options.quantization != "auto" else self.dtype

    @property
    def max_num_seqs(self) -> int:
        return self.options.max_num_seqs or self.options.concurrency or DEFAULT_MAX_NUM_SEQS

    @property
    def budget(self) -> MemoryBudget | None:
        """The division of one device's memory; None if no memory is given."""
        return None if self.options.memory is None else self.sizing.budget

    @property
    def swap_bytes(self) -> int:
        """Bytes of host memory for swapped blocks; on a CPU, by default no more than the rest leaves."""
        fits = self.options.memory is not None and self.sequences_that_fit(self.cost)
        pool = (self.pool() if fits else None) or PoolSize(0, 0)
        return self.sizing.num_host_blocks(pool) * self.spec.block_bytes

    @property
    def cache_bytes(self) -> int | None:
        """Bytes for the KV cache; None if neither these nor the device's memory are given."""
        if self.options.kv_cache_memory is not None:
            return self.options.kv_cache_memory
        return None if self.budget is None else self.budget.for_cache

    @property
    def concurrency(self) -> int:
        if self.options.concurrency is not None:
            return self.options.concurrency
        return max(1, self.sequences_that_fit(self.cost))

    def sequences_that_fit(self, cost: SequenceCost) -> int:
        """Number of sequences of `context` tokens that fit in the KV cache; 0 if no memory is given."""
        return cost.sequences_in((self.cache_bytes or 0) // cost.spec.block_bytes - 1)

    def pool(self) -> PoolSize | None:
        """The pool that the engine would allocate in the given memory; None if none is given.

        Raises:
            ConfigError: not even the smallest pool fits.
        """
        return None if self.cache_bytes is None else self.sizing.pool_within(self.cache_bytes)

    @property
    def published_weights(self) -> str | None:
        """The kind of the checkpoint's weights if they are counted in another one without being asked to."""
        return self.model.published_weights if self.options.weights == "auto" else None

    def together(self, num_bytes: int) -> int:
        """Return the bytes of keys and values on all devices, if the last has `num_bytes`."""
        stored = max(self.model.num_kv_heads, self.options.tensor_parallel_size)
        return num_bytes * stored // self.shape.num_kv_heads

    def spec_of(self, dtype: str, block_size: int | str) -> KVCacheSpec:
        """Return the layout of one device's cache in another format or block size."""
        size = block_tokens(block_size, self.max_model_len)
        budget = self.kv_budget if dtype == self.kv_dtype else None  # a codec to compare with may not go with it
        return KVCacheSpec.build(self.shape.kv_layers, size, dtype, budget)

    def cost_of(self, spec: KVCacheSpec, num_tokens: int | None = None) -> SequenceCost:
        """Return what a sequence of `num_tokens` takes; of `context` if None."""
        budget = self.kv_budget
        if budget is not None and budget.tokens < 2 * spec.block_size:
            budget = None  # a contiguous allocator keeps everything
        return SequenceCost.of(spec, num_tokens or self.context, self.options.max_num_batched_tokens, budget)
