"""The options of an engine, declared once for the keywords of `LLM(...)` and the flags of `octavo serve`."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.limits import RequestLimits
from octavo.option import option, removed_option

DEFAULT_MODEL = "smollm2"
DEFAULT_EVICTION_POLICY: Literal["adaptive"] = "adaptive"

KV_CACHE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8_e4m3"}
KV_CACHE_DTYPES = (
    *("auto", "bfloat16", "float16", "float32", *KV_CACHE_ALIASES),
    *("fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4", "nvfp4"),
)
KV_CACHE_TABLE = ".toml"
"""Suffix of a file with a codec for each layer."""

# Read at the package's first import, before torch is imported: its OpenMP may bind the importing thread to one CPU.
ALLOWED_CPUS = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))

MOST_THREADS = 1024
"""Threads that the kernels can use."""

DISK_SIZE = "20GiB"
"""Default of `kv_disk_size`."""

STAGING_MEMORY = 256 << 20
"""Host memory for prefixes on their way to and from stores, if `kv_host_memory` is 0."""

_SHORTEST_SECRET = 16
_LONGEST_TTL = 10 * 365 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(RequestLimits):
    """The options of one engine, including the limits of its requests.

    Validated at construction; raises `ConfigError` with the value in the message.
    """

    model: str = option(
        DEFAULT_MODEL, "a Hugging Face folder or hub id, a GGUF file, or 'smollm2' (SmolLM2-135M-Instruct, packaged)"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = option(
        "auto", "weights and activations; auto: bfloat16; half and float: float16 and float32"
    )
    chat_template: str | None = option(
        None, "file with a chat template (Jinja) to use instead of the model's own", metavar="FILE"
    )
    generation_config: str = option(
        "auto",
        "where sampling parameters come from that a request leaves out; auto: the model's generation_config.json; "
        "vllm: as in vLLM, neutral values; or a folder with a generation_config.json",
        metavar="auto|vllm|DIR",
    )
    pooling: Literal["auto", "last", "mean"] = option(
        "auto",
        "the hidden states that make an embedding; last: the last token's; mean: the mean over all tokens, for which "
        "the prefix cache is not used; auto: as the model's 1_Pooling/config.json says, or last",
    )
    quantization: Literal["auto", "none"] = option(
        "auto",
        "auto: compute with GGUF's Q4_0, Q4_1 and Q8_0 weights as they are, with Q4_K as Q4_1 and with other quantised "
        "types as Q8_0, and activations in int8, where there are kernels for it and dtype is not float32; none: "
        "dequantise them when they are loaded",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the model runs; auto: cuda where there is one")
    max_model_len: int | None = option(
        None, "maximum number of tokens in a prompt and its output; default: the model's own limit"
    )
    max_num_seqs: int = option(256, "maximum number of sequences computed in one step")
    max_num_batched_tokens: int = option(
        2048, "maximum number of tokens computed in one step; longer prompts are computed in chunks"
    )
    itl_slo_ms: float | None = option(
        None,
        "target for the time between two tokens of a running stream, in milliseconds: prompts are computed in chunks "
        "small enough to keep it, by a model of step times that is fitted while serving, and if the streams of several "
        "tenants exceed it together, those that take more than their share take turns; default: only "
        "--max-num-batched-tokens limits a step",
        metavar="MS",
    )
    block_size: int | Literal["max"] = option(
        16, "tokens per block; max: one block of max_model_len tokens per sequence, as before paging"
    )
    kv_cache_memory: int | str | None = option(
        None,
        "memory for the KV cache, such as 2GiB; default: what --gpu-memory-utilization leaves, or on a CPU 40 % of the "
        "free RAM (at most $OCTAVO_MEMORY_LIMIT, if set) beside the weights",
    )
    num_blocks: int | None = option(
        None, "exact number of blocks in the KV cache, including the null block; overrides --kv-cache-memory"
    )
    gpu_memory_utilization: float = option(0.9, "fraction of the GPU's memory for weights, activations and KV cache")
    kv_cache_dtype: str = option(
        "auto",
        f"format of keys and values (docs/kv_codecs.md): {', '.join(KV_CACHE_DTYPES)}; or a .toml file with a format "
        "for each layer, written by `octavo calibrate --search`; auto: the checkpoint's kv_cache_scheme, or the "
        "model's dtype; k8v4: keys in int8, values in int4",
        metavar="NAME|FILE",
    )
    kv_scales: str | None = option(
        None,
        "scales of an fp8 or nvfp4 KV cache, written by `octavo calibrate`; default: the file that it wrote beside the "
        "model, or the checkpoint's own",
        metavar="FILE",
    )
    calculate_kv_scales: bool = option(
        False, "choose the scales of an fp8 or nvfp4 KV cache from the first tokens computed"
    )
    enable_prefix_caching: bool = option(True, "reuse the blocks of a prefix that was computed before")
    prefix_cache: Literal["hashed", "radix"] = option(
        "hashed", "how cached prefixes are found; radix also admits requests with the longest cached prefix first"
    )
    eviction_policy: Literal["lru", "fifo", "priority", "adaptive"] = option(
        DEFAULT_EVICTION_POLICY,
        "which cached block is evicted first, on every tier; adaptive: the one least likely to be used again, "
        "learned from which evicted blocks were; priority: one of the request with the lowest priority",
    )
    pin_budget: float = option(0.25, "largest fraction of the KV cache that pinned prefixes may take, 0 to 1")
    pin_tenant_share: float | None = option(
        None,
        "largest fraction of --pin-budget that one tenant (API key) may take, 0 to 1; default: 0.5 where a server has "
        "several tenants, else 1",
    )
    queue_tenant_share: float | None = option(
        None,
        "largest fraction of --max-waiting-requests and --max-waiting-tokens that one tenant may take, up to 1, unless "
        "its entry in the keys file says otherwise; default: 0.5 where a server has several tenants, else 1",
    )
    scheduling_policy: Literal["fcfs", "priority", "vtc"] = option(
        "fcfs",
        "which waiting request is admitted next; fcfs: by priority, then arrival; priority: the same with ageing, and "
        "an urgent request preempts others; vtc: one of the tenant (API key) that has received the least service for "
        "its weight (docs/fairness.md)",
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = option(
        "auto", "how a preempted sequence gets its blocks back; auto: whichever is faster, as measured at start-up"
    )
    swap_space: int | str | None = option(
        None,
        "host memory for the blocks of preempted sequences, such as 2GiB (a bare 2 means GiB); 0: never swap; "
        "default: 1GiB, or less where less RAM is free",
    )
    kv_host_memory: int | str = option(
        0,
        "host memory for prefixes evicted from the KV cache, in addition to --swap-space, such as 8GiB: they are "
        "copied back instead of recomputed; 0: none",
    )
    kv_demotion: Literal["on_evict", "on_second_use", "all"] = option(
        "on_second_use",
        "which blocks of prefixes go to host memory and below; on_evict: those evicted; on_second_use: those evicted "
        "after being used twice; all: every block, as soon as it is computed",
    )
    kv_disk: str | None = option(
        None, "directory for prefixes that outlive the process; one server at a time may use it", metavar="DIR"
    )
    kv_disk_size: int | str = option(DISK_SIZE, "maximum size of --kv-disk")
    kv_remote: str | None = option(
        None,
        "Redis or Valkey in which servers of one model share prefixes: redis://HOST:PORT/DB, rediss:// for TLS, or "
        "unix://PATH; needs octavo[redis]; a password in it shows in `ps`: prefer $OCTAVO_KV_REMOTE",
        metavar="URL",
        secret=True,
    )
    kv_remote_secret: str | None = option(
        None,
        "key that signs what is stored in --kv-remote, so that nobody else who can write there can plant blocks; the "
        "same on all servers, at least 16 characters; shows in `ps`: prefer $OCTAVO_KV_REMOTE_SECRET",
        metavar="KEY",
        secret=True,
    )
    kv_remote_ttl: int | None = option(
        None,
        "seconds that a block is kept in --kv-remote after its last use; default: until Redis evicts it",
        metavar="SECONDS",
    )
    attention_backend: Literal["auto", "native", "triton", "reference"] = option(
        "auto", "auto: the fastest that runs here; native: C++, on a CPU; triton: on a GPU; reference: plain torch"
    )
    enforce_eager: bool = option(False, "on a GPU: launch each kernel instead of replaying CUDA graphs")
    async_scheduling: bool | None = option(
        None,
        "plan the next step while a step of decodes is computed; default: on a GPU only",
    )
    deterministic: bool = option(False, "bit-identical output whatever the batch, the chunking and the cache state")
    executor: Literal["in_process", "process"] = option(
        "in_process", "where the model runs: in the engine's own process, or in a separate one, over a pipe"
    )
    record_plans: str | None = option(
        None,
        "write each step's plan (numbers only) and its seconds to this file, for `octavo simulate --plans`",
        metavar="FILE",
    )
    num_threads: int | None = option(
        None, "CPU threads; default: one for each core that affinity, cgroups and OMP_NUM_THREADS allow"
    )
    seed: int | None = option(
        0,
        "seed from which requests without one get theirs; default: 0, and for `octavo serve` none: from the operating "
        "system",
    )

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is a new class, for which super() without arguments does not work.
        RequestLimits.__post_init__(self)
        object.__setattr__(self, "dtype", {"half": "float16", "float": "float32"}.get(self.dtype, self.dtype))
        object.__setattr__(self, "kv_cache_dtype", checked_kv_cache_dtype(self.kv_cache_dtype))
        if self.kv_scales is not None and self.calculate_kv_scales:
            raise ConfigError("kv_scales and calculate_kv_scales contradict each other: give one of them")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            value = getattr(self, name)
            if value is not None and value != "max" and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.num_threads is not None and not 1 <= self.num_threads <= MOST_THREADS:
            raise ConfigError(f"num_threads must be between 1 and {MOST_THREADS}, got {self.num_threads}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        slo = self.itl_slo_ms
        if slo is not None and not 0 < slo < math.inf:
            raise ConfigError(f"itl_slo_ms must be a positive number of milliseconds, got {slo!r}")
        if not 0.0 <= self.pin_budget <= 1.0:
            raise ConfigError(f"pin_budget must be in [0, 1], got {self.pin_budget}")
        if self.pin_tenant_share is not None and not 0.0 <= self.pin_tenant_share <= 1.0:
            raise ConfigError(f"pin_tenant_share must be in [0, 1], got {self.pin_tenant_share}")
        if self.queue_tenant_share is not None and not 0.0 < self.queue_tenant_share <= 1.0:
            raise ConfigError(f"queue_tenant_share must be in (0, 1], got {self.queue_tenant_share}")
        if isinstance(self.kv_cache_memory, str):
            object.__setattr__(self, "kv_cache_memory", parse_bytes(self.kv_cache_memory))
        if isinstance(self.kv_cache_memory, int) and self.kv_cache_memory < 1:
            raise ConfigError(f"kv_cache_memory must be positive, got {self.kv_cache_memory}")
        if isinstance(self.kv_disk_size, str):
            object.__setattr__(self, "kv_disk_size", parse_bytes(self.kv_disk_size))
        if isinstance(self.kv_disk_size, bool) or not isinstance(self.kv_disk_size, int) or self.kv_disk_size < 1:
            raise ConfigError(f"kv_disk_size must be a positive number of bytes, got {self.kv_disk_size!r}")
        if self.kv_disk is None and self.kv_disk_size != parse_bytes(DISK_SIZE):
            raise ConfigError("kv_disk_size is for kv_disk, which is not given")
        if self.kv_remote is None and (self.kv_remote_secret is not None or self.kv_remote_ttl is not None):
            raise ConfigError("kv_remote_secret and kv_remote_ttl are for kv_remote, which is not given")
        if self.kv_remote_secret is not None and len(self.kv_remote_secret) < _SHORTEST_SECRET:
            raise ConfigError(
                f"kv_remote_secret has {len(self.kv_remote_secret)} characters, but needs {_SHORTEST_SECRET}: who can "
                "read the store could guess it"
            )
        ttl = self.kv_remote_ttl
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int) or not 1 <= ttl <= _LONGEST_TTL):
            raise ConfigError(f"kv_remote_ttl must be 1 to {_LONGEST_TTL} seconds, got {ttl!r}")
        if self.has_stores and not self.enable_prefix_caching:
            raise ConfigError("kv_disk and kv_remote are for prefixes, but enable_prefix_caching is off")
        if self.has_stores and self.kv_host_memory == 0:
            object.__setattr__(self, "kv_host_memory", STAGING_MEMORY)
        if isinstance(self.kv_host_memory, str):
            object.__setattr__(self, "kv_host_memory", parse_bytes(self.kv_host_memory))
        host = self.kv_host_memory
        if isinstance(host, bool) or not isinstance(host, int) or host < 0:
            raise ConfigError(f"kv_host_memory must be a number of bytes, 0 or more, got {host!r}")
        if host and not self.enable_prefix_caching:
            raise ConfigError("kv_host_memory is for prefixes, but enable_prefix_caching is off: it would find nothing")
        if isinstance(self.swap_space, str):
            object.__setattr__(self, "swap_space", parse_swap(self.swap_space))
        elif not isinstance(self.swap_space, bool) and self.swap_space and 0 < self.swap_space < _SMALLEST_SWAP:
            object.__setattr__(self, "swap_space", self.swap_space * 2**30)
        swap = 0 if self.swap_space is None else self.swap_space
        if isinstance(swap, bool) or not isinstance(swap, int) or swap < 0:
            raise ConfigError(f"swap_space must be a number of bytes, 0 or more, got {self.swap_space!r}")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError("preemption_mode is 'swap', but swap_space is 0: nothing could be swapped")

    @property
    def has_stores(self) -> bool:
        """Whether prefixes are stored below host memory."""
        return self.kv_disk is not None or self.kv_remote is not None

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Build from keywords; raises `ConfigError` for an unknown one, naming the known ones."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            hint = removed_option(unknown[0]) or f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown option {unknown[0]!r}{hint}")
        return cls(**options)

    def replace(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)


def checked_kv_cache_dtype(name: str) -> str:
    """Return the name of a codec, with aliases resolved, or the path of a table.

    Raises:
        ConfigError: `name` is neither.
    """
    if name in KV_CACHE_DTYPES or (isinstance(name, str) and name.endswith(KV_CACHE_TABLE)):
        return KV_CACHE_ALIASES.get(name, name)
    known = ", ".join(KV_CACHE_DTYPES)
    raise ConfigError(f"kv_cache_dtype must be one of {known}, or a file that ends in {KV_CACHE_TABLE}, got {name!r}")


# A bare number below this is in GiB, as in vLLM, and not in bytes.
_SMALLEST_SWAP = 1024


def parse_swap(text: str) -> int:
    """Parse swap space: '4' -> 4 GiB, as in vLLM; with a unit, or 1024 and above, like `parse_bytes`."""
    try:
        number = float(text)
    except ValueError:
        return parse_bytes(text)
    return int(number * 2**30) if 0 < number < _SMALLEST_SWAP else parse_bytes(text)


_COUNT_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def parse_count(text: str) -> int:
    """Parse a count as in vLLM: '4096' -> 4096, '4k' -> 4000, '4K' -> 4096, '25.6k' -> 25600.

    Raises:
        ValueError: the text is not such a number, or not a whole one.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)([kKmMgG])\s*", text)
    if match is None:
        return int(text)
    whole, rest = divmod(round(float(match[1]) * _COUNT_UNITS[match[2]], 6), 1)
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return int(whole)


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = _UNITS[_letter] = 1024**_power


def parse_bytes(text: str) -> int:
    """Parse a size: '2GiB' -> 2147483648, '2GB' -> 2000000000, '2G' -> 2147483648, '123' -> 123.

    Raises:
        ConfigError: the text is not a number with an optional unit of B, K, M, G, T, KB … TB, KiB … TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ConfigError(f"cannot read {text!r} as a number of bytes: write 2147483648, 2GiB or 2GB")
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """Format a size: 2147483648 -> '2.00 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
