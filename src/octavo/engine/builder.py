"""Build an engine from options: find and load the model, size the cache, join the parts."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo import kernels
from octavo.attention import make_backend
from octavo.attention.base import AttentionBackend
from octavo.attention.native import NativeAttention
from octavo.checkpoint.model_source import ModelSource, load_model_config, model_fingerprint, resolve_model
from octavo.config import EngineConfig, format_bytes
from octavo.engine.core import EngineCore
from octavo.engine.sizing import size_before_loading, size_loaded
from octavo.errors import ConfigError, ModelNotFoundError
from octavo.kvcache.eviction import RecomputeCost
from octavo.models.base import CausalLM
from octavo.models.loader import open_weights
from octavo.models.native_decoder import NativeDecoder, make_decoder
from octavo.models.ops import LayerOps
from octavo.planner.startup import StartSizing
from octavo.runner.runner import ModelRunner
from octavo.runner.swapping import measure_restore_speed
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler, needs_restore_speed
from octavo.scheduler.preemption import RestoreSpeed
from octavo.storage.arena import KVArena
from octavo.text.tokenizer import Tokenizer
from octavo.tiers.host import HostTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    source: ModelSource
    sizing: StartSizing
    model: CausalLM
    tokenizer: Tokenizer | None
    hidden_size: int


def build_engine(config: EngineConfig) -> EngineCore:
    """Load `config.model` and make an engine of it.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the options contradict each other, the model or the machine.
    """
    started = time.perf_counter()
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    device = _device(config)
    # Loading is thousands of short steps: with several threads each would wait for the slowest, which on a busy machine
    # took four times as long.
    torch.set_num_threads(1)
    try:
        loaded = _load(config, device)
    finally:
        torch.set_num_threads(num_threads)
    if kernels.available():
        kernels.set_num_threads(num_threads)
    model = loaded.model
    sizing = size_loaded(loaded.sizing, config, model)
    max_model_len, spec, pool = sizing.max_model_len, sizing.spec, sizing.pool()
    sizing.warn_if_short(pool)
    arena = KVArena(spec, pool.num_blocks, device)
    host = HostTier(sizing.num_host_blocks(pool), spec.block_bytes)
    sizing.warn_if_swap_is_short(host.num_blocks)
    attention = make_backend(config.attention_backend, device)
    if config.deterministic:
        _require_deterministic(model, arena, attention)
    kv = assemble_cache(
        config,
        spec,
        pool.num_blocks,
        num_host_blocks=host.num_blocks,
        # Quantised products round activations: their keys and values are not those of the dequantised weights.
        identity=(model_fingerprint(Path(loaded.source.path)), spec.dtype, config.quantization),
        cost=RecomputeCost(spec.block_size, loaded.hidden_size),
    )
    runner = ModelRunner(
        model, arena, attention, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, host=host
    )
    scheduler = assemble_scheduler(config, kv, max_model_len, restore_speed=_restore_speed(config, runner, host))
    logger.info(
        "%s: %s of weights, %d blocks of %d tokens (%s of KV cache), swap space: %s, attention: %s, ready in %.1f s",
        config.model,
        format_bytes(model.weight_bytes),
        pool.usable_blocks,
        spec.block_size,
        format_bytes(pool.num_bytes),
        format_bytes(host.nbytes),
        attention.name,
        time.perf_counter() - started,
    )
    tokenizer = loaded.tokenizer
    return EngineCore(
        config=config,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset()),
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device here; use device='cpu'")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _load(config: EngineConfig, device: torch.device) -> _Loaded:
    source = resolve_model(config.model)
    model_config = load_model_config(source)
    sizing = size_before_loading(config, source, model_config, _dtype(config, device), device)
    if not model_config.runs_natively:
        logger.info("%s runs through transformers: %s", config.model, model_config.transformers_reason)
        # One after the other: both may import transformers, whose lazy modules two threads would import at once.
        model: CausalLM = _load_through_transformers(config, source, device)
        return _Loaded(source, sizing, model, _load_tokenizer(source), model_config.hidden_size)
    with ThreadPoolExecutor(max_workers=1) as beside:
        tokenizer = beside.submit(_load_tokenizer, source)
        # The reference backend is what the fast paths are held to: it takes no kernel anywhere.
        ops = LayerOps() if config.attention_backend == "reference" else None
        weights = open_weights(source, model_config)
        model = make_decoder(
            model_config,
            weights,
            dtype=_dtype(config, device),
            device=device,
            quantised=config.quantization == "auto",
            ops=ops,
        )
        return _Loaded(source, sizing, model, tokenizer.result(), model_config.hidden_size)


def _load_through_transformers(config: EngineConfig, source: ModelSource, device: torch.device) -> CausalLM:
    from octavo.models.transformers_bridge import TransformersModel

    return TransformersModel.load(source.path, dtype=_dtype(config, device), device=device)


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    try:
        return Tokenizer.from_source(source)
    except ModelNotFoundError as error:
        logger.warning("%s; prompts must be token ids", error)
        return None


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    # Without hardware bf16 a CPU emulates it, several times slower than float32.
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def _require_deterministic(model: CausalLM, arena: KVArena, attention: AttentionBackend) -> None:
    """Refuse configurations that are not bit-deterministic: only the C++ kernels control their order of reduction."""
    if not isinstance(model, NativeDecoder):
        reason = f"{model.architecture} in {model.dtype} does not run on the native decoder here"
    elif not (isinstance(attention, NativeAttention) and all(attention.supports(layer) for layer in arena.layers)):
        reason = (
            f"blocks of {arena.spec.block_size} tokens in {arena.spec.dtype} with attention "
            f"{attention.name!r} do not run on the native kernels (block_size a multiple of 16, the model's dtype)"
        )
    else:
        return
    raise ConfigError(f"deterministic cannot be promised: {reason}")


def _restore_speed(config: EngineConfig, runner: ModelRunner, host: HostTier) -> RestoreSpeed | None:
    """Measure swapping and prefill speed, if the choice between swapping and recomputation depends on them."""
    if not needs_restore_speed(config, host.num_blocks):
        return None
    max_tokens = min(config.max_num_batched_tokens, runner.max_model_len)
    speed = measure_restore_speed(runner, host, max_tokens=max_tokens)
    logger.info(
        "preemption: swapping moves %s/s, prefill computes %.0f tokens/s: the cheaper way is taken for each victim",
        format_bytes(runner.arena.spec.block_bytes / speed.seconds_per_block),
        1 / speed.seconds_per_token,
    )
    return speed
