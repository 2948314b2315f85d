"""Builds an engine from options: the runner, the tokenizer, the cache, the scheduler, and the draft model."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from octavo import kernels
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.model_source import ModelSource, load_model_config, model_fingerprint, model_of
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.engine.kv_events import KVEventPublisher, NullPublisher
from octavo.engine.model_loading import dtype_name
from octavo.engine.runner_builder import RunnerFacts, build_runner
from octavo.engine.tiers import join_stores, tier_identity
from octavo.errors import ConfigError, ModelNotFoundError
from octavo.grammar.compiler import GrammarCompiler
from octavo.kvcache.manager import KVCacheManager
from octavo.planner.draft_memory import draft_config
from octavo.planner.sources import shape_of_source
from octavo.runner.runner import ModelRunner
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler, make_speculator
from octavo.scheduler.draft_model import DraftModel
from octavo.scheduler.plan_log import PlanLog
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_loading import begin_loading, load_tokenizer
from octavo.units import format_bytes

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
    config.require_packages()
    source = model_of(config)
    model_config = load_model_config(source)
    if config.speculative_config is not None and not model_config.runs_natively:
        raise ConfigError("speculative_config is not available for models that run through transformers")
    begun = begun or begin_loading(config)
    with ExitStack() as resources:  # closed here if anything below fails, else with the engine
        # Before the model, which takes what it leaves.
        longest = config.max_model_len or model_config.max_position_embeddings
        draft = None if config.draft_model is None else load_draft_model(config, config.draft_model, longest, resources)
        runner, facts = build_runner(config, 0 if draft is None else draft.cache_bytes)
        resources.callback(runner.close)
        tokenizer = load_tokenizer(config) if begun is None else begun.result()
        model, limit = runner.model, config.limits.max_grammar_ms
        grammars = GrammarCompiler(lambda: tokenizer, facts.vocab_size, model.eos_token_ids, limit)
        resources.callback(grammars.close)
        runner.use_grammars(grammars)  # shared with the engine
        identity = _identity(config, source, runner, facts)
        kv = assemble_cache(
            config,
            facts.spec,
            facts.num_blocks,
            num_host_blocks=facts.num_host_blocks,
            num_prefix_blocks=facts.num_prefix_blocks,
            identity=identity,
        )
        drafts = None if draft is None else draft.drafts_for(runner, tokenizer)
        if (tiers := join_stores(config, kv, runner.host, identity)) is not None:
            resources.callback(tiers.close)
        scheduler = assemble_scheduler(
            config,
            kv,
            facts.max_model_len,
            tiers=tiers,
            speculator=None if drafts is None else make_speculator(config, kv, facts.max_model_len, model=drafts),
        )
        eos_token_ids = model.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset())
        core = EngineCore(
            InputProcessor(config, facts, scheduler, tokenizer, eos_token_ids, grammars),
            runner,
            tiers=tiers,
            publisher=_start_publisher(config, kv, resources),
            plans_ahead=_plans_ahead(config, runner),
            plan_log=_open_plan_log(config, facts, runner.attention.name, resources),
            resources=resources.pop_all(),
        )
    logger.info("%s; loaded in %.1f s", core.summary, time.perf_counter() - started)
    return core


def _depends_on_length(model: ModelConfig) -> bool:
    """Whether keys may depend on the longest sequence."""
    return not model.runs_natively or any(rope and rope.kind == "longrope" for rope in model.layer_ropes)


def _identity(config: EngineConfig, source: ModelSource, runner: ModelRunner, facts: RunnerFacts) -> tuple[str, ...]:
    """Return everything that a block's bytes depend on, except its tokens."""
    # Products in another dtype, and quantised ones, which round activations, give other keys and values.
    return (
        model_fingerprint(Path(source.path)),
        *([str(config.hf_overrides)] if config.hf_overrides else []),
        # By which "longrope" and transformers' "dynamic" choose frequencies.
        *([str(facts.max_model_len)] if _depends_on_length(load_model_config(source)) else []),
        dtype_name(runner.model.dtype),
        facts.spec.dtype,
        config.quantization,
        runner.arena.layout.value,
        *([facts.kv_scales] if facts.kv_scales else []),
        *(["bounds"] if any(layer.bounded for layer in facts.spec.layers) else []),
        *(str(group.layer_indices) for group in facts.spec.groups if group.entropy is not None),
        *tier_identity(config, Path(source.path), runner.attention.name),
    )


