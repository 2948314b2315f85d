"""Build an engine from options: find and load the model, size the cache, join the parts."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from octavo import kernels
from octavo.attention import make_backend
from octavo.attention.base import AttentionBackend
from octavo.attention.native import NativeAttention
from octavo.checkpoint.generation_config import sampling_defaults
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelSource, load_model_config, model_fingerprint, resolve_model
from octavo.checkpoint.pooling_config import model_pooling
from octavo.config import EngineConfig, format_bytes
from octavo.engine.core import EngineCore
from octavo.engine.sizing import size_before_loading, size_loaded
from octavo.engine.tiers import join_stores, tier_identity
from octavo.errors import ConfigError, ModelNotFoundError
from octavo.grammar.compiler import GrammarCompiler
from octavo.kvcache.eviction import RecomputeCost
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.base import CausalLM
from octavo.models.kv_scales import choose_scales
from octavo.models.loader import open_weights
from octavo.models.native_decoder import NativeDecoder, make_decoder
from octavo.models.ops import LayerOps
from octavo.planner.machine import default_num_threads
from octavo.runner.executor import Executor, ProcessExecutor
from octavo.runner.graphs import Capture, CudaCapture
from octavo.runner.recording import RecordingExecutor
from octavo.runner.restore_speed import measure_restore_speed
from octavo.runner.runner import ModelRunner
from octavo.runner.warm_up import warm_up
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler, needs_restore_speed
from octavo.scheduler.plan_log import PlanLog
from octavo.scheduler.preemption import RestoreSpeed
from octavo.storage.arena import KVArena
from octavo.text.chat_template import check_template
from octavo.text.tokenizer import Tokenizer
from octavo.tiers.host import HostTier
from octavo.tiers.shared_file import SharedFile

logger = logging.getLogger(__name__)

# Characters of a chat template.
_MOST_TEMPLATE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What the engine needs to know of a runner, wherever that is.

    Attributes:
        layout: of a block's bytes, which other engines must share to read them.
        kv_scales: what tells blocks of other scales apart; empty where the codec has none of its own.
        restore_speed: measured where the choice between swapping and computing again depends on it.
        device: what it computes on, as torch calls it ("cpu", "cuda").
    """

    spec: KVCacheSpec
    num_blocks: int
    num_host_blocks: int
    num_prefix_blocks: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
    attention: str
    layout: str
    kv_scales: str
    restore_speed: RestoreSpeed | None
    device: str


def build_engine(config: EngineConfig, *, prepare_grammars: bool = False) -> EngineCore:
    """Load `config.model` and make an engine of it.

    Args:
        prepare_grammars: read the tokenizer for structured outputs while the model is loaded. That takes a third of a
            second, in which no other Python code runs; else the first structured output waits for it, and all others.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the options contradict each other, the model or the machine.
    """
    started = time.perf_counter()
    source = resolve_model(config.model)
    default_sampling = sampling_defaults(config.generation_config, source)
    pooling = model_pooling(config.pooling, source)
    runner, facts, (tokenizer, grammars), host = _start_runner(config, source, prepare_grammars)
    if isinstance(runner, ModelRunner):
        runner.grammars = grammars  # one compiles for both
    try:
        if config.record_plans is not None:
            runner = RecordingExecutor(runner, PlanLog(config.record_plans, _recorded_facts(config, facts)))
        # Quantised products round activations: their keys and values are not those of the dequantised weights.
        identity = (
            model_fingerprint(Path(source.path)),
            facts.spec.dtype,
            config.quantization,
            facts.layout,
            *([facts.kv_scales] if facts.kv_scales else []),
            *tier_identity(config, Path(source.path), facts.attention),
        )
        kv = assemble_cache(
            config,
            facts.spec,
            facts.num_blocks,
            num_host_blocks=facts.num_host_blocks,
            num_prefix_blocks=facts.num_prefix_blocks,
            identity=identity,
            cost=RecomputeCost(facts.spec.block_size, facts.hidden_size),
        )
        scheduler = assemble_scheduler(config, kv, facts.max_model_len, restore_speed=facts.restore_speed)
        tiers = join_stores(config, scheduler, kv, host, identity)
    except BaseException:
        runner.close()
        raise
    logger.debug(
        "%d blocks of %d tokens, swap space: %s, attention: %s",
        facts.num_blocks - 1,
        facts.spec.block_size,
        format_bytes(facts.num_host_blocks * facts.spec.block_bytes),
        facts.attention,
    )
    core = EngineCore(
        config=config,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        grammars=grammars,
        default_sampling=default_sampling,
        hidden_size=facts.hidden_size,
        pooling=pooling,
        weight_bytes=facts.weight_bytes,
        tiers=tiers,
        plans_ahead=facts.device == "cuda" if config.async_scheduling is None else config.async_scheduling,
    )
    logger.info("%s; loaded in %.1f s", core.summary, time.perf_counter() - started)
    return core


