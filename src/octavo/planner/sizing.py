"""Division of a device's memory by an engine; checks that its options fit, and suggests ones that do."""

from __future__ import annotations

import logging
import shlex
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.config import SERVER_DEFAULTS, EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec, eviction_bytes
from octavo.option import options_of
from octavo.planner.calculator import (
    MemoryBudget,
    PoolSize,
    activation_bytes,
    block_tokens,
    default_swap_space,
    pool_for_memory,
    prefix_slots,
    smallest_pool,
    store_bytes,
    weight_bytes,
)
from octavo.planner.model_shape import ModelShape, layers_of_rank
from octavo.units import format_bytes

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 62
"""Bytes of memory that is not limited."""

# How far a suggestion goes down: below these a service is of little use.
_LEAST_STEP = 16
_LEAST_MODEL_LEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Divides a device's memory with given options, for an engine that starts, is planned or is simulated.

    Attributes:
        shape: shape of the model; once it is loaded, with the loaded model's own `kv_layers`.
        dtype: the resolved type of weights and activations.
        available: bytes for weights, activations and cache together, before any of them is allocated.
        cache_share: see MemoryBudget.
        host_available: bytes for the swap space if the device has its own memory; None if it comes from `available`.
        tied_head_copied: see `weight_bytes`.
        loaded_weights: bytes of the weights, once they are loaded.

    Raises:
        ConfigError: max_model_len exceeds what the model supports.
    """

    config: EngineConfig
    shape: ModelShape
    dtype: str
    available: int
    cache_share: float
    tied_head_copied: bool = False
    loaded_weights: int | None = None
    host_available: int | None = None

    def __post_init__(self) -> None:
        limit, budget = self.shape.config.max_position_embeddings, self.config.budget
        if budget is not None and budget.tokens > limit:
            raise ConfigError(
                f"kv_budget keeps {budget.tokens} tokens, but {self.config.model} supports a context of {limit}"
            )
        if budget is not None and not budget.slides and (self.on_gpu or self.config.num_ranks > 1):
            raise ConfigError(f"kv_budget of mode {budget.mode} needs a CPU, and tensor_parallel_size 1")
        if (budget is None or not budget.slides) and self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but {self.config.model} supports at most {limit} tokens"
            )

    @property
    def on_gpu(self) -> bool:
        return self.host_available is not None

    @property
    def kv_dtype(self) -> str:
        return self.shape.kv_dtype(self.config.kv_cache_dtype, self.dtype)

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or self.shape.config.max_position_embeddings

    @property
    def spec(self) -> KVCacheSpec:
        """The spec of this machine's part of whole blocks, in which a KV head counts as often as ranks store it."""
        ranks = [self.rank_spec(rank) for rank in range(self.config.num_ranks)]
        if len(ranks) == 1:
            return ranks[0]
        if any(spec.groups != ranks[0].groups for spec in ranks):
            raise ConfigError(
                f"tensor_parallel_size is {len(ranks)}, but with kv_cache_dtype {self.kv_dtype} the layers of "
                f"{self.config.model} would be grouped differently in each rank: use another kv_cache_dtype"
            )
        layers = tuple(
            replace(layers[0], num_kv_heads=sum(layer.num_kv_heads for layer in layers))
            for layers in zip(*(ranks[own].layers for own in self.config.own_ranks), strict=True)
        )
        own_bytes = sum(ranks[own].block_bytes for own in self.config.own_ranks)
        return replace(ranks[0], layers=layers, block_bytes=own_bytes)

    def rank_spec(self, rank: int) -> KVCacheSpec:
        """Return the spec of a rank's share of each block."""
        size, count = block_tokens(self.config.block_size, self.max_model_len), self.config.num_ranks
        layers = layers_of_rank(self.shape.kv_layers, rank, count)
        return KVCacheSpec.build(layers, size, self.kv_dtype, self.config.budget)

    @property
    def budget(self) -> MemoryBudget:
        weights = self.loaded_weights
        if weights is None:
            weights = weight_bytes(self.shape, self.dtype, tied_head_copied=self.tied_head_copied)
        return MemoryBudget(
            self.available,
            weights,
            self.activations,
            self.cache_share,
            self.swap_set_aside + self.prefixes_set_aside,
        )

    @property
    def activations(self) -> int:
        """The bytes of activations; each rank has its own, and those that ranks exchange are in memory twice."""
        return len(self.config.own_ranks) * activation_bytes(
            self.shape,
            self.dtype,
            max_step=self.config.max_num_batched_tokens,
            max_rows=self.config.max_num_seqs,
            gpu_context=None if self.host_available is None else self.max_model_len,
        )

    @property
    def swap_set_aside(self) -> int:
        """The bytes of `available` for a swap space that was asked for."""
        return 0 if self.host_available is not None else self._wanted_swap or 0

    @property
    def prefixes_set_aside(self) -> int:
        """The bytes of `available` for prefixes in host memory."""
        return 0 if self.host_available is not None else self.config.kv_host_memory

    def pool(self) -> PoolSize:
        """Return the pool to allocate.

        Raises:
            ConfigError: weights, activations, cache and swap space do not fit; the message lists them, with a command
                that would start.
        """
        spec, left = self.spec, self.budget.left
        least = smallest_pool(spec).num_bytes
        if self.config.num_blocks is not None:
            pool = PoolSize(self.config.num_blocks, self.config.num_blocks * spec.block_bytes)
        elif self.config.kv_cache_memory is not None:
            pool = self.pool_within(self.config.kv_cache_memory)
        elif left < least:
            raise self._too_little(least, "at least ")
        else:
            # Where the cache's share is too small to serve a token, it takes more than that.
            pool = self.pool_within(max(self.budget.for_cache, least))
        if pool.num_bytes > left:
            raise self._too_little(pool.num_bytes)
        return pool

    def bookkeeping_bytes(self, pool: PoolSize) -> int:
        """Return the host memory of the bookkeeping of pool and stores; default swap space leaves room for it."""
        return pool.num_blocks * self.block_bookkeeping_bytes + self.store_bytes

    @property
    def block_bookkeeping_bytes(self) -> int:
        return self.spec.bookkeeping_bytes + eviction_bytes(self.config.eviction_policy)

    @property
    def store_bytes(self) -> int:
        """The host memory that the stores take in addition to `kv_host_memory`."""
        config = self.config
        disk_size = 0 if config.kv_disk is None else config.kv_disk_size
        num_remote = (config.kv_remote is not None) + (config.kv_neighbours is not None)
        return store_bytes(self.spec, disk_size, num_remote=num_remote, eviction_policy=config.eviction_policy)

    def num_host_blocks(self, pool: PoolSize) -> int:
        """Return the number of host-memory blocks to allocate for swapped sequences.

        Raises:
            ConfigError: the host has less memory than the requested swap space; the message has a command that would
                start.
        """
        if self.config.preemption_mode == "recompute":
            return 0
        shared = self.host_available is None
        left = (
            self.budget.left - pool.num_bytes
            if self.host_available is None
            else self.host_available - self.config.kv_host_memory
        )
        left = max(0, left - self.bookkeeping_bytes(pool))
        wanted = self._wanted_swap
        if wanted is None:
            return min(left, self._default_swap) // self.spec.block_bytes
        if not shared and wanted > left:
            raise ConfigError(
                f"a swap space of {format_bytes(wanted)} was asked for, but {format_bytes(left)} of host memory are "
                f"available. {self._advice()}"
            )
        return wanted // self.spec.block_bytes

    def warn_if_swap_is_short(self, num_host_blocks: int) -> None:
        """Warn if the swap space is smaller than requested, or than the default."""
        if self.config.preemption_mode == "recompute" or self.config.swap_space == 0:
            return
        size = num_host_blocks * self.spec.block_bytes
        if num_host_blocks == 0:
            logger.warning(
                "no swap space: %s; preempted sequences will be recomputed",
                "no memory is left for it"
                if self._wanted_swap is None
                else f"{format_bytes(self._wanted_swap)} hold no block of {format_bytes(self.spec.block_bytes)}",
            )
        elif self._wanted_swap is None and size < self._default_swap:
            logger.warning(
                "swap space: %s instead of %s, because weights, activations and KV cache leave no more memory; "
                "a smaller --kv-cache-memory leaves more",
                format_bytes(size),
                format_bytes(self._default_swap),
            )

    @property
    def num_prefix_blocks(self) -> int:
        """Return the number of host-memory blocks to allocate for prefixes.

        Raises:
            ConfigError: the requested memory does not hold a block, or the host has less.
        """
        wanted = self.config.kv_host_memory
        assert isinstance(wanted, int)
        count = prefix_slots(self.spec, wanted, self.config.eviction_policy)
        if self.host_available is not None and wanted > self.host_available:
            raise ConfigError(
                f"kv_host_memory is {format_bytes(wanted)}, but {format_bytes(self.host_available)} of host memory are "
                "available"
            )
        return count

    @property
    def _wanted_swap(self) -> int | None:
        """Return the requested swap space in whole blocks; None for the default."""
        if self.config.preemption_mode == "recompute":
            return 0
        space = self.config.swap_space
        return space // self.spec.block_bytes * self.spec.block_bytes if isinstance(space, int) else None

    @property
    def _default_swap(self) -> int:
        return default_swap_space(self.config, self.spec, self.max_model_len)

    def warn_if_short(self, pool: PoolSize) -> None:
        """Warn if the pool is too small for a sequence of max_model_len tokens."""
        if (longest := self._longest(pool)) < self.max_model_len:
            logger.warning(
                "the KV cache (%s) fits a sequence of at most %d tokens, less than max_model_len (%d): longer requests "
                "are refused; give it more memory, or --max-model-len %d",
                format_bytes(pool.num_bytes),
                longest,
                self.max_model_len,
                longest,
            )

    def _longest(self, pool: PoolSize) -> int:
        """Return the length of the longest sequence that the pool can hold, up to max_model_len."""
        spec, step, kept = self.spec, self.config.max_num_batched_tokens, self.config.budget
        lengths = range(1, self.max_model_len + 1)
        return bisect_right(lengths, pool.usable_blocks, key=lambda length: spec.peak_blocks(length, step, kept))

    def _too_little(self, cache: int, qualifier: str = "") -> ConfigError:
        budget = self.budget
        total = budget.weights + budget.activations + cache + budget.swap
        swap = f", swap space {format_bytes(budget.swap - self.config.kv_host_memory)}" if budget.swap else ""
        if self.config.kv_host_memory:
            swap += f", prefixes in host memory {format_bytes(self.config.kv_host_memory)}"
        return ConfigError(
            f"{self.config.model} needs {format_bytes(total)}, but {format_bytes(self.available)} are available: "
            f"weights {format_bytes(budget.weights)}, "
            f"activations {format_bytes(budget.activations)} "
            f"({self.config.max_num_batched_tokens} tokens and {self.config.max_num_seqs} sequences a step), "
            f"KV cache {qualifier}{format_bytes(cache)}{swap}. {self._advice()}"
        )

    def _advice(self) -> str:
        for name, least in (("swap_space", None), ("kv_host_memory", 0)):
            if (config := self._with_less(name, least)) is not None:
                return f"This would start: {serve_command(config)}"
        for config in self._smaller():
            smaller = replace(self, config=config)
            cache = smaller.budget.for_cache
            if cache < smallest_pool(smaller.spec).num_bytes:
                continue
            if smaller._longest(smaller.pool_within(cache)) == smaller.max_model_len:
                return f"This would start: {serve_command(config)}"
        return (
            "No smaller length or batch fits with these weights: free memory, or use a smaller model "
            f"(`octavo plan {shlex.quote(self.config.model)}` says what this one needs)"
        )

    def _with_less(self, name: str, least: int | None) -> EngineConfig | None:
        """Return the options with as much host memory for `name` as fits, if that is enough of a change.

        Args:
            least: the option's smallest value.
        """
        if not getattr(self.config, name):
            return None
        without = replace(self, config=self.config.replace(**{name: least}))
        try:
            pool = without.pool()
        except ConfigError:
            return None
        left = without.budget.left - pool.num_bytes if self.host_available is None else self.host_available
        # A power of two: easily read, and what is free may be a little less by then.
        space = 1 << max(0, left.bit_length() - 1)
        return self.config.replace(**{name: space}) if space >= self.spec.block_bytes else None

    def pool_within(self, cache: int) -> PoolSize:
        """Return the pool for that many bytes; raises `ConfigError` if they hold no block."""
        return pool_for_memory(
            self.spec,
            cache,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
            max_step=self.config.max_num_batched_tokens,
        )

    def _smaller(self) -> Iterator[EngineConfig]:
        """Yield options that need less and less memory; for equal numbers of halvings, the longest sequences first."""
        # The cache's and the swap space's size are left to what there is.
        config = self.config.replace(kv_cache_memory=None, num_blocks=None, swap_space=None)
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
    """Return value, value / 2, … down to `least`; only the value itself if it is below."""
    values = [value]
    while values[-1] > least:
        values.append(max(least, values[-1] // 2))
    return values


def serve_command(config: EngineConfig) -> str:
    """Return the `octavo serve` command line for `config`, without the defaults of `LLM` and of a server."""
    implied = {"model": config.model, **SERVER_DEFAULTS}.items()
    changed = dict(item for item in config.changed().items() if item not in implied)
    flags = [argument for name, value in changed.items() for argument in options_of(EngineConfig)[name].argv(value)]
    return shlex.join(["octavo", "serve", config.model, *flags])
