"""Builds the device side of an engine: loads the model, sizes the cache, and joins them in a runner."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import octavo
from octavo import kernels
from octavo.attention import make_backend
from octavo.attention.base import AttentionBackend
from octavo.attention.native import NativeAttention
from octavo.checkpoint.families import family_name
from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.gguf_requantize import loaded_bytes
from octavo.checkpoint.model_source import (
    ModelFormat,
    ModelSource,
    load_model_config,
    model_fingerprint,
    model_of,
    stored_format,
)
from octavo.checkpoint.recommended import model_pooling, sampling_defaults
from octavo.config import EngineConfig
from octavo.engine.inspection import EngineInfo
from octavo.engine.model_loading import LoadTarget, choose_target, dtype_name, load_with_threads
from octavo.errors import ConfigError, ExecutorError, ModelError
from octavo.kvcache.block import NULL_BLOCK
from octavo.kvcache.spec import MEASURES_NO_COPIES, KVCacheSpec
from octavo.models.base import CausalLM
from octavo.models.kv_scales import choose_scales
from octavo.models.linear import PackedLinear
from octavo.models.native_decoder import NativeDecoder, Rank, inner_widths
from octavo.planner.machine import (
    CPU_MEMORY_SHARE,
    FollowedCores,
    available_memory,
    bind_threads,
    chosen_cpus,
    limited_memory,
    num_cores,
    numa_nodes,
    rank_cpus,
    usable_cores,
)
from octavo.planner.model_shape import shape_of_checkpoint
from octavo.planner.sizing import Sizing
from octavo.planner.sources import shape_of_source
from octavo.runner.graphs import Capture, CudaCapture
from octavo.runner.ranks import RankGroup, RankJob
from octavo.runner.runner import ModelRunner
from octavo.runner.warm_up import warm_up
from octavo.sampling.sampler import warm_up_choice
from octavo.storage.arena import KVArena
from octavo.tiers.host import HostTier

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
    target = choose_target(config)
    sizing = _size_before_loading(target, set_aside)
    cpus = _bound_cpus(target)
    followed = FollowedCores(lambda: usable_cores(cpus))
    threads = _followed_threads(target.config, followed, cpus)
    num_threads = threads()
    if target.on_cpu:
        where = f"{followed.cores}, {len(numa_nodes(allowed=cpus))} NUMA nodes"
        logger.info("%s: %d threads in each of %d processes", where, num_threads, len(target.config.own_ranks))
    if target.config.num_ranks == 1:
        return _join(target, sizing, load_with_threads(target, num_threads), threads)
    ranks = _start_ranks(target, sizing, num_threads, cpus)
    try:
        model = load_with_threads(target, num_threads, Rank(target.share(0), ranks.native))
        return _join(target, sizing, model, lambda: ranks.use_threads(threads()), ranks=ranks)
    except BaseException:
        ranks.close()
        raise


def serve_ranks(config: EngineConfig) -> None:
    """Compute what machine 0 sends, as another of several machines, until that or a rank of this machine is lost.

    Raises:
        ModelError, ConfigError: see `build_engine`; or machine 0 runs something else.
        ExecutorError: machine 0 cannot be reached, has ended, or has started the group again.
    """
    target = choose_target(config)
    sizing, first = _size_before_loading(target, 0), target.config.own_ranks.start
    cpus = _bound_cpus(target)
    threads = _followed_threads(target.config, FollowedCores(lambda: usable_cores(cpus)), cpus)
    ranks, ended = _start_ranks(target, sizing, num_threads := threads(), cpus), threading.Event()

    def follow_limits() -> None:
        while not ended.wait(FollowedCores.INTERVAL):
            ranks.use_threads(threads())

    try:
        model = load_with_threads(target, num_threads, Rank(target.share(first), ranks.native))
        assert isinstance(model, NativeDecoder)
        sizing = _size_loaded(sizing, target.config, model, model.weight_bytes + ranks.loaded())
        pool = sizing.pool()
        num_blocks, num_host_blocks = ranks.agree(
            pool.num_blocks, sizing.num_host_blocks(pool) + sizing.num_prefix_blocks
        )
        arena = KVArena(sizing.rank_spec(first), num_blocks)
        host = HostTier(num_host_blocks, arena.spec.block_bytes)
        _choose_scales(target.config, target.source, arena, model)
        ranks.begin(num_blocks, num_host_blocks)
        threading.Thread(target=follow_limits, name="octavo-limits", daemon=True).start()
        logger.info("machine %d computes for machine 0", config.node_rank)
        model.follow(arena.layers, arena.memory, host.memory)
    except RuntimeError as error:
        raise ExecutorError(f"machine {config.node_rank} has ended: {error}") from error
    finally:
        ended.set()
        ranks.close()


def _bound_cpus(target: LoadTarget) -> frozenset[int]:
    """Return the CPUs that the engine may use; with `cpu_list`, this process is bound to them."""
    cpus = chosen_cpus(target.config.cpu_list)
    if target.config.cpu_list is not None:
        logger.info("running on the CPUs of --cpu-list: %s", target.config.cpu_list)
        bind_threads(cpus)
    return cpus


def _followed_threads(config: EngineConfig, followed: FollowedCores, cpus: frozenset[int]) -> Callable[[], int]:
    """Return what tells how many threads each rank of this machine is to have, which changes with its limits."""
    if config.num_threads is not None:
        num_threads = config.num_threads
        return lambda: num_threads
    if (count := len(config.own_ranks)) == 1:
        return followed.num_threads
    of_ranks = rank_cpus(numa_nodes(allowed=cpus), count)
    # Ranks have equal shares of the work, and wait for the one with the fewest cores.
    most = min(num_cores(own) // of_ranks.count(own) for own in of_ranks)
    return lambda: max(1, min(most, followed.num_threads() // count))


def _start_ranks(target: LoadTarget, sizing: Sizing, num_threads: int, cpus: frozenset[int]) -> RankGroup:
    """Start the other ranks of this machine, which load their shares while this one loads its own."""
    config, model_config = target.config, target.model
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)  # of a step, at most
    spec, experts = sizing.spec, model_config.experts
    widths = [model_config.hidden_size, model_config.num_heads * model_config.value_dim, *inner_widths(model_config)]
    if experts is not None:
        widths.append(experts.active * experts.intermediate_size)
    memory = (
        kernels.step_message_bytes(
            num_tokens=tokens,
            num_seqs=tokens,  # each token of a draft is a sequence of its own
            num_groups=len(spec.groups),
            max_blocks=spec.blocks_for_tokens(sizing.max_model_len) + 1,
            rotation_bytes=len(set(model_config.layer_ropes)) * model_config.head_dim * 4,
        ),
        # In the last layer, a token that is drawn from and scored or pooled has two rows.
        2 * tokens * max(widths) * target.dtype.itemsize,
        tokens * model_config.vocab_size * 4,
    )
    return RankGroup(
        [
            RankJob(
                config=config,
                rank=rank,
                spec=sizing.rank_spec(rank),
                dtype=dtype_name(target.dtype),
                num_threads=num_threads,
                file=-1,
                memory=memory,
                log_level=logging.getLogger().getEffectiveLevel(),
                cpus=own,
            )
            for rank, own in zip(
                config.own_ranks, rank_cpus(numa_nodes(allowed=cpus), len(config.own_ranks)), strict=True
            )
        ],
        cpus,
        _describe(target, sizing, memory) if config.nnodes > 1 else "",
    )


def _describe(target: LoadTarget, sizing: Sizing, memory: tuple[int, int, int]) -> str:
    """Return what all machines must have alike."""
    config, specs = target.config, [sizing.rank_spec(rank) for rank in range(target.config.num_ranks)]
    options = config.quantization, config.deterministic, config.kv_scales, target.dtype
    return repr((octavo.__version__, model_fingerprint(target.source.path), *options, memory, specs))


def load_share(job: RankJob) -> NativeDecoder:
    """Load a rank's share of the model, in the process that calls this."""
    source = model_of(job.config)
    dtype: torch.dtype = getattr(torch, job.dtype)
    target = LoadTarget(job.config, source, load_model_config(source), dtype, torch.device("cpu"))
    model = load_with_threads(target, job.num_threads, Rank(target.share(job.rank), job.join()))
    assert isinstance(model, NativeDecoder)
    return model


