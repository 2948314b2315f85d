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
CHECKPOINT_FORMATS = ("awq", "awq_marlin", "compressed-tensors", "fp8", "gguf", "gptq", "gptq_marlin")
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}

_model = partial(option, group="model options")
_cache = partial(option, group="KV cache options")
_below = partial(option, group="options for memory below the KV cache (docs/serve/tiers.md)")
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
        "a Hugging Face folder or hub id, a hub id with a type of GGUF file (org/name:Q4_K_M), a GGUF file, or "
        "'smollm2' (SmolLM2-135M-Instruct, packaged)",
    )
    revision: str | None = _model(None, "branch, tag or commit of the model on the hub; default: main")
    hf_file: str | None = _model(None, "name of a GGUF file in the model's repository or folder", metavar="FILE")
    hf_token: str | None = _model(
        None, "the hub's token; shows in `ps`: prefer $HF_TOKEN, or `hf auth login`", metavar="TOKEN", secret=True
    )
    tokenizer: str | None = _model(
        None, "where the tokenizer is, if not in the model: a folder, a hub id or a GGUF file", metavar="MODEL"
    )
    hf_overrides: str | dict | None = _model(  # type: ignore[type-arg]  # noqa: RUF009 (the default is None)
        None,
        "JSON object of fields that replace those of the model's config.json, such as '{\"rope_scaling\": {…}}'",
        metavar="JSON",
        read=_read_overrides,
    )
    load_format: Literal["auto", "safetensors", "gguf"] = _model(
        "auto", "files to take where the hub has both: safetensors, or gguf; auto: safetensors where there are any"
    )
    model_impl: Literal["auto", "transformers"] = _model(
        "auto", "what computes the layers; transformers: its own modules, for comparison; auto: Octavo where it can"
    )
    max_model_len: int | None = _model(
        None, "maximum number of tokens in a prompt and its output; default: the model's own limit", least=1
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = _model(
        "auto",
        "weights and activations; auto: bfloat16, or float32 on a CPU that lacks bf16 instructions unless weights stay "
        "quantised; half and float: float16 and float32",
        read=lambda name: _DTYPE_ALIASES.get(name, name),
    )
    quantization: Literal["auto", "none", "q8_0", "q4_0", *CHECKPOINT_FORMATS] = _model(  # type: ignore[valid-type]
        "auto",
        "auto: compute with GGUF's Q4_0 to Q8_0, Q2_K to Q6_K, IQ4 and MXFP4 weights as they are and with other "
        "quantised types as Q8_0 (AWQ, GPTQ, FP8, … as whichever is nearest), and activations in int8, where there are "
        "kernels for it and dtype is not float32; none: dequantise them when they are loaded; q8_0, q4_0: quantise the "
        "floats of a folder, on a CPU; a checkpoint's format: refuse another",
        read=lambda name: name.removesuffix("_marlin"),
    )
    chat_template: str | None = _model(
        None, "file with a chat template (Jinja) to use instead of the model's own", metavar="FILE"
    )
    generation_config: str = _model(
        "auto",
        "source of the sampling parameters that a request leaves out; auto: the model's generation_config.json; "
        "vllm: as in vLLM, neutral values; or a folder with a generation_config.json",
        metavar="auto|vllm|DIR",
    )
    pooling: Literal["auto", "last", "mean"] = _model(
        "auto",
        "the hidden states that make an embedding; last: the last token's; mean: the mean over all tokens, for which "
        "the prefix cache is not used; auto: as the model's 1_Pooling/config.json says, or last",
    )

    kv_cache_memory: int | None = _cache(
        None,
        "memory for the KV cache, such as 2GiB; default: what --gpu-memory-utilization leaves, or on a CPU 40 % of the "
        "free RAM (at most $OCTAVO_MEMORY_LIMIT, if set) that the weights leave",
        unit=BYTES,
        least=1,
    )
    gpu_memory_utilization: float = _cache(
        0.9, "fraction of the GPU's memory for weights, activations and KV cache", above=0, most=1
    )
    kv_budget: str | dict | None = _cache(  # type: ignore[type-arg]  # noqa: RUF009 (the default is None)
        None,
        "JSON object that limits the keys and values that a sequence keeps, or reads in a step "
        "(docs/serve/kv_budgets.md), such as "
        '\'{"mode": "sinks", "tokens": 2048}\', or a .toml file by `octavo calibrate --entropy`; requests may ask '
        "for less; default: all are kept, unless a request asks for less",
        metavar="JSON|FILE",
        read=lambda given: str(KVBudget.parse(given)),
    )
    num_blocks: int | None = _cache(
        None,
        "exact number of blocks in the KV cache, including the null block; overrides --kv-cache-memory",
        least=2,
    )
    block_size: int | Literal["max"] = _cache(
        16, "tokens per block; max: one block of max_model_len tokens per sequence, as before paging", least=1
    )
    kv_cache_dtype: str = _cache(
        "auto",
        f"format of keys and values (docs/serve/kv_codecs.md): {', '.join(KV_CACHE_DTYPES)}; or a .toml file with a "
        "format for each layer, written by `octavo calibrate --search`; auto: the checkpoint's kv_cache_scheme, or the "
        "model's dtype; k8v4: keys in int8, values in int4",
        metavar="NAME|FILE",
        read=checked_kv_cache_dtype,
    )
    kv_scales: str | None = _cache(
        None,
        "scales of an fp8 or nvfp4 KV cache, written by `octavo calibrate`; default: the file it wrote next to the "
        "model, or the checkpoint's own",
        metavar="FILE",
    )
    calculate_kv_scales: bool = _cache(
        False, "choose the scales of an fp8 or nvfp4 KV cache from the first tokens computed"
    )
    enable_prefix_caching: bool = _cache(True, "reuse the blocks of a prefix that was computed before")
    prefix_cache: Literal["hashed", "radix"] = _cache(
        "hashed",
        "order of evictions and admissions; hashed: by --eviction-policy and arrival; radix: the leaves of the tree of "
        "cached blocks are evicted first, and requests with the longest cached prefix admitted first",
    )
    eviction_policy: Literal["lru", "fifo", "priority", "adaptive"] = _cache(
        DEFAULT_EVICTION_POLICY,
        "which cached block is evicted first, on every tier; adaptive: the one least likely to be used again, "
        "learned from which evicted blocks were; priority: one of the request with the lowest priority",
        removed={"lfu": "adaptive", "cost": "adaptive"},
    )
    pin_budget: float = _cache(
        0.25, "largest fraction of the KV cache that pinned prefixes may take, 0 to 1", least=0, most=1
    )
    kv_events_config: KVEventsConfig | None = _cache(  # noqa: RUF009 (the default is None)
        None,
        "JSON object with vLLM's names: publish which blocks the KV cache stores and removes, for routers, as in "
        """'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}' (docs/operate/route.md); needs """
        "octavo[events]",
        metavar="JSON",
    )

    swap_space: int | None = _below(
        None,
        "host memory for the blocks of preempted sequences, such as 2GiB (a bare 2 means GiB); 0: never swap; "
        "default: 1GiB, or less where less RAM is free",
        unit=SWAP_BYTES,
        least=0,
    )
    kv_host_memory: int = _below(
        0,
        "host memory for prefixes evicted from the KV cache, in addition to --swap-space, such as 8GiB: they are "
        "copied back instead of recomputed; 0: none",
        unit=BYTES,
        least=0,
    )
    kv_demotion: Literal["on_evict", "on_second_use", "all"] = _below(
        "on_second_use",
        "which blocks of prefixes go to host memory and below; on_evict: those evicted; on_second_use: those evicted "
        "after being used twice; all: every block, as soon as it is computed",
    )
    kv_disk: str | None = _below(
        None, "directory for prefixes that outlive the process; one server at a time may use it", metavar="DIR"
    )
    kv_disk_size: int = _below("20GiB", "maximum size of --kv-disk", unit=BYTES, least=1, needs="kv_disk")
    kv_remote: str | None = _below(
        None,
        "Redis or Valkey in which servers of one model share prefixes: redis://HOST:PORT/DB, rediss:// for TLS, or "
        "unix://PATH; ?ttl=SECONDS: how long a block is kept after its last use, by default until Redis evicts it; "
        "needs octavo[redis]; a password in it shows in `ps`: prefer $OCTAVO_KV_REMOTE",
        metavar="URL",
        secret=True,
    )
    kv_remote_secret: str | None = _below(
        None,
        "key that signs what is stored in --kv-remote and handed to neighbours, so that others there cannot plant "
        "blocks; the same on all servers, at least 16 characters; shows in `ps`: prefer $OCTAVO_KV_REMOTE_SECRET",
        metavar="KEY",
        check=_check_secret,
        secret=True,
    )
    kv_neighbours: str | None = _below(
        None,
        "HOST:PORT at which this server hands blocks in host memory to servers of the same model and secret; it also "
        "fetches theirs, as a router hints (docs/operate/route.md); needs --kv-remote-secret, --kv-demotion all and "
        "octavo[redis]",
        metavar="HOST:PORT",
        check=check_address,
        needs="kv_remote_secret",
    )

    max_num_seqs: int = _scheduling(
        256,
        "maximum number of sequences computed in one step, and no more than --max-num-batched-tokens: each computes a "
        "token",
        least=1,
    )
    max_num_batched_tokens: int = _scheduling(
        2048, "maximum number of tokens computed in one step; longer prompts are computed in chunks", least=1
    )
    itl_slo_ms: float | None = _scheduling(
        None,
        "target for the time between two tokens of a running stream, in milliseconds: prompts are computed in chunks "
        "small enough to keep it, by a model of step times that is fitted while serving, and if the streams of several "
        "tenants exceed it together, those that take more than their share take turns; none: only "
        "--max-num-batched-tokens limits a step; default: 500 in octavo serve, otherwise none",
        unit=MILLISECONDS,
        above=0,
        none=True,
    )
    scheduling_policy: Literal["fcfs", "priority", "vtc"] = _scheduling(
        "fcfs",
        "which waiting request is admitted next; fcfs: by priority, then arrival; priority: the same with ageing, and "
        "an urgent request preempts others; vtc: one of the tenant (API key) that has received the least service for "
        "its weight (docs/operate/fairness.md)",
        removed={"dlpm": "vtc"},
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = _scheduling(
        "auto",
        "how a preempted sequence gets its blocks back; auto: whichever is faster, as measured while serving, but swap "
        "for a quantised KV cache without --deterministic",
    )
    async_scheduling: bool | None = _scheduling(
        None, "plan the next step while a step is computed; default: on a GPU only"
    )
    speculative_config: SpeculativeConfig | None = _scheduling(  # noqa: RUF009 (the default is None)
        None,
        "JSON object that turns on speculative decoding (docs/serve/speculation.md): tokens are drafted from known "
        "text or by a smaller model, and the output stays the same; method: ngram (the default), suffix or "
        "draft_model; model: that of draft_model; num_speculative_tokens (8), prompt_lookup_min (2), prompt_lookup_max "
        "(8)",
        metavar="JSON",
    )
    limits: RequestLimits = _scheduling(  # noqa: RUF009 (the default is frozen)
        DEFAULT_LIMITS,
        "the most that one request may ask for, such as max_n=128,max_tools=16; docs/operate/limits.md lists all",
        metavar="NAME=N,…",
    )
    tenant_share: float | None = _scheduling(
        None,
        "largest fraction of --pin-budget, and of the limits max_waiting_requests and max_waiting_tokens, that one "
        "tenant (API key) may take, up to 1, unless its entry in the keys file says otherwise; default: 0.5 where a "
        "server has several tenants, else 1",
        above=0,
        most=1,
    )

    device: Literal["auto", "cpu", "cuda"] = _execution("auto", "where the model runs; auto: cuda where there is one")
    num_threads: int | None = _execution(
        None,
        "CPU threads of each rank; default: one for each core that affinity, cgroups and OMP_NUM_THREADS allow, shared "
        "by the ranks",
        least=1,
        most=MOST_THREADS,
    )
    cpu_list: str | None = _execution(
        None,
        "CPUs that all threads and ranks run on, such as 0-15,32-47, among those that affinity and cgroups allow; "
        "default: all of these",
        metavar="CPUS",
        check=_check_cpu_list,
    )
    tensor_parallel_size: int | Literal["auto"] = _execution(
        1,
        "on a CPU: processes that share the model, on all machines together; each has some outputs of every matrix and "
        "some heads of the KV cache; auto: one for each NUMA node of this machine, if the model can be split",
        least=1,
        most=MOST_RANKS,
    )
    nnodes: int = _execution(
        1,
        "machines that tensor_parallel_size is divided among; start the same command on each, with its node_rank, in a "
        "network that you trust (docs/operate/configure.md)",
        least=1,
        most=MOST_RANKS,
    )
    node_rank: int = _execution(0, "which of nnodes this machine is; 0 serves, the others compute for it", least=0)
    master_addr: str = _execution("127.0.0.1", "address of machine 0, for nnodes", metavar="ADDRESS")
    master_port: int = _execution(29501, "port at which machine 0 listens for the others", least=1, most=65535)
    attention_backend: Literal["auto", "native", "triton", "reference"] = _execution(
        "auto", "auto: the fastest that runs here; native: C++, on a CPU; triton: on a GPU; reference: plain torch"
    )
    deterministic: bool = _execution(False, "bit-identical output whatever the batch, the chunking and the cache state")
    seed: int | None = _execution(
        0,
        "seed from which requests without one get theirs; default: 0, and for `octavo serve` none: from the operating "
        "system",
    )
    enforce_eager: bool = _execution(False, "on a GPU: launch each kernel instead of replaying CUDA graphs")
    record_plans: str | None = _execution(
        None,
        "write each step's plan (numbers only) and its seconds to this file, for `octavo simulate --plans`",
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
