"""Whether an engine's options fit its device's memory, and what would fit if they do not."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from octavo.config import EngineConfig, format_bytes
from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.calculator import (
    MemoryBudget,
    PoolSize,
    activation_bytes,
    block_tokens,
    pool_for_memory,
    smallest_pool,
    weight_bytes,
)
from octavo.planner.model_shape import ModelShape

logger = logging.getLogger(__name__)

# How far a suggestion goes down: below these a service is of little use.
_LEAST_STEP = 16
_LEAST_MODEL_LEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSizing:
    """How an engine with these options divides its device's memory.

    Attributes:
        shape: of the model; `kv_layers` are replaced by the loaded model's own, where those are known.
        dtype, kv_dtype: what "auto" came to.
        available: bytes that weights, activations and cache may take together, before any of them is there.
        cache_share: see MemoryBudget.
        tied_head_copied: see `weight_bytes`.
        loaded_weights: bytes the weights really take, once they are loaded.

    Raises:
        ConfigError: max_model_len is over what the model was made for.
    """

    config: EngineConfig
    shape: ModelShape
    dtype: str
    kv_dtype: str
    available: int
    cache_share: float
    tied_head_copied: bool
    loaded_weights: int | None = None

    def __post_init__(self) -> None:
        if self.max_model_len > (limit := self.shape.max_position_embeddings):
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but {self.config.model} was made for {limit} tokens"
            )

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or self.shape.max_position_embeddings

    @property
    def spec(self) -> KVCacheSpec:
        size = block_tokens(self.config.block_size, self.max_model_len)
        return KVCacheSpec.build(self.shape.kv_layers, size, self.kv_dtype)

    @property
    def budget(self) -> MemoryBudget:
        weights = self.loaded_weights
        if weights is None:
            weights = weight_bytes(self.shape, self.dtype, tied_head_copied=self.tied_head_copied)
        return MemoryBudget(
            self.available,
            weights,
            activation_bytes(
                self.shape, self.dtype, max_step=self.config.max_num_batched_tokens, max_rows=self.config.max_num_seqs
            ),
            self.cache_share,
        )

    def pool(self) -> PoolSize:
        """The pool to allocate.

        Raises:
            ConfigError: weights, activations and cache do not fit; itemised, with a command that would start.
        """
        spec, left = self.spec, self.budget.left
        least = smallest_pool(spec).num_bytes
        if self.config.num_blocks is not None:
            pool = PoolSize(self.config.num_blocks, self.config.num_blocks * spec.block_bytes)
        elif isinstance(self.config.kv_cache_memory, int):
            pool = self._pool_within(self.config.kv_cache_memory)
        elif left < least:
            raise self._too_little(least, "at least ")
        else:
            # Where the cache's share is too small to serve a token, it takes more than that.
            pool = self._pool_within(max(self.budget.for_cache, least))
        if pool.num_bytes > left:
            raise self._too_little(pool.num_bytes)
        return pool

    def warn_if_short(self, pool: PoolSize) -> None:
        """Tell where no sequence can reach max_model_len, because the pool ends before."""
        if (longest := self._longest(pool)) < self.max_model_len:
            logger.warning(
                "the KV cache of %d blocks (%s) holds a sequence of at most %d tokens, not of max_model_len (%d): "
                "longer requests are refused; give it more memory, or say --max-model-len %d",
                pool.usable_blocks,
                format_bytes(pool.num_bytes),
                longest,
                self.max_model_len,
                longest,
            )

    def _longest(self, pool: PoolSize) -> int:
        """The longest sequence the pool holds, up to max_model_len."""
        spec, step = self.spec, self.config.max_num_batched_tokens
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if spec.peak_blocks(middle, step) <= pool.usable_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _too_little(self, cache: int, qualifier: str = "") -> ConfigError:
        budget = self.budget
        total = budget.weights + budget.activations + cache
        return ConfigError(
            f"{self.config.model} needs {format_bytes(total)}, but {format_bytes(self.available)} are available: "
            f"weights {format_bytes(budget.weights)}, "
            f"activations {format_bytes(budget.activations)} "
            f"({self.config.max_num_batched_tokens} tokens and {self.config.max_num_seqs} sequences a step), "
            f"KV cache {qualifier}{format_bytes(cache)}. {self._advice()}"
        )

    def _advice(self) -> str:
        for config in self._smaller():
            smaller = replace(self, config=config)
            cache = smaller.budget.for_cache
            if cache < smallest_pool(smaller.spec).num_bytes:
                continue
            if smaller._longest(smaller._pool_within(cache)) == smaller.max_model_len:
                return f"This would start: {serve_command(config)}"
        return (
            "No smaller length or batch fits beside the weights: free memory, or take a smaller model "
            f"(`octavo plan {shlex.quote(self.config.model)}` says what this one needs)"
        )

    def _pool_within(self, cache: int) -> PoolSize:
        return pool_for_memory(
            self.spec,
            cache,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
            max_step=self.config.max_num_batched_tokens,
        )

    def _smaller(self) -> Iterator[EngineConfig]:
        """Options that need less and less: after as many halvings, those first that keep the longest sequences."""
        # The cache's size is left to what there is.
        config = self.config.replace(kv_cache_memory=None, num_blocks=None)
        steps = _halvings(config.max_num_batched_tokens, _LEAST_STEP)
        seqs = _halvings(config.max_num_seqs, 1)
        lengths = _halvings(self.max_model_len, _LEAST_MODEL_LEN)
        narrower = max(len(steps), len(seqs))
        for total in range(narrower + len(lengths) - 1):
            for shorter in range(max(0, total - narrower + 1), min(total + 1, len(lengths))):
                yield config.replace(
                    max_num_batched_tokens=steps[min(total - shorter, len(steps) - 1)],
                    max_num_seqs=seqs[min(total - shorter, len(seqs) - 1)],
                    max_model_len=lengths[shorter] if shorter else config.max_model_len,
                )


def _halvings(value: int, least: int) -> list[int]:
    """value, value / 2, … down to `least`; the value alone where it is below that."""
    values = [value]
    while values[-1] > least:
        values.append(max(least, values[-1] // 2))
    return values


def serve_command(config: EngineConfig) -> str:
    """The `octavo serve` command line that says `config`, with what is default left unsaid."""
    argv = ["octavo", "serve", config.model]
    defaults = EngineConfig()
    for option in fields(config):
        value: Any = getattr(config, option.name)
        if option.name == "model" or value == getattr(defaults, option.name):
            continue
        flag = option.name.replace("_", "-")
        argv += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(argv)
