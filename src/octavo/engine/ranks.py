"""The ranks that share a model: starts those of this machine, loads their shares, and computes for machine 0."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch

import octavo
from octavo import kernels
from octavo.checkpoint.model_source import load_model_config, model_fingerprint, model_of
from octavo.config import EngineConfig
from octavo.engine.model_loading import LoadTarget, choose_kv_scales, choose_target, dtype_name, load_with_threads
from octavo.engine.sizes import size_before_loading, size_loaded
from octavo.errors import ExecutorError
from octavo.models.native_decoder import NativeDecoder, Rank, inner_widths
from octavo.planner.machine import (
    FollowedCores,
    bind_threads,
    chosen_cpus,
    num_cores,
    numa_nodes,
    rank_cpus,
    usable_cores,
)
from octavo.planner.sizing import Sizing
from octavo.runner.ranks import RankGroup, RankJob
from octavo.storage.arena import KVArena
from octavo.storage.host import HostTier

logger = logging.getLogger(__name__)


def bound_cpus(target: LoadTarget, undo: ExitStack) -> frozenset[int]:
    """Return the CPUs that the engine may use. With `cpu_list`, this process is bound to them; `undo` unbinds it."""
    cpus = chosen_cpus(target.config.cpu_list)
    if target.config.cpu_list is not None:
        logger.info("running on the CPUs of --cpu-list: %s", target.config.cpu_list)
        _bind_until(undo, cpus)
    return cpus


def _bind_until(undo: ExitStack, cpus: frozenset[int]) -> None:
    undo.callback(bind_threads, frozenset(os.sched_getaffinity(0)))
    bind_threads(cpus)


def followed_threads(config: EngineConfig, followed: FollowedCores, cpus: frozenset[int]) -> Callable[[], int]:
    """Return a function that returns the threads per rank of this machine, which follow its limits."""
    if config.num_threads is not None:
        num_threads = config.num_threads
        return lambda: num_threads
    if (count := len(config.own_ranks)) == 1:
        return followed.num_threads
    of_ranks = rank_cpus(numa_nodes(allowed=cpus), count)
    # Ranks have equal shares of the work, and wait for the one with the fewest cores.
    most = min(num_cores(own) // of_ranks.count(own) for own in of_ranks)
    return lambda: max(1, min(most, followed.num_threads() // count))


def start_ranks(
    target: LoadTarget, sizing: Sizing, num_threads: int, cpus: frozenset[int], undo: ExitStack
) -> RankGroup:
    """Start the other ranks of this machine, which load their shares while this one loads its own.

    Until `undo` is closed, they run, and this process is bound to the CPUs of its rank.
    """
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
    of_ranks = rank_cpus(numa_nodes(allowed=cpus), len(config.own_ranks))
    jobs = [
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
        for rank, own in zip(config.own_ranks, of_ranks, strict=True)
    ]
    ranks = RankGroup(jobs, _describe(target, sizing, memory) if config.nnodes > 1 else "")
    undo.callback(ranks.close)
    if of_ranks[0] != cpus:
        _bind_until(undo, of_ranks[0])
    return ranks


def _describe(target: LoadTarget, sizing: Sizing, memory: tuple[int, int, int]) -> str:
    """Return a description that must be equal on all machines."""
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


def serve_ranks(config: EngineConfig) -> None:
    """Compute the steps that machine 0 sends, until machine 0 or a rank of this machine is lost.

    Raises:
        ModelError, ConfigError: see `build_engine`; or machine 0 runs something else.
        ExecutorError: machine 0 cannot be reached, has ended, or has started the group again.
    """
    target = choose_target(config)
    sizing, first = size_before_loading(target, 0), target.config.own_ranks.start
    undo = ExitStack()
    cpus = bound_cpus(target, undo)
    threads = followed_threads(target.config, FollowedCores(lambda: usable_cores(cpus)), cpus)
    ranks, ended = start_ranks(target, sizing, num_threads := threads(), cpus, undo), threading.Event()

    def follow_limits() -> None:
        while not ended.wait(FollowedCores.INTERVAL):
            ranks.use_threads(threads())

    try:
        model = load_with_threads(target, num_threads, Rank(target.share(first), ranks.native))
        assert isinstance(model, NativeDecoder)
        sizing = size_loaded(sizing, target.config, model, model.weight_bytes + ranks.loaded())
        pool = sizing.pool()
        num_blocks, num_host_blocks = ranks.agree(
            pool.num_blocks, sizing.num_host_blocks(pool) + sizing.num_prefix_blocks
        )
        arena = KVArena(sizing.rank_spec(first), num_blocks)
        host = HostTier(num_host_blocks, arena.spec.block_bytes)
        choose_kv_scales(target.config, target.source, arena, model)
        ranks.begin(num_blocks, num_host_blocks)
        threading.Thread(target=follow_limits, name="octavo-limits", daemon=True).start()
        logger.info("machine %d computes for machine 0", config.node_rank)
        model.follow(arena.layers, arena.memory, host.memory)
    except RuntimeError as error:
        raise ExecutorError(f"machine {config.node_rank} has ended: {error}") from error
    finally:
        ended.set()
        undo.close()