def _start_publisher(config: EngineConfig, kv: KVCacheManager, resources: ExitStack) -> NullPublisher:
    if (events := config.kv_events) is None:
        return NullPublisher()
    if kv.events is None:
        raise ConfigError("kv_events_config: the model has no layer with full attention, so no prefix can be announced")
    publisher = KVEventPublisher(events, kv.events, kv.spec.block_size)
    resources.callback(publisher.close)
    return publisher


def _plans_ahead(config: EngineConfig, runner: ModelRunner) -> bool:
    """Whether steps are planned ahead; not with drafts, because a draft follows a token that must be known."""
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


def _open_plan_log(config: EngineConfig, facts: RunnerFacts, attention: str, resources: ExitStack) -> PlanLog | None:
    if config.record_plans is None:
        return None
    # Facts about the engine that readers of recorded plans need.
    recorded: dict[str, Any] = {
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
    plan_log = PlanLog(config.record_plans, recorded)
    resources.callback(plan_log.close)
    return plan_log


class LoadedDraftModel(NamedTuple):
    """A draft model in memory, with its small cache."""

    source: ModelSource
    runner: ModelRunner
    facts: RunnerFacts

    @property
    def cache_bytes(self) -> int:
        """Size of its cache in bytes; memory is only used once it is written."""
        return self.facts.num_blocks * self.facts.spec.block_bytes

    def drafts_for(self, target: ModelRunner, tokenizer: Tokenizer | None) -> DraftModel:
        """Return the source of drafts for a model, given its runner and its tokenizer.

        Raises:
            ConfigError: the draft model has other tokens.
        """
        facts, spec, vocab_size = self.facts, self.facts.spec, target.model.vocab_size
        self.runner.num_threads = target.num_threads  # changing their number in each step would take longer than it
        self._require_same_tokens(tokenizer, vocab_size)
        logger.info(
            "draft model %s: %s of weights, %s of KV cache for %d tokens",
            facts.model_name,
            format_bytes(facts.weight_bytes),
            format_bytes(self.cache_bytes),
            (facts.num_blocks - 1) // len(spec.groups) * spec.block_size,
        )
        return DraftModel(
            self.runner.execute,
            num_blocks=facts.num_blocks,
            block_size=spec.block_size,
            num_groups=len(spec.groups),
            max_num_seqs=facts.max_num_seqs,
            max_model_len=facts.max_model_len,
            vocab_size=min(facts.vocab_size, vocab_size),
        )

    def _require_same_tokens(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        name = self.facts.model_name
        try:
            own = Tokenizer.from_source(self.source)
        except ModelNotFoundError:
            own = None
        if own is None or tokenizer is None:
            if vocab_size != self.facts.vocab_size:
                raise ConfigError(
                    f"a draft model needs the same tokens, but {name} has {self.facts.vocab_size:,}, and the model "
                    f"has {vocab_size:,}"
                )
            return
        count = max(own.vocab_size, tokenizer.vocab_size)
        if differing := [i for i in range(count) if own.id_to_token(i) != tokenizer.id_to_token(i)]:
            first = differing[0]
            raise ConfigError(
                f"a draft model needs the same tokenizer, but that of {name} differs in {len(differing):,} of "
                f"{count:,} tokens: {first} is {own.id_to_token(first)!r}, not {tokenizer.id_to_token(first)!r}"
            )


def load_draft_model(config: EngineConfig, name: str, longest: int, resources: ExitStack) -> LoadedDraftModel:
    """Load the draft model of an engine with these options, which `resources` closes.

    Args:
        name: the draft model, as for `--model`.
        longest: the engine's longest sequence, in tokens.

    Raises:
        ModelError, ConfigError: see `build_engine`.
    """
    source = model_of(EngineConfig(model=name, hf_token=config.hf_token))
    model = load_model_config(source)
    if not model.runs_natively:
        raise ConfigError(f"the draft model {name} runs through transformers only: {model.transformers_reason}")
    runner, facts = build_runner(draft_config(config, name, shape_of_source(source, model), longest))
    resources.callback(runner.close)
    return LoadedDraftModel(source, runner, facts)