def choose_share_of_scales(job: RankJob, arena: KVArena, model: NativeDecoder) -> None:
    """Choose the scales of a rank's share of the cache, as rank 0 chooses its own."""
    _choose_scales(job.config, model_of(job.config), arena, model)


def _join(
    target: LoadTarget, sizing: Sizing, model: CausalLM, num_threads: Callable[[], int], ranks: RankGroup | None = None
) -> tuple[ModelRunner, RunnerFacts]:
    """Size the cache, and join it with the loaded model."""
    config, source, device = target.config, target.source, model.device
    default_sampling = sampling_defaults(config.generation_config, source)
    pooling = model_pooling(config.pooling, source)
    weight_bytes = model.weight_bytes + (0 if ranks is None else ranks.loaded())
    sizing = _size_loaded(sizing, config, model, weight_bytes)
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
    kv_scales = _choose_scales(config, source, arena, model)
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
    )
    if device.type == "cuda":
        _warm_up(config, runner)
    facts = RunnerFacts(
        model_name=config.model,
        max_num_seqs=config.max_num_seqs,
        pooling=pooling,
        limits=config.limits,
        default_sampling=default_sampling,
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


def _choose_scales(config: EngineConfig, source: ModelSource, arena: KVArena, model: CausalLM) -> str:
    """Choose the scales of calibrated codecs; returns what identifies them, empty if there are none.

    Raises:
        ConfigError: scales are given for a cache that has none.
    """
    dtype = arena.spec.dtype
    if calibrated := arena.calibrated_layers:
        share = model.share if isinstance(model, NativeDecoder) and model.share.count > 1 else None
        calculate = config.calculate_kv_scales
        return choose_scales(calibrated, source, dtype, file=config.kv_scales, calculate=calculate, share=share)
    if config.kv_scales is not None:
        raise ConfigError(
            f"kv_scales is for fp8 and nvfp4; a KV cache in {dtype} has no scales that are chosen beforehand"
        )
    return ""


def _capture(config: EngineConfig, attention: AttentionBackend, arena: KVArena, device: torch.device) -> Capture | None:
    """Return what records decode steps on a GPU; None if a layer lacks kernels, so that steps wait for the host."""
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
    """Refuse what must run on the C++ kernels and does not: they alone control their order of sums, and serve ranks."""
    if not config.deterministic and config.num_ranks == 1:
        return
    if not isinstance(model, NativeDecoder):
        reason = f"{model.architecture} in {model.dtype} does not run on the native decoder here"
    elif not (isinstance(attention, NativeAttention) and all(attention.supports(layer) for layer in arena.layers)):
        reason = (
            f"blocks of {arena.spec.block_size} tokens in {arena.spec.dtype} with attention "
            f"{attention.name!r} do not run on the native kernels (block_size a multiple of 16, the model's dtype)"
        )
    else:
        return
    several = f"tensor_parallel_size is {config.num_ranks}"
    raise ConfigError(f"{'deterministic cannot be guaranteed' if config.deterministic else several}: {reason}")


def _size_before_loading(target: LoadTarget, set_aside: int) -> Sizing:
    """Compute the sizes from the configuration alone, so that a model that cannot fit is refused before it is loaded.

    Raises:
        ConfigError: max_model_len exceeds what the model supports, or there is too little memory.
    """
    config, native = target.config, target.runs_on_kernels
    packed = PackedLinear.supports(torch.empty(0, dtype=target.dtype, device=target.device))
    try:
        shape = shape_of_source(target.source, target.model)
    except ModelError:
        # Leave it to the loader to refuse such a model; otherwise it is sized once it is loaded.
        shape = shape_of_checkpoint(target.source.name, target.model, 0)
    sizing = Sizing(
        config=config,
        shape=shape,
        dtype=dtype_name(target.dtype),
        kv_dtype=shape.kv_dtype(config.kv_cache_dtype, dtype_name(target.dtype)),
        available=limited_memory(
            available_memory() - set_aside if target.on_cpu else _available_on_gpu(config, target.device)
        ),
        cache_share=CPU_MEMORY_SHARE if target.on_cpu else 1.0,
        tied_head_copied=target.model.runs_natively and packed and not native,
        loaded_weights=_stored_bytes(target) if native else None,
        host_available=None if target.on_cpu else limited_memory(available_memory()),
    )
    sizing.num_host_blocks(sizing.pool())
    return sizing


def _size_loaded(sizing: Sizing, config: EngineConfig, model: CausalLM, weight_bytes: int) -> Sizing:
    """Return the sizes with the actual memory of the loaded model."""
    kv_layers = model.kv_layers if config.num_ranks == 1 else sizing.shape.kv_layers
    whole = replace(sizing.shape.config, max_position_embeddings=model.max_position_embeddings)
    shape = replace(sizing.shape, kv_layers=kv_layers, config=whole)
    return replace(
        sizing,
        shape=shape,
        kv_dtype=shape.kv_dtype(config.kv_cache_dtype, dtype_name(model.dtype)),
        loaded_weights=weight_bytes,
    )


def _stored_bytes(target: LoadTarget) -> int | None:
    """Return the bytes of weights that stay quantised; None if they are dequantised."""
    config, source = target.config, target.source
    if config.quantization == "none" or target.dtype is torch.float32:
        return None
    if source.format is not ModelFormat.GGUF:
        # The kernels' formats take up to a fifth more than the file; the loaded model is counted exactly.
        files = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
        share = {"q8_0": 0.55, "q4_0": 0.3}.get(config.quantization, 1.2)
        return int(files * share) if share < 1 or stored_format(source) != "none" else None
    return loaded_bytes(GGUFFile(source.path))


def _available_on_gpu(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1.0 - config.gpu_memory_utilization))
