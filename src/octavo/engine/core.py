"""The engine core: takes requests, computes one step at a time, and returns outputs. Single-threaded."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from octavo.engine.input_processor import InputProcessor
from octavo.engine.inspection import kv_report, limits_in_bytes
from octavo.engine.kv_events import NullPublisher
from octavo.engine.outputs import (
    GRAMMAR_TOO_COMPLEX,
    RANK_LOST,
    STEP_FAILED,
    UNUSABLE_LOGITS,
    Ended,
    OutputKind,
    RequestOutput,
    StepNews,
)
from octavo.engine.processor import OutputProcessor, find_stop_strings, watch_stop_strings
from octavo.engine.recovery import Recovery, live_rows, planned_rows
from octavo.errors import GrammarError, LogitsError
from octavo.observe.stats import EngineStats, Gauges
from octavo.request import (
    FinishReason,
    Request,
    RequestId,
)
from octavo.scheduler.kv_limits import KVLimits
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.plan_log import PlanLog
from octavo.tiers.lower import LowerTiers
from octavo.units import format_bytes

if TYPE_CHECKING:  # they import torch, which a server does later
    from octavo.runner.runner import Collect, ModelRunner

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 10.0
"""Time to write reused blocks to the stores when an engine is closed, unless the caller has another."""


class _StepInFlight(NamedTuple):
    """A plan in the runner, its start time, and the function that waits for its result."""

    plan: StepPlan
    collect: Collect
    began: float


class EngineCore:
    """One model with its cache and its scheduler.

    With `plans_ahead`, the next step is planned while a step is being computed (`Scheduler.schedule`), so that calls
    between two steps find one in flight.

    Args:
        inputs: makes the requests, for the scheduler.
        publisher: publishes what the cache stores and removes, for indexes outside the engine.
        plan_log: records each plan and how long it took.
        resources: closed with the engine.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        runner: ModelRunner,
        *,
        tiers: LowerTiers | None = None,
        plans_ahead: bool = False,
        publisher: NullPublisher | None = None,
        plan_log: PlanLog | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        self.inputs, self.runner, self.tiers = inputs, runner, tiers
        self.config, self.info, self.tokenizer = inputs.config, inputs.info, inputs.tokenizer
        self.scheduler = scheduler = inputs.scheduler
        config, info = self.config, self.info
        self.publisher = NullPublisher() if publisher is None else publisher
        self.stats = EngineStats(max_model_len=info.max_model_len, gauges=partial(Gauges.of, weakref.proxy(scheduler)))
        self.stats.block_bytes = scheduler.kv.spec.block_bytes
        self.stats.cache_config = {
            "block_size": str(scheduler.kv.spec.block_size),
            "cache_dtype": scheduler.kv.spec.dtype,
            "num_gpu_blocks": str(scheduler.kv.pool.num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }
        memory = scheduler.kv.hierarchy.host
        self.stats.host = memory.counters if memory.num_prefix_slots else None
        self.stats.stores = () if tiers is None else tuple(tiers.stores)
        self.stats.fetching = scheduler.fetching
        self.outputs = OutputProcessor(self.tokenizer)
        self._recovery = Recovery(scheduler, runner, self.stats)
        self._plans_ahead = plans_ahead
        self._resources = ExitStack() if resources is None else resources
        self._ahead: _StepInFlight | None = None  # handed over while the previous step was computed
        scheduler.on_admitted = partial(_book_admission, self.stats)
        self._plan_log, self._computed_at = plan_log, 0.0  # when the last result arrived
        self._went_on_at: float | None = None  # when the last step ended, if another was to follow

    @property
    def summary(self) -> str:
        """A one-line summary: the model, its context length, and the memory of weights and cache."""
        info, spec, num_blocks = self.info, self.scheduler.kv.spec, self.scheduler.kv.pool.num_blocks
        return (
            f"{info.model_name}: {info.max_model_len:,} tokens of context, {format_bytes(info.weight_bytes)} of "
            f"weights, {format_bytes(num_blocks * spec.block_bytes)} of KV cache for "
            f"{(num_blocks - 1) // len(spec.groups) * spec.block_size:,} tokens"
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, *, prompt: str | None = None, kind: OutputKind = OutputKind.FINAL) -> None:
        """Queue a request from `inputs`; `step` and `abort` return its outputs."""
        self.queue(request)
        self.outputs.add(request, prompt, kind)

    def queue(self, request: Request) -> None:
        """Queue a request whose outputs the caller makes, from the results of `advance` and `end`."""
        self.scheduler.add(request)
        if not self._recovery.isolation.may_run(request.request_id):
            self.scheduler.hold(request)
        watch_stop_strings(request, self.tokenizer)

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """Abort a request and free its blocks at once; returns its last output, or None if it has already ended."""
        if (ended := self.end(request_id)) is not None:
            return next(iter(self._present(StepNews(ended=[ended]))), None)
        # An interrupted step may have ended it without an output.
        self.outputs.forget(request_id)
        return None

    def end(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> Ended | None:
        """End a request and free its blocks at once; None if it has already ended."""
        request = self.scheduler.end_request(request_id, reason)
        if request is None:
            return None
        self.stats.on_finished(request, reason, time.monotonic())
        self._release()
        return Ended(request)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns one output for each request with new tokens. See `advance`."""
        return self._present(self.advance())

    def advance(self) -> StepNews:
        """Compute one step.

        An exception ends only the request that causes it, with `FinishReason.ERROR`: the step is computed again, and if
        that fails too, its requests are split (`engine/recovery.py`).

        Raises:
            EngineDeadError: nothing can be computed any more, or the block accounting is broken.
        """
        # Time from the end of the previous step, because that is what a streaming client waits for.
        began, self._went_on_at = self._went_on_at or time.perf_counter(), None
        # Any exception below also discards a step that was planned ahead.
        step, self._ahead = self._ahead, None
        if self.runner.failure():
            return self._restart_runner()
        try:
            if step is None:
                if self.scheduler.planned:
                    self.scheduler.abandon_step()  # Ctrl-C ended the last call before its result came
                self._recovery.advance()
                step = self._begin(self.scheduler.schedule())
            if step is None:
                self.scheduler.wait_for_loads()
                return StepNews()
            # After a failure, steps are tried one at a time.
            may_plan = self._plans_ahead and self._recovery.isolation.is_calm
            ahead = self._begin(self.scheduler.schedule()) if may_plan else None
            result = step.collect()
            if self._plan_log is not None:
                before, self._computed_at = self._computed_at, time.perf_counter()
                computing = max(step.began, before)
                self._plan_log.record(step.plan, computing, self._computed_at - computing)
        except LogitsError as error:
            return self._end_faulty(error)
        except Exception as error:
            if self.runner.failure():
                return self._restart_runner()
            rows = None if step is None else live_rows(step.plan, self.scheduler.planned)
            return StepNews(ended=self._fail(self._recovery.step_failed(rows, error)))
        planned = self.scheduler.planned
        # A request in a step planned ahead may have ended between two calls.
        rows = live_rows(step.plan, planned) if step.plan.ahead else None
        try:
            updates = self.scheduler.update(step.plan, result)
        except Exception as error:
            rows = planned_rows(step.plan, planned) if rows is None else rows
            return StepNews(ended=self._fail(self._recovery.update_failed(rows, error)))
        self._ahead = ahead
        self.stats.on_moved(step.plan, result)
        self.publisher.publish()
        news = self._report(updates)
        ended = time.perf_counter()
        self.scheduler.observe(step.plan, ended - began, result.load_seconds + result.store_seconds)
        if self.scheduler.has_work:
            self._went_on_at = ended
        else:
            self._release()
        return news

    def _restart_runner(self) -> StepNews:
        """End the running requests, and restart a runner that has lost its keys and values."""
        failure, requests = self._recovery.runner_failed()
        self.publisher.publish()
        return StepNews(ended=[replace(ended, error_reason=failure) for ended in self._fail(requests, RANK_LOST)])

    def _begin(self, plan: StepPlan) -> _StepInFlight | None:
        """Hand a plan to the runner, unless it is empty."""
        if not plan:
            return None
        if not self._plans_ahead:
            # Nothing is done in the meantime, so compute the step when its result is wanted.
            return _StepInFlight(plan, partial(self.runner.execute, plan), time.perf_counter())
        launched = time.perf_counter()
        try:
            collect = self.runner.launch(plan)
        except Exception as error:
            collect = partial(_raise, error)  # raise it when this step's result is wanted
        return _StepInFlight(plan, collect, launched)

    def output_failed(self, request: Request, error: Exception) -> None:
        """End a request whose output could not be made, if it is still running; its caller has its last output."""
        self._recovery.log(error, [request.request_id], "making its output failed: it ends")
        self.end(request.request_id, FinishReason.ERROR)
        self._recovery.audit()

    def _present(self, news: StepNews) -> list[RequestOutput]:
        outputs = self.outputs.process(news)
        for request, error in self.outputs.take_failures():
            self.output_failed(request, error)
        return outputs

    def _report(self, updates: list[SequenceUpdate]) -> StepNews:
        """Return the results of a step, including requests that failed while its tokens were processed."""
        find_stop_strings(updates, self.scheduler.finish, self.scheduler.fail)
        failed = {}
        for request, error in self.scheduler.take_failures():
            self._recovery.log(error, [request.request_id], "taking in its tokens failed: it ends")
            failed[request.request_id] = request
        ended = self._fail(list(failed.values()))
        if failed:
            updates = [update for update in updates if update.seq.request.request_id not in failed]
            self._recovery.audit()
        try:
            self.stats.on_step(updates, time.monotonic())
        except Exception:
            logger.exception("the statistics of a step are lost")
        return StepNews(updates, ended)

    def kv_report(self) -> dict[str, Any]:
        """Return who holds which bytes of the cache, and how much it helped, for JSON; see `engine.inspection`."""
        return kv_report(self.scheduler, () if self.tiers is None else self.tiers.stores)

    def set_kv_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Replace the tenants' floors and caps, also in the statistics; see `Scheduler.set_limits`."""
        self.scheduler.set_limits(limits)
        size = self.scheduler.kv.spec.block_bytes
        self.stats.kv_limits = {tenant: limits_in_bytes(limit, size) for tenant, limit in limits.items()}

    def reset_prefix_cache(self) -> int:
        """Evict every cached block that is neither in use nor pinned, and return their number; drafts start afresh."""
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.forget()
        count = self.scheduler.kv.reset_prefix_cache()
        self.publisher.publish()
        return count

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Abort all requests, write reused blocks to the stores, and close everything.

        Args:
            seconds: maximum time to write blocks; what was not written by then is lost.
        """
        try:
            for request_id in list(self.scheduler.live):
                self.end(request_id)
                self.outputs.forget(request_id)
            self._flush()
            if self.tiers is not None:
                self._write_reused(self.tiers, seconds)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close everything without storing another block: after a fatal error, a block may not be what its key says."""
        self._resources.close()

    def _write_reused(self, tiers: LowerTiers, seconds: float) -> None:
        """Write what the device has reused to the stores, in pieces that fit into host memory."""
        hierarchy, ends = self.scheduler.kv.hierarchy, time.monotonic() + seconds
        left = hierarchy.evict_all(self.scheduler.kv.pool) if seconds > 0 else []
        num_blocks, piece = len(left), max(1, hierarchy.host.num_prefix_slots // 2)
        while left and time.monotonic() < ends:
            for demoted in left[:piece]:
                hierarchy.host.store_prefix(*demoted)
            self._flush()
            tiers.finish_writes(ends - time.monotonic())
            left = left[piece:]
        if num_blocks:
            logger.info("%d of %d reused blocks were given to the stores", num_blocks - len(left), num_blocks)

    def _release(self) -> None:
        """Once no request is left, store pending blocks and make the runner forget all sequences and grammars."""
        if self.scheduler.has_work:
            return
        if self._ahead is not None:
            # All its requests have ended.
            self._ahead = None
            self.scheduler.abandon_step()
        self._flush()

    def _flush(self) -> None:
        if (plan := self.scheduler.idle_plan()) is None:
            return
        try:
            self.scheduler.update(plan, self.runner.execute(plan))
        except Exception:
            logger.exception("the runner could not store %d blocks, or forget ended sequences", len(plan.stores))
            self.scheduler.abandon_step()

    def _fail(self, requests: list[Request], error: str = STEP_FAILED) -> list[Ended]:
        """Record requests that have ended with an error."""
        for request in requests:
            self.stats.on_finished(request, FinishReason.ERROR, time.monotonic())
        return [Ended(request, error) for request in requests]

    def _end_faulty(self, error: LogitsError) -> StepNews:
        """End the requests whose logits cannot be sampled; the step is recomputed for all others."""
        # Log it as text, because a handler may keep the record, and the traceback would keep the step alive.
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


def _book_admission(stats: EngineStats, request: Request) -> None:
    try:
        stats.on_admitted(request, time.monotonic())
    except Exception:
        logger.exception("the statistics of an admission are lost")


def _raise(error: Exception) -> NoReturn:
    raise error
