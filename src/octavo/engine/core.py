"""The engine core: requests in, one step at a time, outputs out. Single-threaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from octavo.config import EngineConfig, format_bytes
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.inspection import PinInfo, kv_report, limits_in_bytes, list_pins, tiers_report
from octavo.engine.outputs import (
    GRAMMAR_TOO_COMPLEX,
    STEP_FAILED,
    UNUSABLE_LOGITS,
    Ended,
    OutputKind,
    RequestOutput,
    StepNews,
)
from octavo.engine.processor import OutputProcessor
from octavo.engine.recorder import StatsRecorder
from octavo.engine.recovery import Recovery, live_rows, planned_rows
from octavo.engine.stopping import StopStrings
from octavo.errors import GrammarError, LogitsError
from octavo.grammar.compiler import GrammarCompiler
from octavo.observe.stats import EngineStats
from octavo.pooling import Pooling
from octavo.request import (
    DEFAULT_CONTEXT,
    FinishReason,
    Request,
    RequestContext,
    RequestId,
    Sequence,
)
from octavo.runner.executor import Collect, Executor
from octavo.sampling_params import SamplingParams
from octavo.scheduler.kv_limits import KVLimits
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer
from octavo.tiers.lower import LowerTiers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A plan that was handed over, and what waits for its result."""

    plan: StepPlan
    collect: Collect


