"""Builds an engine from options: the runner, the tokenizer, the cache, the scheduler."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from octavo import kernels
from octavo.checkpoint.model_source import (
    load_model_config,
    model_fingerprint,
    model_of,
)
from octavo.config import EngineConfig, format_bytes
from octavo.engine.core import EngineCore
from octavo.engine.draft_model_loading import LoadedDraftModel
from octavo.engine.input_processor import InputProcessor
from octavo.engine.kv_events import KVEventPublisher, NullPublisher
from octavo.engine.model_loading import dtype_name
from octavo.engine.runner_builder import RunnerFacts, build_runner
from octavo.engine.tiers import join_stores, tier_identity
from octavo.errors import ConfigError
from octavo.grammar.compiler import GrammarCompiler
from octavo.kvcache.manager import KVCacheManager
from octavo.runner.runner import ModelRunner
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler, make_speculator
from octavo.scheduler.plan_log import PlanLog
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.waiting import Fetching
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_loading import begin_loading, load_tokenizer

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, begun: Future[Tokenizer | None] | None = None) -> EngineCore:
    """Load `config.model` and build an engine for it.

    Args:
        begun: its tokenizer, if that is being loaded already (`text/tokenizer_loading.py`).

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the options contradict each other, the model or the machine.
    """
    started = time.perf_counter()
    source = model_of(config)
    if config.speculative_config is not None and not load_model_config(source).runs_natively:
        raise ConfigError("speculative_config is not available for models that run through transformers")
    begun = begun or begin_loading(config)
    # Before the model, which takes what it leaves.
    draft_model = None if config.draft_model is None else LoadedDraftModel(config, config.draft_model)
    try:
        runner, facts = build_runner(config, 0 if draft_model is None else draft_model.bytes_to_come)
    except BaseException:
        if draft_model is not None:
            draft_model.close()
        raise
    model, attention, host, plan_log = runner.model, runner.attention.name, runner.host, None
    assert host is not None, "built with the runner"
    try:
        tokenizer = load_tokenizer(config) if begun is None else begun.result()
        limit = config.limits.max_grammar_ms
        grammars = GrammarCompiler(lambda: tokenizer, facts.vocab_size, model.eos_token_ids, limit)
        runner.use_grammars(grammars)  # shared with the engine
        if config.record_plans is not None:
            plan_log = PlanLog(config.record_plans, _recorded_facts(config, facts, attention))
        # Products in another dtype, and quantised ones, which round activations, give other keys and values.
        identity = (
            model_fingerprint(Path(source.path)),
            *([str(config.hf_overrides)] if config.hf_overrides else []),
            # By which transformers' "longrope" and "dynamic" choose frequencies.
            *([] if load_model_config(source).runs_natively else [str(facts.max_model_len)]),
            dtype_name(model.dtype),
            facts.spec.dtype,
            config.quantization,
            runner.arena.layout.value,
            *([facts.kv_scales] if facts.kv_scales else []),
            *(["bounds"] if any(layer.bounded for layer in facts.spec.layers) else []),
            *tier_identity(config, Path(source.path), attention),
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
        scheduler = assemble_scheduler(
            config,
            kv,
            facts.max_model_len,
            preemption=preemption,
            fetching=fetching,
            speculator=None
            if draft_model is None
            else make_speculator(config, kv, facts.max_model_len, model=draft_model.drafts_for(runner, tokenizer)),
        )
        publisher = _start_publisher(config, kv)
    except BaseException:
        runner.close()
        if draft_model is not None:
            draft_model.close()
        raise
    logger.debug(
        "%d blocks of %d tokens, swap space: %s, attention: %s",
        facts.num_blocks - 1,
        facts.spec.block_size,
        format_bytes(facts.num_host_blocks * facts.spec.block_bytes),
        attention,
    )
    inputs = InputProcessor(
        config=config,
        info=facts,
        scheduler=scheduler,
        tokenizer=tokenizer,
        eos_token_ids=model.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset()),
        grammars=grammars,
    )
    core = EngineCore(
        inputs,
        runner,
        tiers=tiers,
        publisher=publisher,
        plans_ahead=_plans_ahead(config, runner),
        plan_log=plan_log,
        draft_model=draft_model,
    )
    logger.info("%s; loaded in %.1f s", core.summary, time.perf_counter() - started)
    return core


def _start_publisher(config: EngineConfig, kv: KVCacheManager) -> NullPublisher:
    if (events := config.kv_events) is None:
        return NullPublisher()
    if kv.events is None:
        raise ConfigError("kv_events_config: the model has no layer with full attention, so no prefix can be announced")
    return KVEventPublisher(events, kv.events, kv.spec.block_size)


def _plans_ahead(config: EngineConfig, runner: ModelRunner) -> bool:
    """Whether steps are planned ahead: not with drafts, which follow a token that must be known."""
    if config.speculative_config is not None:
        # Kernels read blocks of a multiple of 16 tokens; those of AMX round by the number of rows.
        on_kernels = runner.attention.name == "native" and runner.arena.spec.block_size % 16 == 0
        is_exact = config.deterministic or (on_kernels and not kernels.isa().startswith("amx"))
        logger.info(
            "speculative decoding: the output is that without drafts, %s",
            "bit for bit" if is_exact else "within rounding; start with --deterministic for bit for bit",
        )
        return False
    return runner.model.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def _recorded_facts(config: EngineConfig, facts: RunnerFacts, attention: str) -> dict[str, Any]:
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
        "attention": attention,
    }