_Text = tuple[Tokenizer | None, GrammarCompiler]


def _start_runner(
    config: EngineConfig, source: ModelSource, prepare_grammars: bool
) -> tuple[Executor, RunnerFacts, _Text, HostTier | None]:
    """The runner where `config.executor` wants it, the tokenizer, read meanwhile, and the host memory of the runner.

    That of another process is here only where stores read and write it.
    """

    def load_text(model: ModelConfig | RunnerFacts) -> _Text:
        tokenizer = _load_tokenizer(source, config)
        return tokenizer, _grammar_compiler(config, model, lambda: tokenizer, prepare_grammars)

    if config.executor == "process":
        with closing(SharedFile()) if config.has_stores else nullcontext() as file:
            process = ProcessExecutor(partial(_build_runner_apart, config, file, prepare_grammars))
            try:
                _, facts, text = _load_beside(source, lambda: (process, process.facts()), load_text)
            except BaseException:
                process.close()
                raise
            if file is None:
                return process, facts, text, None
            num_blocks = facts.num_host_blocks + facts.num_prefix_blocks
            return process, facts, text, HostTier(num_blocks, facts.spec.block_bytes, file)
    runner, facts, text = _load_beside(source, partial(build_runner, config), load_text)
    assert isinstance(runner.host, HostTier)
    return runner, facts, text, runner.host


def _build_runner_apart(
    config: EngineConfig, file: SharedFile | None, prepare_grammars: bool
) -> tuple[ModelRunner, RunnerFacts]:
    """`build_runner` in a process of its own, which reads the tokenizer itself for grammars."""
    source = resolve_model(config.model)

    def load_grammars(model: ModelConfig | RunnerFacts) -> GrammarCompiler:
        return _grammar_compiler(config, model, lambda: _load_tokenizer(source, config), prepare_grammars)

    runner, facts, grammars = _load_beside(source, partial(build_runner, config, file), load_grammars)
    runner.grammars = grammars
    if file is not None:
        file.close()
    return runner, facts


_Runner = TypeVar("_Runner", bound=Executor)
_Loaded = TypeVar("_Loaded")


def _load_beside(
    source: ModelSource,
    build: Callable[[], tuple[_Runner, RunnerFacts]],
    load: Callable[[ModelConfig | RunnerFacts], _Loaded],
) -> tuple[_Runner, RunnerFacts, _Loaded]:
    """What `build` and `load` return, in two threads where that can be."""
    model_config = load_model_config(source)
    if not model_config.runs_natively:
        # One after the other: both may import transformers, whose lazy modules two threads would import at once.
        runner, facts = build()
        return runner, facts, load(facts)
    with ThreadPoolExecutor(max_workers=1) as beside:
        loading = beside.submit(load, model_config)
        runner, facts = build()
        return runner, facts, loading.result()


