"""Loads the draft model of an engine, with its small cache."""

from __future__ import annotations

import logging

from octavo.checkpoint.model_source import load_model_config, model_of
from octavo.config import EngineConfig, format_bytes
from octavo.engine.runner_builder import RunnerFacts, build_runner
from octavo.errors import ConfigError, ModelNotFoundError
from octavo.planner.draft_memory import draft_config
from octavo.planner.sources import shape_of_source
from octavo.runner.runner import ModelRunner
from octavo.scheduler.draft_model import DraftModel
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LoadedDraftModel:
    """A draft model in memory.

    Args:
        config: the options of the engine that it drafts for.
        name: the draft model, as for `--model`.

    Attributes:
        bytes_to_come: bytes of its cache, which takes memory only as it is written.

    Raises:
        ModelError, ConfigError: see `build_engine`.
    """

    def __init__(self, config: EngineConfig, name: str) -> None:
        source = model_of(EngineConfig(model=name, hf_token=config.hf_token))
        model = load_model_config(source)
        if not model.runs_natively:
            raise ConfigError(f"the draft model {name} runs through transformers only: {model.transformers_reason}")
        self._config = draft_config(config, name, shape_of_source(source, model))
        self._source = source
        self._runner: ModelRunner
        self._facts: RunnerFacts
        self._runner, self._facts = build_runner(self._config)
        self.bytes_to_come = self._facts.num_blocks * self._facts.spec.block_bytes

    def drafts_for(self, target: ModelRunner, tokenizer: Tokenizer | None) -> DraftModel:
        """Return the source of drafts for a model, given its runner and its tokenizer.

        Raises:
            ConfigError: the draft model has other tokens.
        """
        facts, spec, vocab_size = self._facts, self._facts.spec, target.model.vocab_size
        self._runner.num_threads = target.num_threads  # changing their number in each step would take longer than it
        self._check_tokens(tokenizer, vocab_size)
        logger.info(
            "draft model %s: %s of weights, %s of KV cache for %d tokens",
            facts.model_name,
            format_bytes(facts.weight_bytes),
            format_bytes(self.bytes_to_come),
            (facts.num_blocks - 1) // len(spec.groups) * spec.block_size,
        )
        return DraftModel(
            self._runner.execute,
            num_blocks=facts.num_blocks,
            block_size=spec.block_size,
            num_groups=len(spec.groups),
            max_num_seqs=facts.max_num_seqs,
            max_model_len=facts.max_model_len,
            vocab_size=min(facts.vocab_size, vocab_size),
        )

    def _check_tokens(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        name = self._facts.model_name
        try:
            own = Tokenizer.from_source(self._source)
        except ModelNotFoundError:
            own = None
        if own is None or tokenizer is None:
            if vocab_size != self._facts.vocab_size:
                raise ConfigError(
                    f"a draft model needs the same tokens, but {name} has {self._facts.vocab_size:,}, and the model "
                    f"has {vocab_size:,}"
                )
            return
        count = max(own.vocab_size, tokenizer.vocab_size)
        differing = [i for i in range(count) if own.id_to_token(i) != tokenizer.id_to_token(i)]
        if differing:
            first = differing[0]
            raise ConfigError(
                f"a draft model needs the same tokenizer, but that of {name} differs in {len(differing):,} of "
                f"{count:,} tokens: {first} is {own.id_to_token(first)!r}, not {tokenizer.id_to_token(first)!r}"
            )

    def close(self) -> None:
        """Free the model and its cache. May be called again."""
        self._runner.close()
