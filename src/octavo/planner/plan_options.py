"""The options of `octavo plan`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.config_tables import SpeculativeConfig
from octavo.errors import ConfigError
from octavo.option import Options, option
from octavo.planner.calculator import DTYPE_BYTES, WEIGHT_BITS
from octavo.units import BYTES

DEFAULT_MAX_NUM_SEQS = 256
# Nothing that is planned for has less memory: a number without a unit was meant as gigabytes.
_LEAST_MEMORY = 1 << 20

_option = partial(option, group="workload and hardware")
_OF_ENGINE = {entry.name: entry for entry in fields(EngineConfig)}


def _shared(name: str) -> Any:
    """Declare an option as the engine does."""
    entry = _OF_ENGINE[name]
    return _option(entry.default, **{k: v for k, v in entry.metadata["option"].items() if k != "group"})


_size = partial(_option, unit=BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(Options):
    """The options of `octavo plan`; those shared with `octavo serve` mean the same there."""

    model: str = _option(
        DEFAULT_MODEL, "a folder with a config.json, a GGUF file, or a well-known model by its name or hub id"
    )
    machine: str | None = _option(
        None,
        "plan for a device by name, with the memory of its data sheet: h100, a100-80gb, …; `octavo simulate "
        "--list-machines` prints all",
        metavar="NAME",
    )
    price_per_hour: float | None = _option(
        None,
        "what all devices cost an hour, in any currency: adds the least price of a million output tokens; needs "
        "--machine",
        above=0,
    )
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
        "auto: a GGUF file's weights stay quantised on a CPU; none: in --dtype; q8_0, q4_0: quantise a folder's floats",
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
        f"maximum number of sequences in one step; default: --concurrency, or {DEFAULT_MAX_NUM_SEQS} without it",
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
    kv_remote: str | None = _option(None, "Redis or Valkey with shared prefixes; it is not contacted", metavar="URL")

    def _check_together(self) -> None:
        if self.price_per_hour is not None and self.machine is None:
            raise ConfigError(
                "--price-per-hour needs --machine NAME, whose data sheet gives its speed; to use a measured speed, run "
                "`octavo calibrate-speed` and `octavo simulate --speed FILE --price-per-hour X`"
            )
        if self.weights != "auto" and self.quantization != "auto":
            raise ConfigError(f"weights {self.weights} and quantization {self.quantization} both choose the weights")
        for name in ("memory", "kv_cache_memory"):
            if isinstance(size := getattr(self, name), int) and size < _LEAST_MEMORY:
                raise ConfigError(f"{name} is {size} bytes; if you mean gigabytes, write {size}GiB")
