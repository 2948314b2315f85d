"""An engine without a model: the real scheduler and cache, and a runner that builds batches and draws fixed tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.engine.inspection import EngineInfo
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.pooling import Pooling
from octavo.request_limits import DEFAULT_LIMITS
from octavo.runner.batch import BatchBuilder
from octavo.runner.sequences import SequenceTable
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer

BLOCK = 16
MAX_MODEL_LEN = 1 << 21
VOCAB = 49_152


def make_kv(num_blocks: int, **options: Any) -> KVCacheManager:
    spec = KVCacheSpec.build([LayerKVSpec(1, 8, 8)], BLOCK, "float32")
    return assemble_cache(EngineConfig(**options), spec, num_blocks)


def make_scheduler(kv: KVCacheManager, *, seqs: int = 256, budget: int = 2048) -> Scheduler:
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
    return assemble_scheduler(config, kv, MAX_MODEL_LEN)


INFO = EngineInfo(
    model_name="",
    architecture="",
    weight_bytes=0,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=256,
    vocab_size=VOCAB,
    hidden_size=0,
    pooling=Pooling.LAST,
    limits=DEFAULT_LIMITS,
    default_sampling={},
)


def make_inputs(scheduler: Scheduler, tokenizer: Tokenizer | None) -> InputProcessor:
    return InputProcessor(
        config=EngineConfig(),
        info=INFO,
        scheduler=scheduler,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(),
        grammars=None,
    )


def make_core(
    num_blocks: int, runner: Any, *, seqs: int, budget: int, tokenizer: Tokenizer | None, plans_ahead: bool = False
) -> EngineCore:
    scheduler = make_scheduler(make_kv(num_blocks), seqs=seqs, budget=budget)
    return EngineCore(make_inputs(scheduler, tokenizer), runner, plans_ahead=plans_ahead)


class BatchOnly:
    """A runner that builds each step's tensors, and whose model and sampler take no time."""

    def __init__(self, rows: int, max_blocks: int) -> None:
        self.batches = BatchBuilder(SequenceTable(1, rows, max_blocks, block_size=BLOCK))
        self.drawing = 0.0  # of the stand-in for the sampler

    def execute(self, plan: StepPlan) -> StepResult:
        self.batches.build(plan)
        built = time.perf_counter()
        drawn = (start for start, num_draws in zip(plan.starts, plan.draws, strict=True) if num_draws)
        result = StepResult(tuple(300 + start * 7919 % 40_000 for start in drawn))
        self.batches.note_drawn(torch.tensor(result.token_ids))
        self.drawing = time.perf_counter() - built
        return result

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.execute(plan)
        return lambda: result

    def failure(self) -> str:
        return ""

    def close(self) -> None:
        return
