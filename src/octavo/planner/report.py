"""The report of `octavo plan`: what a deployment needs, and what else would fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.calculator import WEIGHT_BITS, without_windows
from octavo.planner.deployment import Deployment
from octavo.planner.model_shape import even_groups
from octavo.planner.price import decode_price
from octavo.units import format_bytes

# Memory of an engine's process on a CPU without weights, activations and blocks (interpreter, libraries, tokenizer),
# and of its helper processes: 275 MiB, 88 MiB and 20 MiB, measured with SmolLM2-135M.
PROCESS_BYTES = (275 + 88 + 20) << 20
_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
# Formats of a cache whose users at once are compared for each context.
_COMPARED = ("fp8_e4m3", "int4")

# Kinds of weights that no loader of ours reads.
_NOT_LOADED = ("fp8", "int4")


def report_of(plan: Deployment) -> dict[str, Any]:
    """Return the plan as `octavo plan --json` prints it.

    Byte counts are totals over all devices, except for keys that end in `_per_device`.
    """
    spec, cost, sizing = plan.spec, plan.cost, plan.sizing
    concurrency = plan.concurrency
    cache = cost.blocks_for(concurrency) * spec.block_bytes
    on_device = plan.weights + sizing.activations + cache + spec.block_bytes
    on_device += sizing.swap_set_aside + sizing.prefixes_set_aside + plan.draft_model.total
    process = PROCESS_BYTES if plan.options.device == "cpu" else 0
    on_device += process + (sizing.store_bytes if plan.options.device == "cpu" else 0)
    return {
        "model": plan.model.name,
        "architecture": plan.model.config.architecture,
        "parameters": plan.model.parameters.total,
        "active_parameters": round(plan.model.active_parameters),
        "layers": plan.model.config.num_layers,
        "query_heads": plan.model.num_heads,
        "kv_heads": plan.model.num_kv_heads,
        "device": plan.options.device,
        "tensor_parallel_size": plan.options.tensor_parallel_size,
        "kv_heads_per_device": plan.shape.num_kv_heads,
        "dtype": plan.dtype,
        "weights": plan.weight_kind,
        "published_weights": plan.published_weights,
        "kv_cache_dtype": plan.kv_dtype,
        "caches_latents": plan.model.config.latent is not None,
        "max_model_len": plan.max_model_len,
        "context": plan.context,
        "concurrency": concurrency,
        "block_size": spec.block_size,
        "block_bytes_per_device": spec.block_bytes,
        "blocks_per_sequence": cost.blocks,
        "kv_bytes_per_token": plan.together(spec.bytes_per_token),
        "kv_bytes_per_sequence": plan.together(cost.num_bytes),
        "kv_bytes_total": plan.together(cache),
        "kv_bytes_total_per_device": cache,
        "waste": round(cost.waste, 6),
        "weight_bytes": plan.options.tensor_parallel_size * plan.weights,
        "weight_bytes_per_device": plan.weights,
        "activation_bytes_per_device": sizing.activations,
        "bookkeeping_bytes": cost.blocks_for(concurrency) * sizing.block_bookkeeping_bytes,
        "swap_bytes": plan.swap_bytes,
        "swap_is_needed": sizing.swap_set_aside > 0,
        "host_prefix_bytes": sizing.config.kv_host_memory,
        "host_prefix_slots": sizing.num_prefix_blocks,
        "store_bytes": sizing.store_bytes,
        "draft_model_bytes": asdict(plan.draft_model),
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
            dtype: _figures(plan, plan.spec_of(dtype, plan.options.block_size), concurrency) for dtype in KV_FORMATS
        },
        # With max_model_len tokens reserved for each sequence.
        "contiguous": _figures(plan, plan.spec_of(plan.kv_dtype, "max"), concurrency),
        "sliding_window": _sliding_window(plan),
        "memory": _memory(plan),
        "price": decode_price(plan),
        "notes": list(_notes(plan)),
    }


def _figures(plan: Deployment, spec: KVCacheSpec, concurrency: int) -> Mapping[str, Any]:
    """The bytes of the sequences in a cache of another codec or block size."""
    cost = plan.cost_of(spec)
    figures: dict[str, Any] = {
        "kv_bytes_per_token": plan.together(spec.bytes_per_token),
        "kv_bytes_per_sequence": plan.together(cost.num_bytes),
        "kv_bytes_total": plan.together(cost.blocks_for(concurrency) * spec.block_bytes),
        "waste": round(cost.waste, 6),
    }
    if plan.cache_bytes is not None:
        figures["sequences_that_fit"] = plan.sequences_that_fit(cost)
    return figures


def _sliding_window(plan: Deployment) -> Mapping[str, Any] | None:
    """Memory saved by sliding windows compared with full attention; None if no layer has a window."""
    layers = plan.shape.kv_layers
    windows = sorted({layer.sliding_window for layer in layers if layer.sliding_window is not None})
    if not windows:
        return None
    full = plan.cost_of(KVCacheSpec.build(without_windows(layers), plan.spec.block_size, plan.kv_dtype))
    saved = full.num_bytes - plan.cost.num_bytes
    return {
        "windows": windows,
        "layers": sum(layer.sliding_window is not None for layer in layers),
        "kv_bytes_per_sequence_without": plan.together(full.num_bytes),
        "kv_bytes_saved_per_sequence": plan.together(saved),
        "share_saved": round(saved / full.num_bytes, 6),
    }


def _memory(plan: Deployment) -> Mapping[str, Any] | None:
    if plan.cache_bytes is None:
        return None
    pool = plan.pool() if plan.sequences_that_fit(plan.cost) else None
    figures: dict[str, Any] = {
        "memory_per_device": plan.options.memory,
        "kv_cache_bytes_per_device": plan.cache_bytes,
        "pool_blocks": pool.num_blocks if pool else 0,
        "pool_bytes_per_device": pool.num_bytes if pool else 0,
        "pool_bookkeeping_bytes": pool.num_blocks * plan.sizing.block_bookkeeping_bytes if pool else 0,
        "sequences_that_fit": plan.sequences_that_fit(plan.cost),
    }
    figures["by_context"] = _by_context(plan)
    figures["longest_context"] = _longest_context(plan)
    if plan.options.concurrency is not None:
        figures["fits"] = plan.options.concurrency <= figures["sequences_that_fit"]
    figures["smallest_tensor_parallel_size"] = _smallest_group(plan)
    return figures


def _by_context(plan: Deployment) -> list[dict[str, Any]]:
    """The number of users that fit, by context, up to the longest: with this cache, and in other formats."""
    contexts = [context for context in _CONTEXTS if context < plan.max_model_len] + [plan.max_model_len]
    specs = {dtype: plan.spec_of(dtype, plan.options.block_size) for dtype in (plan.kv_dtype, *_COMPARED)}
    return [
        {
            "context": context,
            "sequences_that_fit": plan.sequences_that_fit(plan.cost_of(plan.spec, context)),
            "by_kv_dtype": {n: plan.sequences_that_fit(plan.cost_of(spec, context)) for n, spec in specs.items()},
        }
        for context in contexts
    ]


def _longest_context(plan: Deployment) -> int:
    """The longest context at which `concurrency` sequences (default: 1) fit; 0: not one token fits."""
    wanted, spec, lengths = plan.options.concurrency or 1, plan.spec, range(1, plan.max_model_len + 1)
    return bisect_left(lengths, True, key=lambda n: plan.sequences_that_fit(plan.cost_of(spec, n)) < wanted)


def _smallest_group(plan: Deployment) -> int | None:
    """The smallest number of such devices that holds the workload; None if no possible number does."""
    for size in even_groups(plan.model):
        options = replace(plan.options, concurrency=plan.concurrency, tensor_parallel_size=size)
        try:
            group = Deployment(plan.model, options)
        except ConfigError:  # ranks of a CPU cannot share the model
            continue
        if group.sequences_that_fit(group.cost) >= plan.concurrency:
            return size
    return None


def _notes(plan: Deployment) -> tuple[str, ...]:
    notes = list(plan.model.notes)
    devices, kv_heads = plan.options.tensor_parallel_size, plan.model.num_kv_heads
    if devices > kv_heads:
        notes.append(f"each of the {kv_heads} KV heads is kept by {devices // kv_heads} of the {devices} devices")
    elif kv_heads % devices:
        notes.append(
            f"{kv_heads} KV heads are divided unevenly among {devices} devices: figures of one device are those of "
            f"the last, which has {plan.shape.num_kv_heads}"
        )
    if (published := plan.published_weights) is not None:
        as_published = f": --weights {published} counts it so" if published in WEIGHT_BITS else ""
        notes.append(f"weights are counted in {plan.dtype}, but published in {published}{as_published}")
    if devices > 1 and plan.options.device != "cpu":
        notes.append("for planning only: Octavo divides a model among several devices on CPUs alone")
    if (latent := plan.model.config.latent) is not None and plan.options.device != "cpu":
        per_token = plan.model.num_heads * latent.expanded_dim * len(plan.model.kv_layers) * 2
        notes.append(
            "for planning only: Octavo caches latents on CPUs alone; its cache on a GPU holds expanded keys and "
            f"values, {format_bytes(per_token)} a token in bfloat16"
        )
    if plan.options.weights in _NOT_LOADED:
        notes.append(f"for planning only: Octavo does not load {plan.options.weights} weights")
    if (budget := plan.budget) is not None and budget.left < 0:
        notes.append(
            f"weights ({format_bytes(budget.weights)}), activations ({format_bytes(budget.activations)}) "
            f"and swap space with prefixes in host memory ({format_bytes(budget.swap)}) alone are over the "
            f"{format_bytes(budget.available)} that may be used of each device"
        )
    return tuple(notes)
