"""Builds an engine from options: the runner, in this process or another, the tokenizer, the cache, the scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from octavo import kernels
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import (
    ModelSource,
    load_model_config,
    model_fingerprint,
    model_of,
)
from octavo.config import EngineConfig, format_bytes
from octavo.engine.core import EngineCore
from octavo.engine.kv_events import KVEventPublisher, NullPublisher
from octavo.engine.runner_builder import RunnerFacts, build_runner
from octavo.engine.tiers import join_stores, tier_identity
from octavo.errors import ConfigError
from octavo.grammar.compiler import GrammarCompiler
from octavo.kvcache.manager import KVCacheManager
from octavo.runner.executor import Executor, RecordingExecutor
from octavo.runner.runner import ModelRunner
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan_log import PlanLog
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.waiting import Fetching
from octavo.text.loading import load_tokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.tiers.host import HostTier

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, begun: Future[Tokenizer | None] | None = None) -> EngineCore:
    """Load `config.model` and build an engine for it.

    Args:
        begun: its tokenizer, if that is being loaded already (`text/loading.py`).

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the options contradict each other, the model or the machine.
    """
    started = time.perf_counter()
    source = model_of(config)
    if config.speculative_config is not None and not load_model_config(source).runs_natively:
        raise ConfigError("speculative_config is not available for models that run through transformers")
    built, facts, (tokenizer, grammars) = _build_runner(config, source, begun)
    built.use_grammars(grammars)  # shared with the engine
    host, runner = built.host, cast(Executor, built)
    assert isinstance(host, HostTier)
    try:
        if config.record_plans is not None:
            runner = RecordingExecutor(runner, PlanLog(config.record_plans, _recorded_facts(config, facts)))
        # Products in another dtype, and quantised ones, which round activations, give other keys and values.
        identity = (
            model_fingerprint(Path(source.path)),
            *([str(config.hf_overrides)] if config.hf_overrides else []),
            # By which transformers' "longrope" and "dynamic" choose frequencies.
            *([] if load_model_config(source).runs_natively else [str(facts.max_model_len)]),
            facts.dtype,
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
        )
        tiers, preemption = join_stores(config, kv, host, identity), Preemption()
        fetching = None if tiers is None else Fetching(kv, tiers, preemption)
        scheduler = assemble_scheduler(config, kv, facts.max_model_len, preemption=preemption, fetching=fetching)
        publisher = _start_publisher(config, kv)
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
        info=facts,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        eos_token_ids=facts.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        grammars=grammars,
        tiers=tiers,
        publisher=publisher,
        plans_ahead=_plans_ahead(config, facts),
    )
    logger.info("%s; loaded in %.1f s", core.summary, time.perf_counter() - started)
    return core


def _start_publisher(config: EngineConfig, kv: KVCacheManager) -> NullPublisher:
    if (events := config.kv_events) is None:
        return NullPublisher()
    if kv.events is None:
        raise ConfigError("kv_events_config: the model has no layer with full attention, so no prefix can be announced")
    return KVEventPublisher(events, kv.events, kv.spec.block_size)


def _plans_ahead(config: EngineConfig, facts: RunnerFacts) -> bool:
    """Whether steps are planned ahead: not with drafts, which follow a token that must be known."""
    if config.speculative_config is not None:
        # Kernels read blocks of a multiple of 16 tokens; those of AMX round by the number of rows.
        on_kernels = facts.attention == "native" and facts.spec.block_size % 16 == 0
        is_exact = config.deterministic or (on_kernels and not kernels.isa().startswith("amx"))
        logger.info(
            "speculative decoding: the output is that without drafts, %s",
            "bit for bit" if is_exact else "within rounding; start with --deterministic for bit for bit",
        )
        return False
    return facts.device == "cuda" if config.async_scheduling is None else config.async_scheduling


_Text = tuple[Tokenizer | None, GrammarCompiler]


def _build_runner(
    config: EngineConfig, source: ModelSource, begun: Future[Tokenizer | None] | None
) -> tuple[ModelRunner, RunnerFacts, _Text]:
    """Build the runner; loads the tokenizer meanwhile, unless `begun`."""

    def load_text(model: ModelConfig | RunnerFacts) -> _Text:
        tokenizer = load_tokenizer(config) if begun is None else begun.result()
        return tokenizer, _grammar_compiler(config, model, lambda: tokenizer)

    return _load_together(source, partial(build_runner, config), load_text)


_Loaded = TypeVar("_Loaded")


def _load_together(
    source: ModelSource,
    build: Callable[[], tuple[ModelRunner, RunnerFacts]],
    load: Callable[[ModelConfig | RunnerFacts], _Loaded],
) -> tuple[ModelRunner, RunnerFacts, _Loaded]:
    """Return the results of `build` and `load`, run in two threads if possible."""
    model_config = load_model_config(source)
    if not model_config.runs_natively:
        # Sequentially, because both may import transformers, whose lazy modules two threads must not import at once.
        runner, facts = build()
        return runner, facts, load(facts)
    with ThreadPoolExecutor(max_workers=1) as thread:
        loading = thread.submit(load, model_config)
        runner, facts = build()
        return runner, facts, loading.result()


def _grammar_compiler(
    config: EngineConfig,
    model: ModelConfig | RunnerFacts,
    load_tokenizer: Callable[[], Tokenizer | None],
) -> GrammarCompiler:
    most_ms = config.limits.max_grammar_ms
    return GrammarCompiler(load_tokenizer, model.vocab_size, model.eos_token_ids, most_ms)


def _recorded_facts(config: EngineConfig, facts: RunnerFacts) -> dict[str, Any]:
    """Return what a reader of recorded plans must know about the engine that executed them."""
    return {
        "model": facts.model_name,
        "block_size": facts.spec.block_size,
        "block_bytes": facts.spec.block_bytes,
        "bytes_per_token": facts.spec.bytes_per_token,
        "num_blocks": facts.num_blocks,
        "max_model_len": facts.max_model_len,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "weight_bytes": facts.weight_bytes,
        "attention": facts.attention,
    }
