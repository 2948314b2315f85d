"""The engine behind an event loop: the step loop runs in its own thread and wakes the event loop once per step.

event loop                                          engine thread
generate() ── add / abort ──> inbox ──────────────> take in, step, step, …
   ^                                                   │ all news of one step
   └── stream <── outputs <── Delivery <── call_soon_threadsafe

The engine's thread does what decides the next step. Text and outputs are made on the event loop while that step is
computed, stop strings apart: they end their sequence in the very step (`engine/stopping.py`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.delivery import Delivery
from octavo.engine.inbox import Abort, Addition, Message, OutputFailed, Question, Tally
from octavo.engine.input_processor import Prompt
from octavo.engine.inspection import PinInfo
from octavo.engine.outputs import Ended, OutputKind, RequestOutput, StepNews
from octavo.engine.watchdog import Watchdog
from octavo.errors import CacheError, EngineDeadError, OctavoError, RequestError, RequestFailedError
from octavo.limits import RequestLimits
from octavo.observe.stats import EngineStats
from octavo.pooling import Pooling
from octavo.request import DEFAULT_CONTEXT, Request, RequestContext, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.kv_limits import KVAmounts, KVLimits
from octavo.scheduler.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_AUDIT_SECONDS = 1.0
IDLE_COLLECT_SECONDS = 60.0
# An idle audit computes for the one, then leaves the processor, and the interpreter's lock, alone for the other: a
# client that comes meanwhile waits for one slice, and the event loop for none.
AUDIT_SLICE_SECONDS = 0.0003
AUDIT_PAUSE_SECONDS = 0.001
# How long a step may be put off by requests that come in, and how long by such that are given up: until that is known,
# steps are computed for clients who have left.
TAKE_IN_SECONDS = 0.001
GIVE_UP_SECONDS = 0.002
# Characters or token ids of a prompt from which on its request is made in a thread; so is any with a grammar, or with
# bad words, which are tokenised: 128 of them took the event loop 9 ms.
_MADE_AT_ONCE = 1024

_T = TypeVar("_T")


class AsyncEngine:
    """One `EngineCore` shared by many callers. All methods must be called from the event loop that called `start`.

    Args:
        idle_audit_seconds: how long nothing must run before the block accounting is proven once. A mismatch is logged,
            counted, and told by `/health`; it does not stop the engine.
        watchdog_seconds: how long a step may take before it is reported; None: as long as it likes.
        idle_collect_seconds: how long nothing must run after that before all of Python's garbage is collected once.
    """

    def __init__(
        self,
        core: EngineCore,
        model_name: str,
        *,
        idle_audit_seconds: float = IDLE_AUDIT_SECONDS,
        idle_collect_seconds: float = IDLE_COLLECT_SECONDS,
        watchdog_seconds: float | None = None,
    ) -> None:
        self.core = core
        self.model_name = model_name
        self._idle_audit_seconds = idle_audit_seconds
        self._idle_collect_seconds = idle_collect_seconds
        self._delivery = Delivery(core.outputs, self.abort, lambda *failure: self._send(OutputFailed(*failure)))
        # One queue for both, so that what is said of one id arrives in the order it was said.
        self._inbox: deque[Message] = deque()
        # What went into the inbox, counted by the event loop, and what came out, by the engine's thread.
        self._sent = Tally()
        self._taken = Tally()
        self._answers: set[asyncio.Future[Any]] = set()
        self._wake = threading.Event()
        self._stopping = False
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._watchdog = Watchdog(self._thread, core.stats, watchdog_seconds)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def max_model_len(self) -> int:
        return self.core.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.core.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        if self.core.tokenizer is None:
            raise RequestError("this model has no tokenizer: pass token ids as the prompt", param="prompt")
        return self.core.tokenizer

    @property
    def hidden_size(self) -> int:
        return self.core.hidden_size

    @property
    def pooling(self) -> Pooling:
        return self.core.pooling

    @property
    def default_sampling(self) -> dict[str, Any]:
        return self.core.default_sampling

    @property
    def limits(self) -> RequestLimits:
        return self.core.config

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    @property
    def is_planning(self) -> bool:
        """Whether the engine's thread is at a step, and not at the part of it that the model computes.

        It then needs the interpreter, and waits for it after each of a hundred calls that let go of it.
        """
        return self._watchdog.began is not None and not self.core.runner.is_computing

    @property
    def is_stepping(self) -> bool:
        """Whether the engine's thread is at a step, which may need every core."""
        return self._watchdog.began is not None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watchdog.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        *,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request as they arrive. Closing the iterator aborts the request within one step.

        Raises:
            RequestError: from the first step of the iterator; nothing has been queued then.
            OverloadedError: in the same way, where the queue, or the tenant's part of it, has no room.
            UnreadError: more than `delivery.MAX_UNREAD` was waiting to be taken, so the request was ended.
            EngineDeadError: the step loop died, or the engine is shut down.
        """
        self._require_alive()
        self._check_room(0 if isinstance(prompt, str) else len(prompt), context)
        if len(prompt) < _MADE_AT_ONCE and params.structured_outputs is None and not params.bad_words:
            request = self.core.make_request(prompt, params, context)
        else:
            request = await asyncio.to_thread(self.core.make_request, prompt, params, context)
            self._require_alive()
        # Nothing is awaited from here until it is queued, so what was counted stays true.
        self._check_room(len(request.prompt_token_ids), context)
        stream = self._delivery.open(request.request_id)
        self._sent.add(request)
        self.stats.waiting.enter(request)
        self.core.outputs.add(request, prompt if isinstance(prompt, str) else None, output_kind)
        self._send(Addition(request))
        try:
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            self._delivery.close(request.request_id, stream)

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step; its stream gets the remaining output, with the reason "abort".

        Unknown ids are ignored: it may just have finished.
        """
        self._send(Abort(RequestId(request_id)))

    async def kv_report(self) -> dict[str, Any]:
        """The ledger, ready for JSON: see `engine.inspection`."""
        return await self._ask(lambda core: core.kv_report())

    async def inspect(self, look: Callable[[Scheduler], _T]) -> _T:
        """What a function finds that looks at the scheduler, and changes nothing, between two steps."""
        return await self._ask(lambda core: look(core.scheduler))

    async def pins(self) -> list[PinInfo]:
        """Every pin, the soonest to expire first."""
        return await self._ask(lambda core: core.pins())

    async def unpin(self, pin_id: str) -> bool:
        """Let a pin go; False where there is none of that id."""
        return await self._ask(lambda core: core.unpin(pin_id))

    def resolve_kv_limits(self, amounts: KVAmounts) -> Mapping[str, KVLimits]:
        """Tenants' floors and caps in blocks of this engine's cache; raises `ConfigError` where they do not fit."""
        return self.core.scheduler.resolve_limits(amounts)

    async def set_kv_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Tenants' floors and caps from now on; may be called before `start`."""
        if self._loop is None:
            self.core.set_kv_limits(limits)
        else:
            await self._ask(lambda core: core.set_kv_limits(limits))

    async def reset_prefix_cache(self) -> int:
        """Give up every cached block that is neither used nor pinned; returns how many."""
        return await self._ask(lambda core: core.reset_prefix_cache())

    async def _ask(self, question: Callable[[EngineCore], _T]) -> _T:
        """Run a call in the engine's thread between two steps, where the accounting does not change."""
        self._require_alive()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        self._send(Question(question, answer))
        return await answer

    async def shutdown(self, drain_seconds: float) -> None:
        """Accept no more requests, let running ones finish for `drain_seconds`, abort the rest, stop the thread."""
        self._closing = True
        deadline = time.monotonic() + drain_seconds
        while self._delivery and self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._fail(EngineDeadError("the server is shutting down"))
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _require_alive(self) -> None:
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        if self._error is not None:
            raise EngineDeadError(f"the engine has stopped: {self._error}") from self._error
        if self._loop is None:
            raise EngineDeadError("the engine has not been started")

    def _check_room(self, num_tokens: int, context: RequestContext) -> None:
        if context.tenant:
            share = 1.0 if self.config.queue_tenant_share is None else self.config.queue_tenant_share
            self.stats.waiting.check_room(
                context.tenant,
                num_tokens,
                most_requests=context.max_waiting_requests or max(1, int(share * self.limits.max_waiting_requests)),
                most_tokens=context.max_waiting_tokens or max(1, int(share * self.limits.max_waiting_tokens)),
            )
        scheduler = self.core.scheduler
        self.limits.check_room(
            waiting_requests=scheduler.num_waiting + self._sent.requests - self._taken.requests,
            waiting_tokens=scheduler.num_waiting_tokens + self._sent.tokens - self._taken.tokens,
            num_tokens=num_tokens,
        )

    def _send(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._step():
                pass
            self.core.close()
        except Exception as error:  # whatever it is, callers must hear of it
            logger.critical("the step loop died: no request can be served any more", exc_info=error)
            cause = error.__cause__ or error if isinstance(error, EngineDeadError) else error
            self._error = cause
            dead = EngineDeadError(f"the engine has stopped: {error}")
            dead.__cause__ = cause
            self._call_in_loop(self._fail, dead)
        finally:
            self._watchdog.stop()

    def _step(self) -> bool:
        """Accept new requests, compute one step or wait; returns whether to continue."""
        # Cleared before anything is looked at: what comes later, a stop too, sets it again.
        self._wake.clear()
        if self._stopping:
            return False
        self._watchdog.began = time.monotonic()
        aborted = self._take_in()
        news = self.core.advance() if self.core.has_work else StepNews()
        self._watchdog.began = None
        news.ended += aborted
        if news:
            self._call_in_loop(self._delivery.deliver, news)
        elif not self.core.has_work and not self._wake.wait(self._idle_audit_seconds):
            self._audit()
            if not self._wake.wait(self._idle_collect_seconds):
                # The server's settings leave this to such a moment: it may take tens of milliseconds.
                gc.collect()
                self._wake.wait()
        return True

    def _audit(self) -> None:
        """Audit the block accounting slice by slice; stops as soon as a request arrives."""
        slices = self.core.scheduler.kv.auditor()
        try:
            while not self._wake.wait(AUDIT_PAUSE_SECONDS):
                until = time.perf_counter() + AUDIT_SLICE_SECONDS
                while time.perf_counter() < until:
                    next(slices)
        except StopIteration:
            self.stats.on_audit(None)
        except CacheError as error:
            if self.stats.audit_problem != str(error):
                logger.error("the block accounting of the idle engine is wrong; it goes on: %s", error)
            self.stats.on_audit(str(error))

    def _take_in(self) -> list[Ended]:
        """Add and abort requests from the inbox; returns those aborted."""
        aborted = []
        began = time.monotonic()
        while self._inbox:
            most = GIVE_UP_SECONDS if isinstance(self._inbox[0], Abort) else TAKE_IN_SECONDS
            if time.monotonic() - began > most:
                # Who runs shall not wait for a crowd to come in; and nobody waits for another wake-up.
                self._wake.set()
                break
            message = self._inbox.popleft()
            if isinstance(message, Addition):
                self._add(message.request)
                self._taken.add(message.request)
            elif isinstance(message, Question):
                self._call_in_loop(lambda deliver: deliver(), message.put_to(self.core))
            elif isinstance(message, OutputFailed):
                self.core.output_failed(message.request, message.error)
            elif (ended := self.core.end(message.request_id)) is not None:
                aborted.append(ended)
        return aborted

    def _add(self, request: Request) -> None:
        request_id = request.request_id
        try:
            self.core.queue(request)
        except Exception as error:
            logger.exception("request %s could not be queued", request_id)
            self.core.end(request_id)
            self.stats.waiting.leave(request_id)
            failure = error if isinstance(error, OctavoError) else RequestFailedError(request_id)
            self._call_in_loop(lambda failed: self._delivery.refuse(request_id, failed), failure)

    def _call_in_loop(self, callback: Callable[[_T], None], argument: _T) -> None:
        assert self._loop is not None  # `start` sets it before it starts the thread
        # A loop that was closed under the engine has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)

    def _fail(self, error: OctavoError) -> None:
        self._delivery.fail(error)
        for answer in list(self._answers):
            if not answer.done():
                answer.set_exception(error)