def _grammar_compiler(
    config: EngineConfig,
    model: ModelConfig | RunnerFacts,
    load_tokenizer: Callable[[], Tokenizer | None],
    prepare: bool,
) -> GrammarCompiler:
    grammars = GrammarCompiler(load_tokenizer, model.vocab_size, model.eos_token_ids, config.max_grammar_ms)
    if prepare:
        grammars.prepare()
    return grammars


def build_runner(config: EngineConfig, file: SharedFile | None = None) -> tuple[ModelRunner, RunnerFacts]:
    """Load the model, and give it its cache: in whichever process this is called.

    Args:
        file: for host memory, where another process is to have it too.

    Raises:
        ModelError, ConfigError: see `build_engine`.
    """
    num_threads = config.num_threads or default_num_threads()
    device = _device(config)
    if config.deterministic and device.type != "cpu":
        raise ConfigError(
            f"deterministic cannot be guaranteed on device {device.type!r}: its matrix products sum in an order that "
            "depends on how many rows come together; use device='cpu', or do without"
        )
    source = resolve_model(config.model)
    model_config = load_model_config(source)
    sizing = size_before_loading(config, source, model_config, _dtype(config, device), device)
    # Loading is thousands of short steps: with several threads each would wait for the slowest, which on a busy machine
    # took four times as long.
    torch.set_num_threads(1)
    try:
        model = _load(config, source, model_config, device)
    finally:
        torch.set_num_threads(num_threads)
    if kernels.available():
        kernels.set_num_threads(num_threads)
    if isinstance(model, NativeDecoder):
        # Torch's threads spin behind each of its own short steps, on cores that the kernels' threads need.
        torch.set_num_threads(1)
        if not config.deterministic:
            model.allow_rounding()
    sizing = size_loaded(sizing, config, model)
    max_model_len, spec, pool = sizing.max_model_len, sizing.spec, sizing.pool()
    sizing.warn_if_short(pool)
    attention = make_backend(config.attention_backend, device)
    arena = KVArena(spec, pool.num_blocks, device, attention.layout)
    num_host_blocks, num_prefix_blocks = sizing.num_host_blocks(pool), sizing.num_prefix_blocks
    host = HostTier(num_host_blocks + num_prefix_blocks, spec.block_bytes, file)
    sizing.warn_if_swap_is_short(num_host_blocks)
    if config.deterministic:
        _require_deterministic(model, arena, attention)
    kv_scales = ""
    if calibrated := arena.calibrated_layers:
        kv_scales = choose_scales(
            calibrated, source, spec.dtype, file=config.kv_scales, calculate=config.calculate_kv_scales
        )
    elif config.kv_scales is not None:
        raise ConfigError(
            f"kv_scales is for fp8 and nvfp4; a KV cache in {spec.dtype} has no scales that are chosen beforehand"
        )
    runner = ModelRunner(
        model,
        arena,
        attention,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        host=host,
        capture=_capture(config, attention, arena, device),
    )
    if device.type == "cuda":
        _warm_up(config, runner)
    facts = RunnerFacts(
        spec=spec,
        num_blocks=pool.num_blocks,
        num_host_blocks=num_host_blocks,
        num_prefix_blocks=num_prefix_blocks,
        max_model_len=max_model_len,
        kv_scales=kv_scales,
        vocab_size=model.vocab_size,
        hidden_size=model_config.hidden_size,
        eos_token_ids=model.eos_token_ids,
        weight_bytes=model.weight_bytes,
        attention=attention.name,
        layout=arena.layout.value,
        restore_speed=_restore_speed(config, runner, host, num_host_blocks),
        device=device.type,
    )
    for layer in calibrated.values():
        # Only now: what was computed to measure speeds was no text.
        layer.finds_scales = config.calculate_kv_scales
    return runner, facts


def _warm_up(config: EngineConfig, runner: ModelRunner) -> None:
    """Compile kernels and record decodes now, so that no request waits for it."""
    started = time.perf_counter()
    arena = runner.arena
    max_tokens = min(config.max_num_batched_tokens, runner.max_model_len)
    warm_up(runner, arena.spec, arena.num_blocks, max_num_seqs=config.max_num_seqs, max_tokens=max_tokens)
    logger.info("the first steps of each kind were computed in %.1f s", time.perf_counter() - started)


