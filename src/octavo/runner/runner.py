"""Executes step plans; the only owner of the device's tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ExecutorError
from octavo.grammar.compiler import GrammarCompiler
from octavo.logprobs import TokenLogprobs
from octavo.models.base import CausalLM, LaterRows
from octavo.models.decoder import Decoder
from octavo.planner.calculator import scored_rows
from octavo.runner.batch import BatchBuilder, StepBatch
from octavo.runner.graphs import Capture, DecodeGraphs
from octavo.runner.ranks import RankGroup
from octavo.runner.sequences import SequenceTable
from octavo.runner.swapping import BlockMover, make_link
from octavo.sampling.sampler import PlainDraw, Sampler, make_choice
from octavo.scheduler.plan import PromptScores, StepPlan, StepResult
from octavo.storage.arena import KVArena
from octavo.storage.host import HostTier

# The number of hidden states summed at a time.
_POOLED_AT_ONCE = 256

Collect = Callable[[], StepResult]
"""Waits for the result of a launched plan; raises like `ModelRunner.execute`. Called at most once."""


class ModelRunner:
    """A model, the arena with its keys and values, and the sampler. Executes plans in order.

        launch(t)   launch(t+1)   result of t   launch(t+2)   result of t+1 …     if plans are made ahead

    With several ranks, it is rank 0.

    Args:
        max_num_seqs: maximum number of sequences in a step.
        max_model_len: maximum sequence length in tokens, which determines the length of block tables.
        host: host memory for swapped blocks; None if no plan swaps.
        num_threads: returns the threads of the kernels in a step; if None, as many as they have then.
        capture: records decode steps of a `Decoder`, to be replayed; if None, or for other models, each step is
            launched kernel by kernel.
        ranks: the other ranks of a model that is split.
        on_close: called by `close`.

    Attributes:
        num_threads: see above; None where there are no kernels.
        is_computing: whether the model is computing, which hardly needs the GIL. Other threads may read it.
    """

    is_computing = False

    def __init__(
        self,
        model: CausalLM,
        arena: KVArena,
        attention: AttentionBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        host: HostTier | None = None,
        num_threads: Callable[[], int] | None = None,
        capture: Capture | None = None,
        ranks: RankGroup | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.arena = arena
        self._calibrated = list(arena.calibrated_layers.values())
        self.attention = attention
        self.host = host
        self.num_threads = num_threads if kernels.available() else None
        self.max_model_len = max_model_len
        spec = arena.spec
        sequences = SequenceTable(
            num_groups=len(spec.groups),
            max_rows=max_num_seqs,
            max_blocks=spec.blocks_for_tokens(max_model_len),
            device=model.device,
            mirrored=True if capture is not None else None,
            block_size=spec.block_size,
            num_bounded=sum(layer.bounded for layer in spec.layers),
            windowed=[index for index, group in enumerate(spec.groups) if group.sliding_window is not None],
        )
        self._batches = BatchBuilder(sequences)
        self.graphs: DecodeGraphs | None = None
        if capture is not None and isinstance(model, Decoder):
            inputs = self._batches.inputs
            self.graphs = DecodeGraphs(model, arena.layers, attention, inputs, capture, max_model_len=max_model_len)
        self._sampler = Sampler(make_choice(model.device))
        self._ranks = ranks
        self._on_close = on_close
        self._mover = BlockMover(arena, host, make_link(model.device), ranks)
        self._has_failed = False
        self._unsampled: Collect | None = None  # of the last step, if its sampling was left for later

    def use_grammars(self, compiler: GrammarCompiler) -> None:
        """Set the compiler of grammars, without which no plan may have structured outputs."""
        self._batches.sequences.grammars = compiler

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a plan: transfers and copies first, then the model on the plan's tokens, then the samples.

        Stores may overlap with the model's computation, but are complete when this returns or raises. A plan without
        rows only makes the runner forget sequences, or store blocks.

        Raises:
            LogitsError: some logits are not a distribution; names the requests.
            Exception: anything else went wrong. After either, the next plan must have `reset` set.
        """
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Collect:
        """Start executing a plan. Both this and the returned function may raise what `execute` raises.

        A plan made ahead may be launched before the result of the previous one is collected. Results are collected in
        the order of their plans, or not at all: if a plan has failed, a plan made ahead of its result is discarded.

        On a GPU a step of plain decodes is being computed when this returns.

        The device executes everything in the order of launching, so blocks, block tables and inputs may be written for
        the next step while this one is being computed.
        """
        if not plan:
            self._batches.forget(plan)
            if not plan.stores:
                return StepResult
            try:
                self._mover.begin(plan)
            finally:
                self._mover.finish()
            return partial(self._with_times, StepResult())
        if self._unsampled is not None:
            with suppress(Exception):  # it is raised again where the step's result is taken
                self._unsampled()
        if plan.ahead and self._has_failed:
            raise ExecutorError(f"step {plan.step} was planned ahead of the result of one that has failed")
        self._has_failed = True
        try:
            self._mover.begin(plan)
            take = self._compute(plan)
        except BaseException:
            self._mover.finish()
            raise
        self._has_failed = False

        def collect() -> StepResult:
            self.is_computing = True
            try:
                result = take()
            finally:
                self.is_computing = False
                self._mover.finish()
            return self._with_times(result) if plan.loads or plan.stores else result

        return collect

    def failure(self) -> str:
        """Return the failure of another rank, after which only `restart` is possible; empty if there is none."""
        return "" if self._ranks is None else self._ranks.failure

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Call `on_failure`, from another thread, when another rank ends while no plan is executed."""
        if self._ranks is not None:
            self._ranks.on_failure = on_failure

    def restart(self) -> None:
        """Start the other ranks again; all blocks have lost their keys and values. The next plan must have `reset` set.

        Raises:
            ExecutorError: they do not start, or there are none.
        """
        if self._ranks is None:
            raise ExecutorError("without other ranks, there is nothing to start again")
        self._ranks.restart()

    def close(self) -> None:
        """Free the model, the cache and host memory, even if something still refers to this. May be called again."""
        on_close = self._on_close
        self.__dict__.clear()
        self._ranks = None  # an engine asks for their failure even when it is closed
        self._on_close = lambda: None
        on_close()

    def _with_times(self, result: StepResult) -> StepResult:
        mover = self._mover
        return replace(result, load_seconds=mover.load_seconds, store_seconds=mover.store_seconds)

    def _compute(self, plan: StepPlan) -> Collect:
        if self.num_threads is not None and kernels.num_threads() != (count := self.num_threads()):
            kernels.set_num_threads(count)  # the limits have changed, or another engine of this process has set its own
        batch = self._batches.build(plan)
        attention = self.attention
        if self._calibrated and any(layer.finds_scales for layer in self._calibrated):
            attention = ReferenceAttention()  # kernels require scales that have already been chosen
        step = (batch.token_ids, batch.attention, self.arena.layers, attention, batch.logits_indices)
        draw = self._prepared(batch) if batch.is_plain and batch.attention.measured is None else None
        self.is_computing = True
        try:
            has_graph = batch.fits_graphs and attention is self.attention and batch.attention.sinks is None
            if self.graphs is not None and has_graph:
                logits, later = self.graphs.logits(batch.attention), None
            else:
                logits, later = self.model.forward_in_part(*step, batch.num_sample_rows)
        finally:
            self.is_computing = False
        if draw is not None:
            token_ids, collect = draw(logits)
            self._batches.note_drawn(token_ids)
            return collect
        return self._later(partial(self._sample_and_score, batch, logits, later))

    def _prepared(self, batch: StepBatch) -> PlainDraw:
        """Return the prepared draw of a plain batch, at its present positions."""
        if batch.draw is None:
            batch.draw = self._sampler.prepare(
                batch.sampling, self.model.vocab_size, batch.sample_rows, overwrite_logits=True
            )
        else:
            batch.sampling.numbers()
        return batch.draw

    @torch.inference_mode()
    def _sample_and_score(self, batch: StepBatch, logits: torch.Tensor, later: LaterRows | None) -> StepResult:
        sampled = self._sampler.sample(logits, batch.sampling, batch.sample_rows, overwrite_logits=True)
        if batch.attention.measured is not None:
            sampled = replace(sampled, mass=batch.mass())
        if later is None or not (batch.scores or batch.pools):
            return sampled
        return replace(
            sampled,
            prompt_logprobs=tuple(self._score(first, score, later) for first, score in batch.scores),
            pooled=tuple(_sum_hidden(first, pool.num_tokens, later) for first, pool in batch.pools),
        )

    def _later(self, sample: Collect) -> Collect:
        """Defer sampling that waits for the device until its result is needed, or the next step is launched."""
        sampled: Future[StepResult] = Future()

        def take() -> StepResult:
            if not sampled.done():
                self._unsampled = None
                try:
                    result = sample()
                    self._batches.note_drawn(result.token_ids)
                    sampled.set_result(result)
                except Exception as error:
                    self._has_failed = True
                    sampled.set_exception(error)
            return sampled.result()

        self._unsampled = take
        return take

    def _score(self, first: int, score: PromptScores, later: LaterRows) -> tuple[TokenLogprobs, ...]:
        """Return prompt logprobs from rows `first ..`, computing the logits of a few rows at a time."""
        at_once = scored_rows(self.model.vocab_size)
        scored: list[TokenLogprobs] = []
        for begin in range(0, len(score.targets), at_once):
            targets = score.targets[begin : begin + at_once]
            rows = later.logits(first + begin, first + begin + len(targets))
            scored += self._sampler.score(rows, targets, score.num_top)
        return tuple(scored)


def _sum_hidden(first: int, count: int, later: LaterRows) -> bytes:
    """Return the sum of the hidden states of rows `first .. first + count`, as float64 in native byte order.

    In float64 the order of summation has no visible effect, so chunks and batches make no difference.
    """
    total = sum(
        later.hidden(begin, min(begin + _POOLED_AT_ONCE, first + count)).double().sum(0)
        for begin in range(first, first + count, _POOLED_AT_ONCE)
    )
    assert isinstance(total, torch.Tensor), "a pool has at least one row"
    return total.cpu().numpy().tobytes()