class EngineCore:
    """One model, its cache, its scheduler.

    Where plans are made ahead, a step is handed over and the next one planned while it is computed
    (`scheduler/ahead.py`); whatever comes between two steps then finds one in flight.

    Args:
        eos_token_ids: ids that end every request which does not ignore them.
        max_model_len: longest prompt + output, in tokens.
        grammars: compiles structured outputs; None: none is served.
        default_sampling: keywords of `SamplingParams` for whoever gives none, as the model's makers recommend.
        hidden_size: numbers of an embedding.
        pooling: what makes an embedding where nobody says otherwise.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Executor,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None = None,
        default_sampling: Mapping[str, Any] | None = None,
        hidden_size: int = 0,
        pooling: Pooling = Pooling.LAST,
        weight_bytes: int = 0,
        tiers: LowerTiers | None = None,
        plans_ahead: bool = False,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.pooling = pooling
        self._weight_bytes = weight_bytes
        self.tiers = tiers
        self.max_model_len = scheduler.config.max_model_len
        self.stats = EngineStats(max_model_len=self.max_model_len)
        self.stats.block_bytes = scheduler.kv.spec.block_bytes
        memory = scheduler.kv.hierarchy.host
        self.stats.host = memory.counters if memory.num_prefix_slots else None
        self.stats.stores = () if tiers is None else tuple(tiers.stores)
        self._recorder = StatsRecorder(self.stats, scheduler)
        self.inputs = InputProcessor(
            config=config,
            scheduler=scheduler,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            grammars=grammars,
        )
        self.default_sampling = dict(default_sampling or {})
        self.outputs = OutputProcessor(tokenizer)
        self._stop_strings = StopStrings(tokenizer, self._finish_sequence)
        self._recovery = Recovery(scheduler, runner, self.stats)
        self._plans_ahead = plans_ahead
        self._ahead: _StepInFlight | None = None  # handed over while the step before it was computed
        scheduler.on_admitted = self._book_admission
        self._went_on_at: float | None = None  # when the last step ended, if another was to follow

    @property
    def summary(self) -> str:
        """One line for people: the model, how long its context is, and what takes how much memory."""
        spec, num_blocks = self.scheduler.kv.spec, self.scheduler.kv.pool.num_blocks
        return (
            f"{self.config.model}: {self.max_model_len:,} tokens of context, {format_bytes(self._weight_bytes)} of "
            f"weights, {format_bytes(num_blocks * spec.block_bytes)} of KV cache for "
            f"{(num_blocks - 1) // len(spec.groups) * spec.block_size:,} tokens"
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        add_special_tokens: bool = True,
    ) -> Request:
        """Tokenise and validate a request, as `InputProcessor.make_request`; thread-safe."""
        return self.inputs.make_request(prompt, params, context, add_special_tokens=add_special_tokens)

    def add(self, request: Request, *, prompt: str | None = None, kind: OutputKind = OutputKind.FINAL) -> None:
        """Queue a request that `make_request` made, whose outputs `step` and `abort` return."""
        self.queue(request)
        self.outputs.add(request, prompt, kind)

    def queue(self, request: Request) -> None:
        """Queue a request whose outputs somebody else makes, of what `advance` and `end` return."""
        self.scheduler.add(request)
        if not self._recovery.may_run(request.request_id):
            self.scheduler.hold(request)
        self._stop_strings.add(request)

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """Abort a request and free its blocks at once; returns its last output, or None if it has already ended."""
        if (ended := self.end(request_id)) is not None:
            return next(iter(self._present(StepNews(ended=[ended]))), None)
        # A step that was interrupted may have ended it without telling anyone.
        self.outputs.forget(request_id)
        return None

    def end(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> Ended | None:
        """End a request and free its blocks at once; None if it has already ended."""
        request = self.scheduler.end_request(request_id, reason)
        if request is None:
            return None
        self._stop_strings.forget(request_id)
        self._recorder.on_ended(request, reason)
        self._release()
        return Ended(request)

    def step(self) -> list[RequestOutput]:
        """`advance`, and one output for each request with new tokens."""
        return self._present(self.advance())

    def advance(self) -> StepNews:
        """Compute one step.

        An exception in it ends no request but the one that causes it, with `FinishReason.ERROR`: the step is computed
        again, and cut down where that does not help (`engine/recovery.py`).

        Raises:
            EngineDeadError: nothing can be computed any more, or the block accounting is broken.
        """
        # A stream's client waits from step to step, whatever is done in between.
        began, self._went_on_at = self._went_on_at or time.perf_counter(), None
        # Whatever is raised below gives up a step that was planned ahead as well.
        step, self._ahead = self._ahead, None
        try:
            if step is None:
                self._recovery.advance()
                step = self._begin(self.scheduler.schedule())
            if step is None:
                self.scheduler.wait_for_loads()
                return StepNews()
            ahead = self._begin_ahead()
            result = step.collect()
        except LogitsError as error:
            return self._end_faulty(error)
        except Exception as error:
            rows = None if step is None else live_rows(step.plan, self.scheduler.planned)
            return StepNews(ended=self._fail(self._recovery.step_failed(rows, error)))
        planned = self.scheduler.planned
        # Between two calls, a request may have ended that a step planned ahead computes.
        rows = live_rows(step.plan, planned) if step.plan.ahead else None
        try:
            updates = self.scheduler.update(step.plan, result)
        except Exception as error:
            rows = planned_rows(step.plan, planned) if rows is None else rows
            return StepNews(ended=self._fail(self._recovery.update_failed(rows, error)))
        self._ahead = ahead
        news = self._report(updates)
        ended = time.perf_counter()
        self.scheduler.observe(step.plan, ended - began)
        self._went_on_at = ended if self.scheduler.has_work else None
        self._release()
        return news

    def _begin(self, plan: StepPlan) -> _StepInFlight | None:
        """Hand a plan over, if there is anything in it."""
        if not plan:
            return None
        if not self._plans_ahead:
            # Nothing is done meanwhile: it may be computed when its result is wanted.
            return _StepInFlight(plan, partial(self.runner.execute, plan))
        try:
            collect = self.runner.launch(plan)
        except Exception as error:
            collect = partial(_raise, error)  # when it is this step's turn
        return _StepInFlight(plan, collect)

    def _begin_ahead(self) -> _StepInFlight | None:
        """Hand over the step after the one in flight, where it can be planned by now."""
        # What has failed is tried again one step at a time.
        if not self._plans_ahead or not self._recovery.is_calm:
            return None
        return self._begin(self.scheduler.schedule_ahead())

    def output_failed(self, request: Request, error: Exception) -> None:
        """Making a request's output raised: end it, if it runs yet. Its caller has been told."""
        self._recovery.log(error, [request.request_id], "making its output failed: it ends")
        self.end(request.request_id, FinishReason.ERROR)
        self._recovery.audit()

    def _present(self, news: StepNews) -> list[RequestOutput]:
        outputs = self.outputs.process(news)
        for request, error in self.outputs.take_failures():
            self.output_failed(request, error)
        return outputs

    def _report(self, updates: list[SequenceUpdate]) -> StepNews:
        """The news of a step, requests that fail only now among them."""
        failures = self.scheduler.take_failures() + self._stop_strings.find(updates)
        if failures:
            updates = _without(updates, failures)
        for request, error in failures:
            self._recovery.log(error, [request.request_id], "taking in its tokens failed: it ends")
        ended = self._fail([request for request, _ in failures])
        if failures:
            self._recovery.audit()
        try:
            self._recorder.on_step(updates)
        except Exception:
            logger.exception("the statistics of a step are lost")
        return StepNews(updates, ended)

    def _book_admission(self, request: Request) -> None:
        try:
            self._recorder.on_admitted(request)
        except Exception:
            logger.exception("the statistics of an admission are lost")

    def kv_report(self) -> dict[str, Any]:
        """Who holds which bytes of the cache, and how much it helped, ready for JSON: see `engine.inspection`.

        The statistics say the same from then on: looking lets go of expired pins.
        """
        report = kv_report(self.scheduler)
        if (host := self.scheduler.kv.hierarchy.host).num_prefix_slots:
            stores = () if self.tiers is None else self.tiers.stores
            report["tiers"] = tiers_report(host, stores, self.scheduler.kv.spec.block_bytes)
        self._recorder.on_changed()
        return report

    def pins(self) -> list[PinInfo]:
        """Every pin, the soonest to expire first."""
        found = list_pins(self.scheduler.kv)
        self._recorder.on_changed()
        return found

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin before it expires; False if there is none with that id."""
        found = self.scheduler.kv.pins.unpin(pin_id)
        self._recorder.on_changed()
        return found

    def set_kv_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Tenants' floors and caps from now on, as `Scheduler.set_limits`; the statistics say them too."""
        self.scheduler.set_limits(limits)
        size = self.scheduler.kv.spec.block_bytes
        self.stats.kv_limits = {tenant: limits_in_bytes(limit, size) for tenant, limit in limits.items()}

    def reset_prefix_cache(self) -> int:
        """Evict every cached block that is not pinned; returns how many."""
        count = self.scheduler.kv.reset_prefix_cache()
        self._recorder.on_changed()
        return count

    def close(self) -> None:
        """Abort all that is queued or running, and close the runner."""
        for request_id in self.scheduler.request_ids:
            self.end(request_id)
            self.outputs.forget(request_id)
        self._flush()
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()

    def _release(self) -> None:
        """Once nothing is left to compute, nothing is left of any grammar, and no block waits to be stored."""
        if self._ahead is not None:
            if self.scheduler.has_work:
                return
            # It is computed for nobody.
            self._ahead = None
            self.scheduler.abandon_step()
        self._flush()
        if (plan := self.scheduler.release()) is None:
            return
        try:
            self.runner.execute(plan)
        except Exception:
            logger.exception("the runner could not forget the sequences that have ended")
            self.scheduler.abandon_step()

    def _flush(self) -> None:
        if (plan := self.scheduler.flush()) is None:
            return
        try:
            self.runner.execute(plan)
        except Exception:
            logger.exception("%d blocks could not be stored in host memory", len(plan.stores))
            self.scheduler.flushed(done=False)
        else:
            self.scheduler.flushed(done=True)

    def _fail(self, requests: list[Request]) -> list[Ended]:
        """The news of requests that have ended with an error."""
        for request in requests:
            self._stop_strings.forget(request.request_id)
            self._recorder.on_ended(request, FinishReason.ERROR)
        return [Ended(request, STEP_FAILED) for request in requests]

    def _end_faulty(self, error: LogitsError) -> StepNews:
        """End the requests whose logits cannot be sampled; the step is computed anew for all others."""
        # As text: a handler may keep its record, and the error's traceback holds the step.
        logger.error("%s", str(error))
        self.scheduler.abandon_step()
        ended = [self.end(RequestId(name), FinishReason.ERROR) for name in error.request_ids]
        reasons = error.reasons if isinstance(error, GrammarError) else {}
        code = GRAMMAR_TOO_COMPLEX if isinstance(error, GrammarError) else UNUSABLE_LOGITS
        return StepNews(
            ended=[
                replace(one, error=code, error_reason=reasons.get(one.request.request_id))
                for one in ended
                if one is not None
            ]
        )

    def _finish_sequence(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.scheduler.finish(seq, reason, stop_reason)


def _raise(error: Exception) -> NoReturn:
    raise error


def _without(updates: list[SequenceUpdate], failures: list[tuple[Request, Exception]]) -> list[SequenceUpdate]:
    failed = {request.request_id for request, _ in failures}
    return [update for update in updates if update.seq.request.request_id not in failed]