def _recorded_facts(config: EngineConfig, facts: RunnerFacts) -> dict[str, Any]:
    """What a reader of recorded plans must know of the engine that executed them."""
    return {
        "model": config.model,
        "block_size": facts.spec.block_size,
        "block_bytes": facts.spec.block_bytes,
        "bytes_per_token": facts.spec.bytes_per_token,
        "num_blocks": facts.num_blocks,
        "max_model_len": facts.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "weight_bytes": facts.weight_bytes,
        "attention": facts.attention,
    }


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device here; use device='cpu'")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _load(config: EngineConfig, source: ModelSource, model_config: ModelConfig, device: torch.device) -> CausalLM:
    if not model_config.runs_natively:
        logger.info("%s runs through transformers: %s", config.model, model_config.transformers_reason)
        return _load_through_transformers(config, source, device)
    return make_decoder(
        model_config,
        open_weights(source, model_config),
        dtype=_dtype(config, device),
        device=device,
        quantised=config.quantization == "auto",
        ops=_ops(config),
    )


def _ops(config: EngineConfig) -> LayerOps | None:
    """The row-wise steps that go with a backend that was asked for; None: the fastest."""
    if config.attention_backend == "reference":
        # What the fast paths are held to: it takes no kernel anywhere.
        return LayerOps()
    if config.attention_backend == "triton" and importlib.util.find_spec("triton") is not None:
        from octavo.models.triton_ops import TritonLayerOps

        return TritonLayerOps()
    return None


def _capture(config: EngineConfig, attention: AttentionBackend, arena: KVArena, device: torch.device) -> Capture | None:
    """What records decode steps on a GPU, where nothing in them waits for the host: where all layers have kernels."""
    if device.type != "cuda" or config.enforce_eager or attention.name != "triton":
        return None
    from octavo.attention.triton.backend import TritonAttention

    return CudaCapture(device) if all(map(TritonAttention.reads, arena.layers)) else None


def _load_through_transformers(config: EngineConfig, source: ModelSource, device: torch.device) -> CausalLM:
    from octavo.models.transformers_bridge import TransformersModel

    return TransformersModel.load(source.path, dtype=_dtype(config, device), device=device)


def _load_tokenizer(source: ModelSource, config: EngineConfig) -> Tokenizer | None:
    template = None if config.chat_template is None else _read_template(config.chat_template)
    try:
        tokenizer = Tokenizer.from_source(source)
        return tokenizer if template is None else tokenizer.with_chat_template(template)
    except ModelNotFoundError as error:
        logger.warning("%s; prompts must be token ids", error)
        return None


def _read_template(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            template = file.read(_MOST_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {path}: {error}") from error
    if len(template) > _MOST_TEMPLATE:
        raise ConfigError(f"chat_template: {path} has more than {_MOST_TEMPLATE} characters")
    check_template(template, path)
    return template


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
    raise ConfigError(f"deterministic cannot be guaranteed: {reason}")


def _restore_speed(
    config: EngineConfig, runner: ModelRunner, host: HostTier, num_host_blocks: int
) -> RestoreSpeed | None:
    """Measure swapping and prefill speed, if the choice between swapping and recomputation depends on them."""
    if not needs_restore_speed(config, num_host_blocks):
        return None
    max_tokens = min(config.max_num_batched_tokens, runner.max_model_len)
    speed = measure_restore_speed(runner, host, max_tokens=max_tokens)
    logger.debug(
        "preemption: swapping moves %s/s, prefill computes %.0f tokens/s: the cheaper way is taken for each victim",
        format_bytes(runner.arena.spec.block_bytes / speed.seconds_per_block),
        1 / speed.seconds_per_token,
    )
    return speed
