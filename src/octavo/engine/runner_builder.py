"""Builds the device side of an engine: loads the model, sizes the cache, and joins them in a runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from octavo.attention import make_backend
from octavo.attention.base import AttentionBackend
from octavo.attention.native import NativeAttention
from octavo.checkpoint.families import family_name
from octavo.checkpoint.recommended import model_pooling, sampling_defaults
from octavo.config import EngineConfig
from octavo.engine.inspection import EngineInfo
from octavo.engine.model_loading import LoadTarget, choose_kv_scales, choose_target, load_with_threads
from octavo.engine.ranks import bound_cpus, followed_threads, start_ranks
from octavo.engine.sizes import size_before_loading, size_loaded
from octavo.errors import ConfigError
from octavo.kvcache.block import NULL_BLOCK
from octavo.kvcache.spec import MEASURES_NO_COPIES, KVCacheSpec
from octavo.models.base import CausalLM
from octavo.models.native_decoder import NativeDecoder, Rank
from octavo.planner.machine import (
    FollowedCores,
    numa_nodes,
    usable_cores,
)
from octavo.planner.sizing import Sizing
from octavo.runner.graphs import Capture, CudaCapture
from octavo.runner.ranks import RankGroup
from octavo.runner.runner import ModelRunner
from octavo.runner.warm_up import warm_up
from octavo.sampling.sampler import warm_up_choice
from octavo.storage.arena import KVArena
from octavo.storage.host import HostTier
from octavo.units import counted

logger = logging.getLogger(__name__)

# The maximum time spent on recording decode steps at start-up.
_RECORDING_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts(EngineInfo):
    """`EngineInfo`, and the sizes of the cache, of which a runner may hold a rank's share.

    Attributes:
        kv_scales: identifies the scales with which blocks are coded; empty if the codec has no chosen scales.
    """

    spec: KVCacheSpec
    num_blocks: int
    num_host_blocks: int
    num_prefix_blocks: int
    kv_scales: str


def build_runner(config: EngineConfig, set_aside: int = 0) -> tuple[ModelRunner, RunnerFacts]:
    """Load the model and allocate its cache, in the process that calls this.

    Args:
        set_aside: bytes of a CPU's memory that were allocated for something else, but not written yet.

    Raises:
        ModelError, ConfigError: see `build_engine`.
    """
    undo = ExitStack()  # of what outlives a call: the other ranks, and the CPUs that this process is bound to
    try:
        return _build(config, set_aside, undo)
    except BaseException:
        undo.close()
        raise


def _build(config: EngineConfig, set_aside: int, undo: ExitStack) -> tuple[ModelRunner, RunnerFacts]:
    target = choose_target(config)
    sizing = size_before_loading(target, set_aside)
    cpus = bound_cpus(target, undo)
    followed = FollowedCores(lambda: usable_cores(cpus))
    threads = followed_threads(target.config, followed, cpus)
    num_threads = threads()
    if target.on_cpu:
        where = f"{followed.cores}, {counted(len(numa_nodes(allowed=cpus)), 'NUMA node')}"
        ranks_here = counted(len(target.config.own_ranks), "rank")
        logger.info("%s: computing with %s of %s", where, ranks_here, counted(num_threads, "thread"))
    if target.config.num_ranks == 1:
        return _join(target, sizing, load_with_threads(target, num_threads), threads, undo)
    ranks = start_ranks(target, sizing, num_threads, cpus, undo)
    model = load_with_threads(target, num_threads, Rank(target.share(0), ranks.native))
    return _join(target, sizing, model, lambda: ranks.use_threads(threads()), undo, ranks)


def _join(
    target: LoadTarget,
    sizing: Sizing,
    model: CausalLM,
    num_threads: Callable[[], int],
    undo: ExitStack,
    ranks: RankGroup | None = None,
) -> tuple[ModelRunner, RunnerFacts]:
    """Size the cache, and join it with the loaded model."""
    config, source, device = target.config, target.source, model.device
    weight_bytes = model.weight_bytes + (0 if ranks is None else ranks.loaded())
    sizing = size_loaded(sizing, config, model, weight_bytes)
    max_model_len, spec, pool = sizing.max_model_len, sizing.spec, sizing.pool()
    sizing.warn_if_short(pool)
    num_blocks, num_host_blocks = pool.num_blocks, sizing.num_host_blocks(pool)
    num_prefix_blocks = sizing.num_prefix_blocks
    sizing.warn_if_swap_is_short(num_host_blocks)
    if ranks is not None:
        num_blocks, swapped = ranks.agree(num_blocks, num_host_blocks + num_prefix_blocks)
        num_host_blocks = max(0, swapped - num_prefix_blocks)
    attention = make_backend(config.attention_backend, device)
    arena = KVArena(spec if ranks is None else sizing.rank_spec(0), num_blocks, device, attention.layout)
    host = HostTier(num_host_blocks + num_prefix_blocks, arena.spec.block_bytes)
    _require_kernels(config, model, arena, attention)
    kv_scales = choose_kv_scales(config, source, arena, model)
    if ranks is not None:
        ranks.begin(num_blocks, host.num_blocks)
    runner = ModelRunner(
        model,
        arena,
        attention,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        host=host,
        num_threads=num_threads,
        capture=_capture(config, attention, arena, device),
        ranks=ranks,
        on_close=undo.close,
    )
    if device.type == "cuda":
        _warm_up(config, runner)
    facts = RunnerFacts(
        model_name=config.model,
        max_num_seqs=config.max_num_seqs,
        pooling=model_pooling(config.pooling, source),
        limits=config.limits,
        default_sampling=sampling_defaults(config.generation_config, source),
        context_length=model.max_position_embeddings,
        budget_refusal=model.budget_refusal,
        measures_refusal=_measures_refusal(spec, device, has_ranks=ranks is not None),
        spec=spec,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_prefix_blocks=num_prefix_blocks,
        max_model_len=max_model_len,
        kv_scales=kv_scales,
        vocab_size=model.vocab_size,
        hidden_size=target.model.hidden_size,
        weight_bytes=weight_bytes,
        architecture=family_name(target.model.architecture),
    )
    for layer in arena.calibrated_layers.values():
        # Only from now on, because the steps computed to warm up held no real text.
        layer.finds_scales = config.calculate_kv_scales
    return runner, facts


def _warm_up(config: EngineConfig, runner: ModelRunner) -> None:
    """Compile kernels and record decode steps now, so that no request waits for either."""
    started = time.perf_counter()
    arena = runner.arena
    max_tokens = min(config.max_num_batched_tokens, runner.max_model_len)
    warm_up(runner, arena.spec, arena.num_blocks, max_num_seqs=config.max_num_seqs, max_tokens=max_tokens)
    # Forks and preempted sequences copy blocks, and structured outputs draw under masks: more kernels to compile.
    arena.copy_blocks([(NULL_BLOCK, NULL_BLOCK)])
    warm_up_choice(runner.model.vocab_size, runner.model.device)
    logger.info("warmed up in %.1f s", time.perf_counter() - started)
    if runner.graphs is not None:
        started = time.perf_counter()
        count = runner.graphs.record(_RECORDING_S)
        logger.info("captured CUDA graphs of %d decode sizes in %.1f s", count, time.perf_counter() - started)
        torch.cuda.empty_cache()  # what steps took on the stream that records


def _capture(config: EngineConfig, attention: AttentionBackend, arena: KVArena, device: torch.device) -> Capture | None:
    """Return the recorder of decode steps on a GPU; None if a layer lacks kernels, so that steps wait for the host."""
    if device.type != "cuda" or config.enforce_eager or attention.name != "triton":
        return None
    from octavo.attention.triton.backend import TritonAttention

    return CudaCapture(device) if all(map(TritonAttention.reads, arena.layers)) else None


def _measures_refusal(spec: KVCacheSpec, device: torch.device, *, has_ranks: bool) -> str:
    """Return why a budget of a request cannot decide by attention; empty if it can."""
    if device.type != "cpu" or has_ranks:
        return "attention is measured on a CPU, with tensor_parallel_size 1"
    return "" if spec.int8_copies is None else f"it {MEASURES_NO_COPIES}"


def _require_kernels(config: EngineConfig, model: CausalLM, arena: KVArena, attention: AttentionBackend) -> None:
    """Refuse options that need the C++ kernels, which alone fix the order of sums and serve ranks, without them."""
    if not config.deterministic and config.num_ranks == 1:
        return
    if not isinstance(model, NativeDecoder):
        reason = (
            f"{model.architecture} in {model.dtype} does not run on the native decoder here, with model_impl "
            f"{config.model_impl!r} and attention_backend {config.attention_backend!r}"
        )
    elif not (isinstance(attention, NativeAttention) and all(attention.supports(layer) for layer in arena.layers)):
        reason = (
            f"blocks of {arena.spec.block_size} tokens in {arena.spec.dtype} with attention "
            f"{attention.name!r} do not run on the native kernels, which need a block_size and heads in multiples of "
            "16 (values in int4: 32), in the model's dtype, fp8, int8, k8v4 or int4"
        )
    else:
        return
    several = f"tensor_parallel_size is {config.num_ranks}"
    raise ConfigError(f"{'deterministic cannot be guaranteed' if config.deterministic else several}: {reason}")
