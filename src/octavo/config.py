"""The options of an engine, declared once for the keywords of `LLM(...)` and the flags of `octavo serve`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from octavo.config_tables import KVEventsConfig, SpeculativeConfig
from octavo.errors import ConfigError, shown
from octavo.kv_budget import KVBudget
from octavo.option import Options, check_address, json_object, option, options_of
from octavo.request_limits import DEFAULT_LIMITS, RequestLimits
from octavo.units import BYTES, MILLISECONDS, SWAP_BYTES, parse_cpus

DEFAULT_MODEL = "smollm2"
# Defaults of a server where they differ from those of `LLM`: with a seed that others know, a client could predict what
# is drawn for another; without a latency target, one long prompt would hold all streams for as long as a step takes.
SERVER_DEFAULTS: dict[str, Any] = {"seed": None, "itl_slo_ms": 500.0}
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

MOST_RANKS = 64
"""Processes that the kernels can split a model among."""

STAGING_MEMORY = 256 << 20
"""Host memory for prefixes on their way to and from stores, if `kv_host_memory` is 0."""

_SHORTEST_SECRET = 16
_REDIS = ("redis", "redis", "blake3")


def checked_kv_cache_dtype(name: str) -> str:
    """Return the name of a codec, with aliases resolved, or the path of a table.

    Raises:
        ConfigError: `name` is neither.
    """
    if name in KV_CACHE_DTYPES or (isinstance(name, str) and name.endswith(KV_CACHE_TABLE)):
        return KV_CACHE_ALIASES.get(name, name)
    known = ", ".join(KV_CACHE_DTYPES)
    raise ConfigError(f"kv_cache_dtype must be one of {known}, or a file that ends in {KV_CACHE_TABLE}, got {name!r}")


def _check_cpu_list(cpus: str, name: str) -> None:
    try:
        parse_cpus(cpus)
    except ValueError:
        raise ConfigError(f"{name} must be numbers of CPUs and ranges, such as 0-15,32-47, got {shown(cpus)}") from None


def _check_secret(secret: str, name: str) -> None:
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"{name} has {len(secret)} characters, but needs {_SHORTEST_SECRET}: anyone who can read the store could "
            "brute-force a shorter one"
        )


def _read_overrides(given: str | dict[str, Any]) -> str:
    try:
        return json.dumps(json_object(given, "hf_overrides"), sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"hf_overrides must be a JSON object: {error}") from error


# vLLM's names.
CHECKPOINT_FORMATS = (
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "compressed-tensors",
    "fp8",
    "gguf",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "mxfp4",
)
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}

_model = partial(option, group="model options")
_cache = partial(option, group="KV cache options")
_below = partial(option, group="cache tier options (docs/serve/tiers.md)")
_scheduling = partial(option, group="scheduling options")
_execution = partial(option, group="execution options")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Options):
    """The options of one engine, checked at construction; raises `ConfigError` with the value in the message."""

    REMOVED: ClassVar = {
        **{name: f"it is an entry of --limits, as in {name}=16" for name in options_of(RequestLimits)},
        "executor": "the model runs in the engine's own process",
        "kv_remote_ttl": "add it to the address, as in --kv-remote redis://HOST:6379/0?ttl=86400",
        "pin_tenant_share": "tenant_share is the share of pins and of the queue",
        "preemption_victim": "the last running sequence in order of service is preempted",
        "queue_tenant_share": "tenant_share is the share of pins and of the queue",
    }

    model: str = _model(
        DEFAULT_MODEL,
        "smollm2 (SmolLM2-135M-Instruct), a Hugging Face folder or hub id, a hub id and a GGUF type "
        "(org/name:Q4_K_M), or a GGUF file",
    )
    revision: str | None = _model(None, "branch, tag or commit of the model on the hub; default: main")
    hf_file: str | None = _model(None, "name of a GGUF file in the model's repository or folder", metavar="FILE")
    hf_token: str | None = _model(
        None, "token for the hub; visible in `ps`: prefer $HF_TOKEN or `hf auth login`", metavar="TOKEN", secret=True
    )
    tokenizer: str | None = _model(
        None, "folder, hub id or GGUF file of the tokenizer, if the model has none", metavar="MODEL"
    )
    hf_overrides: str | dict | None = _model(  # type: ignore[type-arg]  # noqa: RUF009 (the default is None)
        None,
        "JSON object of fields to replace in config.json, such as '{\"rope_scaling\": {…}}'",
        metavar="JSON",
        read=_read_overrides,
    )
    load_format: Literal["auto", "safetensors", "gguf"] = _model(
        "auto", "files to load if the hub has both; auto: safetensors if there are any"
    )
    model_impl: Literal["auto", "transformers"] = _model(
        "auto", "code that runs the model; auto: Octavo's own where it can; transformers: for comparison"
    )
    max_model_len: int | None = _model(
        None, "maximum tokens of a prompt and its output together; default: the model's own limit", least=1
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = _model(
        "auto",
        "type of weights and activations; auto: bfloat16, or float32 on a CPU without bf16 instructions unless "
        "weights are quantised; half, float: float16, float32",
        read=lambda name: _DTYPE_ALIASES.get(name, name),
    )
    quantization: Literal["auto", "none", "q8_0", "q4_0", *CHECKPOINT_FORMATS] = _model(  # type: ignore[valid-type]
        "auto",
        "auto: compute with quantised weights (docs/serve/models.md); none: dequantise them on loading; q8_0, "
        "q4_0: quantise a folder of floats, on a CPU; a checkpoint's format: refuse any other",
        read=lambda name: name.removesuffix("_marlin"),
    )
    chat_template: str | None = _model(
        None, "file with a chat template (Jinja) that replaces the model's own", metavar="FILE"
    )
    generation_config: str = _model(
        "auto",
        "default sampling parameters; auto: from the model's generation_config.json; vllm: neutral values, as in "
        "vLLM; or a folder with such a file",
        metavar="auto|vllm|DIR",
    )
    pooling: Literal["auto", "last", "mean"] = _model(
        "auto",
        "how hidden states become an embedding: the last token's, or the mean of all (without prefix caching); "
        "auto: as in the model's 1_Pooling/config.json, or last",
    )

    kv_cache_memory: int | None = _cache(
        None,
        "memory for the KV cache, such as 2GiB; default on a CPU: 40 % of the RAM that the weights leave (at most "
        "$OCTAVO_MEMORY_LIMIT); on a GPU: see --gpu-memory-utilization",
        unit=BYTES,
        least=1,
    )
    gpu_memory_utilization: float = _cache(
        0.9, "fraction of the GPU's memory for weights, activations and KV cache", above=0, most=1
    )
    kv_budget: str | dict | None = _cache(  # type: ignore[type-arg]  # noqa: RUF009 (the default is None)
        None,
        "most tokens that a sequence keeps or reads in a step (docs/serve/kv_budgets.md), such as "
        '\'{"mode": "sinks", "tokens": 2048}\', or a .toml file of `octavo calibrate --entropy`; default: none',
        metavar="JSON|FILE",
        read=lambda given: str(KVBudget.parse(given)),
    )
    num_blocks: int | None = _cache(
        None,
        "exact number of blocks in the KV cache, including the null block; overrides --kv-cache-memory",
        least=2,
    )
    block_size: int | Literal["max"] = _cache(
        16,
        "tokens per block; max: one block of max_model_len tokens per sequence, for comparison with engines "
        "without paging",
        least=1,
    )
    kv_cache_dtype: str = _cache(
        "auto",
        f"format of keys and values (docs/serve/kv_codecs.md): {', '.join(KV_CACHE_DTYPES)}, or a .toml file of "
        "`octavo calibrate --search`; auto: the checkpoint's kv_cache_scheme, or the model's dtype",
        metavar="NAME|FILE",
        read=checked_kv_cache_dtype,
    )
    kv_scales: str | None = _cache(
        None,
        "scales of an fp8 or nvfp4 KV cache, written by `octavo calibrate`; default: that file if it is next to "
        "the model, or the checkpoint's own",
        metavar="FILE",
    )
    calculate_kv_scales: bool = _cache(
        False, "compute the scales of an fp8 or nvfp4 KV cache from the first tokens processed"
    )
    enable_prefix_caching: bool = _cache(True, "reuse cached blocks for prompts that begin with the same tokens")
    prefix_cache: Literal["hashed", "radix"] = _cache(
        "hashed",
        "order in which waiting requests are admitted; hashed: by arrival; radix: those with the longest cached "
        "prefix first",
    )
    eviction_policy: Literal["lru", "fifo", "priority", "adaptive"] = _cache(
        DEFAULT_EVICTION_POLICY,
        "which cached block is evicted first, on every tier; adaptive: the one least likely to be reused, "
        "estimated from past traffic; priority: one from the lowest-priority request",
        removed={"lfu": "adaptive", "cost": "adaptive"},
    )
    pin_budget: float = _cache(0.25, "largest fraction of the KV cache that pinned prefixes may use", least=0, most=1)
    kv_events_config: KVEventsConfig | None = _cache(  # noqa: RUF009 (the default is None)
        None,
        "publish KV cache events (docs/operate/route.md): a JSON object with vLLM's fields, such as "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'; needs octavo[events]',
        metavar="JSON",
    )

    swap_space: int | None = _below(
        None,
        "host memory for swapped-out blocks of preempted sequences, such as 2GiB (a bare 2 means GiB); 0: never "
        "swap; default: 1GiB, or less if less RAM is free",
        unit=SWAP_BYTES,
        least=0,
    )
    kv_host_memory: int = _below(
        0,
        "host memory for prefixes evicted from the KV cache, such as 8GiB, in addition to --swap-space; 0: none",
        unit=BYTES,
        least=0,
    )
    kv_demotion: Literal["on_evict", "on_second_use", "all"] = _below(
        "on_second_use",
        "which blocks are copied to host memory and below; on_evict: all evicted blocks; on_second_use: evicted "
        "blocks that were used twice; all: every block once it is computed",
    )
    kv_disk: str | None = _below(
        None, "directory for prefixes that survive a restart; only one server at a time may use it", metavar="DIR"
    )
    kv_disk_size: int = _below("20GiB", "maximum size of --kv-disk", unit=BYTES, least=1, needs="kv_disk")
    kv_remote: str | None = _below(
        None,
        "Redis or Valkey where servers of one model share prefixes (docs/serve/tiers.md): redis://HOST:PORT/DB, "
        "rediss:// or unix://PATH; visible in `ps`: prefer $OCTAVO_KV_REMOTE; needs octavo[redis]",
        metavar="URL",
        packages=_REDIS,
        secret=True,
    )
    kv_remote_secret: str | None = _below(
        None,
        "key that signs blocks in --kv-remote and between neighbours, the same on all servers, at least 16 "
        "characters; visible in `ps`: prefer $OCTAVO_KV_REMOTE_SECRET",
        metavar="KEY",
        check=_check_secret,
        secret=True,
    )
    kv_neighbours: str | None = _below(
        None,
        "address at which servers of the same model fetch blocks from this one (docs/operate/route.md); needs "
        "--kv-remote-secret, --kv-demotion all and octavo[redis]",
        metavar="HOST:PORT",
        check=check_address,
        needs="kv_remote_secret",
        packages=_REDIS,
    )

    max_num_seqs: int = _scheduling(
        256,
        "maximum number of sequences in one step; at most --max-num-batched-tokens",
        least=1,
    )
    max_num_batched_tokens: int = _scheduling(
        2048, "maximum number of tokens in one step; longer prompts are computed in chunks", least=1
    )
    itl_slo_ms: float | None = _scheduling(
        None,
        "target inter-token latency in milliseconds: prompts are chunked to meet it, and tenants' streams take turns "
        "if they exceed it; none: no target; default: 500 in octavo serve, otherwise none",
        unit=MILLISECONDS,
        above=0,
        none=True,
    )
    scheduling_policy: Literal["fcfs", "priority", "vtc"] = _scheduling(
        "fcfs",
        "order of waiting requests; fcfs: by priority, then arrival; priority: with ageing, and urgent requests "
        "preempt others; vtc: fair shares for tenants (docs/operate/fairness.md)",
        removed={"dlpm": "vtc"},
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = _scheduling(
        "auto",
        "how a preempted sequence gets its blocks back; auto: whichever is faster, or swap "
        "for a quantised KV cache without --deterministic",
    )
    async_scheduling: bool | None = _scheduling(
        None, "plan the next step while the current one runs; default: on a GPU only"
    )
    speculative_config: SpeculativeConfig | None = _scheduling(  # noqa: RUF009 (the default is None)
        None,
        "speculative decoding (docs/serve/speculation.md): a JSON object with method (ngram, suffix or "
        "draft_model), model (for draft_model), num_speculative_tokens (8) and other fields",
        metavar="JSON",
    )
    limits: RequestLimits = _scheduling(  # noqa: RUF009 (the default is frozen)
        DEFAULT_LIMITS,
        "limits of one request, such as max_n=128,max_tools=16; docs/operate/limits.md lists all",
        metavar="NAME=N,…",
    )
    tenant_share: float | None = _scheduling(
        None,
        "largest fraction of --pin-budget and of the waiting queue that one tenant may use, unless the keys file "
        "sets its own; default: 0.5 with several tenants, else 1",
        above=0,
        most=1,
    )

    device: Literal["auto", "cpu", "cuda"] = _execution("auto", "where the model runs; auto: cuda if there is a GPU")
    num_threads: int | None = _execution(
        None,
        "CPU threads per rank; default: one per core that affinity, cgroups and OMP_NUM_THREADS allow, divided "
        "among the ranks",
        least=1,
        most=MOST_THREADS,
    )
    cpu_list: str | None = _execution(
        None,
        "CPUs to run on, such as 0-15,32-47; default: all that affinity and cgroups allow",
        metavar="CPUS",
        check=_check_cpu_list,
    )
    tensor_parallel_size: int | Literal["auto"] = _execution(
        1,
        "number of processes (ranks) that share the model, over all machines, on CPUs only; auto: one per NUMA "
        "node, if the model can be split",
        least=1,
        most=MOST_RANKS,
    )
    nnodes: int = _execution(
        1,
        "number of machines that share the ranks; start the same command on each, with its own --node-rank, in a "
        "trusted network (docs/operate/configure.md)",
        least=1,
        most=MOST_RANKS,
    )
    node_rank: int = _execution(0, "number of this machine; machine 0 serves, the others compute for it", least=0)
    master_addr: str = _execution("127.0.0.1", "address of machine 0, for --nnodes", metavar="ADDRESS")
    master_port: int = _execution(29501, "port on which machine 0 listens for the other machines", least=1, most=65535)
    attention_backend: Literal["auto", "native", "triton", "reference"] = _execution(
        "auto", "auto: the fastest available; native: C++ on a CPU; triton: on a GPU; reference: plain torch"
    )
    deterministic: bool = _execution(False, "produce bit-identical output regardless of batching, chunking and caching")
    seed: int | None = _execution(
        0,
        "base seed for requests that give none; default: 0, and in `octavo serve` none: seeds come from the "
        "operating system",
    )
    enforce_eager: bool = _execution(False, "on a GPU: launch each kernel instead of replaying CUDA graphs")
    record_plans: str | None = _execution(
        None,
        "write the plan (numbers only) and duration of each step to this file, for `octavo simulate --plans`",
        metavar="FILE",
    )

    def _check_together(self) -> None:
        if self.kv_scales is not None and self.calculate_kv_scales:
            raise ConfigError("kv_scales and calculate_kv_scales contradict each other: give one of them")
        if self.has_stores and not self.enable_prefix_caching:
            raise ConfigError("kv_disk, kv_remote and kv_neighbours are for prefixes, but enable_prefix_caching is off")
        if self.kv_remote_secret is not None and self.kv_remote is None and self.kv_neighbours is None:
            raise ConfigError("kv_remote_secret needs kv_remote or kv_neighbours, which are not given")
        if self.kv_neighbours is not None and self.kv_demotion != "all":
            raise ConfigError(
                "kv_neighbours hands out copies in host memory, and needs kv_demotion 'all' to have one of each block, "
                f"got {self.kv_demotion!r}"
            )
        if self.has_stores and self.kv_host_memory == 0:
            object.__setattr__(self, "kv_host_memory", STAGING_MEMORY)
        if self.kv_host_memory and not self.enable_prefix_caching:
            raise ConfigError("kv_host_memory is for prefixes, but enable_prefix_caching is off: it would find nothing")
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError("kv_events_config publishes what prefixes are cached, but enable_prefix_caching is off")
        if self.speculative_config is not None and self.async_scheduling:
            raise ConfigError(
                "async_scheduling plans a step before the token that a draft must follow is known: "
                "give speculative_config or async_scheduling, not both"
            )
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ConfigError("preemption_mode is 'swap', but swap_space is 0: nothing could be swapped")
        if self.nnodes > 1 and (self.num_ranks == 1 or self.num_ranks % self.nnodes):
            raise ConfigError(
                f"nnodes is {self.nnodes}, but tensor_parallel_size is {self.tensor_parallel_size}: give a multiple of "
                f"{self.nnodes}, so that each machine has as many processes"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank is {self.node_rank}, but the machines are 0 to {self.nnodes - 1}")
        if self.num_ranks > 1:
            self._check_ranks()

    def _check_ranks(self) -> None:
        several = f"tensor_parallel_size is {self.tensor_parallel_size}, but "
        if self.device == "cuda":
            raise ConfigError(f"{several}only models on a CPU are split among ranks")
        if self.has_stores:
            raise ConfigError(
                f"{several}kv_disk, kv_remote and kv_neighbours would store one rank's share of each block"
            )
        if self.calculate_kv_scales:
            raise ConfigError(
                f"{several}calculate_kv_scales chooses scales in one process only: run octavo calibrate, and give its "
                "file as kv_scales"
            )
        if self.attention_backend in ("reference", "triton"):
            raise ConfigError(f"{several}attention_backend {self.attention_backend!r} runs in one process only")

    @property
    def num_ranks(self) -> int:
        """The processes that the model is split among; 1 for "auto", which becomes a number once the model is known."""
        return 1 if self.tensor_parallel_size == "auto" else self.tensor_parallel_size

    @property
    def own_ranks(self) -> range:
        """The ranks on this machine."""
        count = self.num_ranks // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def budget(self) -> KVBudget | None:
        """The budget of sequences that do not ask for less; None if they keep everything."""
        return None if self.kv_budget is None else KVBudget.parse(self.kv_budget)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Options for publishing events of the KV cache; None if they are not."""
        events = self.kv_events_config
        return events if events and events.enable_kv_cache_events and events.publisher == "zmq" else None

    @property
    def draft_model(self) -> str | None:
        """The smaller model that drafts tokens; None if none does."""
        return None if self.speculative_config is None else self.speculative_config.model

    @property
    def has_stores(self) -> bool:
        """Whether prefixes are stored below host memory."""
        return any(each is not None for each in (self.kv_disk, self.kv_remote, self.kv_neighbours))

    def replace(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)
