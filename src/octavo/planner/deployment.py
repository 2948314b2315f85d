"""Plan the memory of a deployment: one model, one workload, one kind of device (`octavo plan`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from octavo.checkpoint.share import Share
from octavo.config import EngineConfig
from octavo.config_tables import SpeculativeConfig
from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import KVCacheSpec
from octavo.option import Options, option
from octavo.planner.calculator import (
    DTYPE_BYTES,
    WEIGHT_BITS,
    MemoryBudget,
    PoolSize,
    SequenceCost,
    block_tokens,
    weight_bytes,
    without_windows,
)
from octavo.planner.draft_memory import DraftMemory, draft_memory
from octavo.planner.machine import CPU_MEMORY_SHARE
from octavo.planner.model_shape import ModelShape, divide, even_groups
from octavo.planner.sizing import Sizing
from octavo.units import BYTES, format_bytes

_DEFAULT_MAX_NUM_SEQS = 256
_UNLIMITED = 1 << 62
# Nothing that is planned for has less memory: a number without a unit was meant as gigabytes.
_LEAST_MEMORY = 1 << 20
# Memory of an engine's process on a CPU without weights, activations and blocks (interpreter, libraries, tokenizer),
# and of its helper processes: 275 MiB, 88 MiB and 20 MiB, measured with SmolLM2-135M.
PROCESS_BYTES = (275 + 88 + 20) << 20
_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
# Formats of a cache whose users at once are compared for each context.
_COMPARED = ("fp8_e4m3", "int4")

# Kinds of weights that no loader of ours reads.
_NOT_LOADED = ("fp8", "int4")

_AS_STORED = "as in the GGUF file"

_option = partial(option, group="what is planned for")
_OF_ENGINE = {entry.name: entry for entry in fields(EngineConfig)}


def _shared(name: str) -> Any:
    """Declare an option as the engine does."""
    entry = _OF_ENGINE[name]
    return _option(entry.default, **{k: v for k, v in entry.metadata["option"].items() if k != "group"})


_size = partial(_option, unit=BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(Options):
    """The options of `octavo plan`; those shared with `octavo serve` mean the same there."""

    context: int | None = _option(None, "tokens of one sequence, prompt and output; default: --max-model-len", least=1)
    concurrency: int | None = _option(
        None, "number of such sequences at once; default: as many as --memory holds, at least 1", least=1
    )
    memory: int | None = _size(
        None,
        "memory of one device, such as 80GiB; default: that of this machine, or with --device: not limited",
        least=1,
    )
    device: Literal["cuda", "cpu"] = _option(
        "cuda", "cpu leaves much of the memory to other processes; default: this machine's, or with --memory: cuda"
    )
    tensor_parallel_size: int = _option(
        1,
        "number of devices that share the model, at most one per query head",
        least=1,
    )
    weights: Literal["auto", *WEIGHT_BITS] = _option(  # type: ignore[valid-type]
        "auto", "kind of weights to count without the file; auto: the file's, or --dtype"
    )
    quantization: Literal["auto", "none", "q8_0", "q4_0"] = _option(
        "auto",
        "auto: a GGUF file's weights stay quantised on a CPU; none: in --dtype; q8_0, q4_0: a folder's floats so",
    )
    dtype: Literal["auto", *DTYPE_BYTES] = _option(  # type: ignore[valid-type]
        "auto", "weights and activations; auto: bfloat16"
    )
    kv_cache_dtype: str = _shared("kv_cache_dtype")
    block_size: int | Literal["max"] = _shared("block_size")
    max_model_len: int | None = _option(
        None, "tokens that a contiguous allocator reserves for each sequence; default: the model's own limit", least=1
    )
    max_num_seqs: int | None = _option(
        None,
        f"maximum number of sequences in one step; default: --concurrency, or {_DEFAULT_MAX_NUM_SEQS} without it",
        least=1,
    )
    max_num_batched_tokens: int = _shared("max_num_batched_tokens")
    speculative_config: SpeculativeConfig | None = _shared("speculative_config")  # noqa: RUF009
    kv_budget: str | None = _shared("kv_budget")
    kv_cache_memory: int | None = _size(
        None, "memory for the KV cache of one device, such as 2GiB; default: what --memory leaves", least=1
    )
    gpu_memory_utilization: float = _shared("gpu_memory_utilization")
    swap_space: int | None = _shared("swap_space")
    kv_host_memory: int = _shared("kv_host_memory")
    kv_disk_size: int = _size(0, "size of --kv-disk, such as 20GiB; 0: none", least=0)
    kv_remote: str | None = _option(
        None, "Redis or Valkey that prefixes are shared in; not connected to", metavar="URL"
    )

    def _check_together(self) -> None:
        if self.weights != "auto" and self.quantization != "auto":
            raise ConfigError(f"weights {self.weights} and quantization {self.quantization} both choose the weights")
        for name in ("memory", "kv_cache_memory"):
            if isinstance(size := getattr(self, name), int) and size < _LEAST_MEMORY:
                raise ConfigError(f"{name} is {size} bytes; if you mean gigabytes, write {size}GiB")


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
        return "bfloat16" if self.options.dtype == "auto" else self.options.dtype

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
            kv_dtype=self.kv_dtype,
            available=self._available - self.draft_model.total,
            cache_share=CPU_MEMORY_SHARE if on_cpu else 1.0,
            tied_head_copied=False,
            loaded_weights=self.weights,
            host_available=None if on_cpu else _UNLIMITED,
        )

    @property
    def draft_model(self) -> DraftMemory:
        """What the draft model takes; zeros without one."""
        on_cpu = self.options.device == "cpu"
        return draft_memory(self._config, self.dtype, on_cpu=on_cpu, available=self._available)

    @property
    def _available(self) -> int:
        if self.options.memory is None:
            return _UNLIMITED
        return int(self.options.memory * (1.0 if self.options.device == "cpu" else self.options.gpu_memory_utilization))

    @property
    def _config(self) -> EngineConfig:
        options = self.options
        size = options.kv_disk_size
        disk: dict[str, Any] = {"kv_disk": ".", "kv_disk_size": size} if size else {}
        return EngineConfig(
            model=self.model.name,
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
        return self._spec(self.kv_dtype, self.options.block_size)

    @property
    def cost(self) -> SequenceCost:
        return self._cost(self.spec)

    @property
    def weights(self) -> int:
        kind = self._weight_kind
        if kind == _AS_STORED:
            return -(-(self.model.packed_bytes or 0) // self.options.tensor_parallel_size)
        if kind != self.dtype:
            return int(self.shape.parameters.total * WEIGHT_BITS[kind] / 8)
        # With the compiled kernels a tied head is multiplied from the embedding itself.
        return weight_bytes(self.shape, self.dtype, tied_head_copied=False)

    @property
    def _weight_kind(self) -> str:
        options = self.options
        if options.weights != "auto":
            return str(options.weights)
        stays = options.device == "cpu" and self.dtype != "float32" and options.quantization != "none"
        if self.model.packed_bytes:
            return _AS_STORED if stays else self.dtype
        return options.quantization if stays and options.quantization != "auto" else self.dtype

    @property
    def max_num_seqs(self) -> int:
        return self.options.max_num_seqs or self.options.concurrency or _DEFAULT_MAX_NUM_SEQS

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

    def report(self) -> dict[str, Any]:
        """Return the plan as `octavo plan --json` prints it.

        Byte counts are totals over all devices, except for keys that end in `_per_device`.
        """
        spec, cost, sizing = self.spec, self.cost, self.sizing
        concurrency = self.concurrency
        cache = cost.blocks_for(concurrency) * spec.block_bytes
        on_device = self.weights + sizing.activations + cache + spec.block_bytes
        on_device += sizing.swap_set_aside + sizing.prefixes_set_aside + self.draft_model.total
        process = PROCESS_BYTES if self.options.device == "cpu" else 0
        on_device += process + (sizing.store_bytes if self.options.device == "cpu" else 0)
        return {
            "model": self.model.name,
            "architecture": self.model.config.architecture,
            "parameters": self.model.parameters.total,
            "active_parameters": round(self.model.active_parameters),
            "layers": self.model.config.num_layers,
            "query_heads": self.model.num_heads,
            "kv_heads": self.model.num_kv_heads,
            "device": self.options.device,
            "tensor_parallel_size": self.options.tensor_parallel_size,
            "kv_heads_per_device": self.shape.num_kv_heads,
            "dtype": self.dtype,
            "weights": self._weight_kind,
            "published_weights": self._published_weights,
            "kv_cache_dtype": self.kv_dtype,
            "caches_latents": self.model.config.latent is not None,
            "max_model_len": self.max_model_len,
            "context": self.context,
            "concurrency": concurrency,
            "block_size": spec.block_size,
            "block_bytes_per_device": spec.block_bytes,
            "blocks_per_sequence": cost.blocks,
            "kv_bytes_per_token": self._together(spec.bytes_per_token),
            "kv_bytes_per_sequence": self._together(cost.num_bytes),
            "kv_bytes_total": self._together(cache),
            "kv_bytes_total_per_device": cache,
            "waste": round(cost.waste, 6),
            "weight_bytes": self.options.tensor_parallel_size * self.weights,
            "weight_bytes_per_device": self.weights,
            "activation_bytes_per_device": sizing.activations,
            "bookkeeping_bytes": cost.blocks_for(concurrency) * sizing.block_bookkeeping_bytes,
            "swap_bytes": self.swap_bytes,
            "swap_is_needed": sizing.swap_set_aside > 0,
            "host_prefix_bytes": sizing.config.kv_host_memory,
            "host_prefix_slots": sizing.num_prefix_blocks,
            "store_bytes": sizing.store_bytes,
            "draft_model_bytes": asdict(self.draft_model),
            "process_bytes": process,
            "memory_needed_per_device": on_device,
            "kv_groups": [
                {
                    "layers": len(group.layer_indices),
                    "sliding_window": group.sliding_window,
                    "sink_blocks": group.sink_blocks,
                    "int8_copies": group.in_int8,
                }
                for group in spec.groups
            ],
            "by_kv_dtype": {
                dtype: self._figures(self._spec(dtype, self.options.block_size), concurrency) for dtype in KV_FORMATS
            },
            # With max_model_len tokens reserved for each sequence.
            "contiguous": self._figures(self._spec(self.kv_dtype, "max"), concurrency),
            "sliding_window": self._sliding_window(),
            "memory": self._memory(),
            "notes": list(self._notes()),
        }

    @property
    def _published_weights(self) -> str | None:
        """The kind of the checkpoint's weights if they are counted in another one without being asked to."""
        return self.model.published_weights if self.options.weights == "auto" else None

    def _together(self, num_bytes: int) -> int:
        """Return the bytes of keys and values on all devices, if the last has `num_bytes`."""
        stored = max(self.model.num_kv_heads, self.options.tensor_parallel_size)
        return num_bytes * stored // self.shape.num_kv_heads

    def _spec(self, dtype: str, block_size: int | str) -> KVCacheSpec:
        size = block_tokens(block_size, self.max_model_len)
        budget = self.kv_budget if dtype == self.kv_dtype else None  # a codec to compare with may not go with it
        return KVCacheSpec.build(self.shape.kv_layers, size, dtype, budget)

    def _cost(self, spec: KVCacheSpec, num_tokens: int | None = None) -> SequenceCost:
        """Return what a sequence of `num_tokens` takes; of `context` if None."""
        budget = self.kv_budget
        if budget is not None and budget.tokens < 2 * spec.block_size:
            budget = None  # a contiguous allocator keeps everything
        return SequenceCost.of(spec, num_tokens or self.context, self.options.max_num_batched_tokens, budget)

    def _figures(self, spec: KVCacheSpec, concurrency: int) -> Mapping[str, Any]:
        """The bytes of the sequences in a cache of another codec or block size."""
        cost = self._cost(spec)
        figures: dict[str, Any] = {
            "kv_bytes_per_token": self._together(spec.bytes_per_token),
            "kv_bytes_per_sequence": self._together(cost.num_bytes),
            "kv_bytes_total": self._together(cost.blocks_for(concurrency) * spec.block_bytes),
            "waste": round(cost.waste, 6),
        }
        if self.cache_bytes is not None:
            figures["sequences_that_fit"] = self.sequences_that_fit(cost)
        return figures

    def _sliding_window(self) -> Mapping[str, Any] | None:
        """Memory saved by sliding windows compared with full attention; None if no layer has a window."""
        layers = self.shape.kv_layers
        windows = sorted({layer.sliding_window for layer in layers if layer.sliding_window is not None})
        if not windows:
            return None
        full = self._cost(KVCacheSpec.build(without_windows(layers), self.spec.block_size, self.kv_dtype))
        saved = full.num_bytes - self.cost.num_bytes
        return {
            "windows": windows,
            "layers": sum(layer.sliding_window is not None for layer in layers),
            "kv_bytes_per_sequence_without": self._together(full.num_bytes),
            "kv_bytes_saved_per_sequence": self._together(saved),
            "share_saved": round(saved / full.num_bytes, 6),
        }

    def _memory(self) -> Mapping[str, Any] | None:
        if self.cache_bytes is None:
            return None
        pool = self.pool() if self.sequences_that_fit(self.cost) else None
        figures: dict[str, Any] = {
            "memory_per_device": self.options.memory,
            "kv_cache_bytes_per_device": self.cache_bytes,
            "pool_blocks": pool.num_blocks if pool else 0,
            "pool_bytes_per_device": pool.num_bytes if pool else 0,
            "pool_bookkeeping_bytes": pool.num_blocks * self.sizing.block_bookkeeping_bytes if pool else 0,
            "sequences_that_fit": self.sequences_that_fit(self.cost),
        }
        figures["by_context"] = self._by_context()
        figures["longest_context"] = self._longest_context()
        if self.options.concurrency is not None:
            figures["fits"] = self.options.concurrency <= figures["sequences_that_fit"]
        figures["smallest_tensor_parallel_size"] = self._smallest_group()
        return figures

    def _by_context(self) -> list[dict[str, Any]]:
        """The number of users that fit, by context, up to the longest: with this cache, and in other formats."""
        contexts = [context for context in _CONTEXTS if context < self.max_model_len] + [self.max_model_len]
        specs = {dtype: self._spec(dtype, self.options.block_size) for dtype in (self.kv_dtype, *_COMPARED)}
        return [
            {
                "context": context,
                "sequences_that_fit": self.sequences_that_fit(self._cost(self.spec, context)),
                "by_kv_dtype": {n: self.sequences_that_fit(self._cost(spec, context)) for n, spec in specs.items()},
            }
            for context in contexts
        ]

    def _longest_context(self) -> int:
        """The longest context at which `concurrency` sequences (default: 1) fit; 0: not one token fits."""
        wanted, spec, lengths = self.options.concurrency or 1, self.spec, range(1, self.max_model_len + 1)
        return bisect_left(lengths, True, key=lambda n: self.sequences_that_fit(self._cost(spec, n)) < wanted)

    def _smallest_group(self) -> int | None:
        """The smallest number of such devices that holds the workload; None if no possible number does."""
        for size in even_groups(self.model):
            options = replace(self.options, concurrency=self.concurrency, tensor_parallel_size=size)
            try:
                group = Deployment(self.model, options)
            except ConfigError:  # ranks of a CPU cannot share the model
                continue
            if group.sequences_that_fit(group.cost) >= self.concurrency:
                return size
        return None

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.model.notes)
        devices, kv_heads = self.options.tensor_parallel_size, self.model.num_kv_heads
        if devices > kv_heads:
            notes.append(f"each of the {kv_heads} KV heads is kept by {devices // kv_heads} of the {devices} devices")
        elif kv_heads % devices:
            notes.append(
                f"{kv_heads} KV heads are divided unevenly among {devices} devices: figures of one device are those of "
                f"the last, which has {self.shape.num_kv_heads}"
            )
        if (published := self._published_weights) is not None:
            as_published = f": --weights {published} counts it so" if published in WEIGHT_BITS else ""
            notes.append(f"weights are counted in {self.dtype}, but published in {published}{as_published}")
        if devices > 1 and self.options.device != "cpu":
            notes.append("for planning only: Octavo divides a model among several devices on CPUs alone")
        if (latent := self.model.config.latent) is not None and self.options.device != "cpu":
            per_token = self.model.num_heads * latent.expanded_dim * len(self.model.kv_layers) * 2
            notes.append(
                "for planning only: Octavo caches latents on CPUs alone; its cache on a GPU holds expanded keys and "
                f"values, {format_bytes(per_token)} a token in bfloat16"
            )
        if self.options.weights in _NOT_LOADED:
            notes.append(f"for planning only: Octavo does not load {self.options.weights} weights")
        if (budget := self.budget) is not None and budget.left < 0:
            notes.append(
                f"weights ({format_bytes(budget.weights)}), activations ({format_bytes(budget.activations)}) "
                f"and swap space with prefixes in host memory ({format_bytes(budget.swap)}) alone are over the "
                f"{format_bytes(budget.available)} that may be used of each device"
            )
        return tuple(notes)
