"""The asyncio front end of the engine: steps run in their own thread, which wakes the event loop once per step.

event loop                                          engine thread
generate() ── calls ──────> inbox ──────────────> take in, step, step, …
   ^                                                   │ results of one step
   └── stream <── outputs <── _deliver <── call_soon_threadsafe

The engine's thread does the work that decides the next step. Text and outputs are produced on the event loop while that
step is computed. Stop strings are the exception: they end their sequence within the step (`engine/processor.py`).
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
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from octavo.engine.core import EngineCore
from octavo.engine.input_processor import Prompt
from octavo.engine.outputs import Ended, OutputKind, RequestOutput, StepNews, Stream
from octavo.engine.turns import GrammarQueue, TenantThreads
from octavo.engine.watchdog import Watchdog
from octavo.errors import CacheError, EngineDeadError, OctavoError, RequestError, RequestFailedError, UnreadError
from octavo.observe.stats import EngineStats
from octavo.request import DEFAULT_CONTEXT, Request, RequestContext, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.kv_limits import KVAmounts, KVLimits
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IDLE_AUDIT_SECONDS = 1.0
IDLE_COLLECT_SECONDS = 60.0
# How long new requests, and how long aborts, may delay a step. Aborts may take longer, because until they are processed
# steps are computed for clients that have left.
TAKE_IN_SECONDS = 0.001
GIVE_UP_SECONDS = 0.002
# Prompts with at least this many characters or token ids are processed in a thread. So are requests with a grammar, and
# with bad words, which must be tokenised: 128 of them took 9 ms.
_MADE_AT_ONCE = 1024
NUM_SHARED_THREADS = 2
"""Number of such requests processed at a time; one more thread is reserved for tenants without any in progress."""

# Number of sequences whose results are delivered before other callbacks of the event loop get a turn.
DELIVERED_AT_ONCE = 64
# Unread tokens and their alternatives (about 100 bytes each) at which a request is ended.
MAX_UNREAD = 262_144

_T = TypeVar("_T")


class AsyncEngine:
    """One `EngineCore` shared by many callers. All methods must be called from the event loop that called `start`.

    Args:
        idle_audit_seconds: idle time after which the block accounting is audited once. A mismatch is logged, counted
            and reported by `/health`, but does not stop the engine.
        idle_collect_seconds: further idle time after which a full garbage collection runs once.
        watchdog_seconds: how long a step may take before it is reported; if None, steps are not watched.
        prepare_grammars: whether to prepare structured outputs when the engine is first idle. Otherwise the first
            request with one waits for it, and may hold up the requests that run at that time.
    """

    def __init__(
        self,
        core: EngineCore,
        model_name: str,
        *,
        idle_audit_seconds: float = IDLE_AUDIT_SECONDS,
        idle_collect_seconds: float = IDLE_COLLECT_SECONDS,
        watchdog_seconds: float | None = None,
        prepare_grammars: bool = False,
    ) -> None:
        self.core = core
        self.info = replace(core.info, model_name=model_name)
        self._idle_audit_seconds = idle_audit_seconds
        self._idle_collect_seconds = idle_collect_seconds
        self._prepares_grammars = prepare_grammars
        # Every request until its last output; None once its caller has left.
        self._streams: dict[RequestId, Stream | None] = {}
        self._undelivered: deque[StepNews] = deque()
        # Calls for the engine's thread to make between two steps, and whether they abort a request. One queue, so that
        # those about one request stay in order.
        self._inbox: deque[tuple[Callable[[], None], bool]] = deque()
        self._aborted: list[Ended] = []  # since the last step's results
        self._answers: set[asyncio.Future[Any]] = set()
        self._wake = threading.Event()
        self._stopping = False
        self._closing = False
        self._closes_by = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._watchdog = Watchdog(self._thread, core.stats, watchdog_seconds)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._making = TenantThreads(NUM_SHARED_THREADS, "octavo-prompt")
        self._grammars = None if (compiler := core.inputs.grammars) is None else GrammarQueue(compiler)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.core.inputs.require_tokenizer()

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    @property
    def is_planning(self) -> bool:
        """Whether the engine's thread is in a step, but outside the model's computation.

        It then needs the GIL, and has to wait for it after each of about a hundred calls that release it.
        """
        return self._watchdog.began is not None and not self.core.runner.is_computing

    @property
    def is_stepping(self) -> bool:
        """Whether the engine's thread is in a step, which may need every core."""
        return self._watchdog.began is not None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        publisher = self.core.publisher
        publisher.on_wanted = lambda: self._send(publisher.publish)
        self.core.runner.watch(self._wake.set)
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
            RequestError: the request is invalid; raised from the first step of the iterator, with nothing queued.
            OverloadedError: the queue, or the tenant's share of it, is full; raised in the same way.
            UnreadError: more than `MAX_UNREAD` of output was left unread, so the request was ended.
            EngineDeadError: the step loop died, or the engine is shutting down.
        """
        self._require_alive()
        self._check_room(0 if isinstance(prompt, str) else len(prompt), context)
        make = self.core.inputs.make_without_grammar
        if len(prompt) < _MADE_AT_ONCE and params.structured_outputs is None and not params.bad_words:
            request = make(prompt, params, context)
        else:
            request = await self._making.run(context.tenant, partial(make, prompt, params, context))
            self._require_alive()
            if (wanted := request.params.structured_outputs) is not None:
                assert self._grammars is not None  # or it would have been refused
                request.grammar = await self._grammars.compile(wanted, context.tenant)
                self._require_alive()
        # Nothing is awaited from here until the request is queued, so the check stays valid.
        self._check_room(len(request.prompt_token_ids), context)
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        stream = self._streams[request.request_id] = Stream()
        self.stats.waiting.enter(request)
        self.core.outputs.add(request, prompt if isinstance(prompt, str) else None, output_kind)
        self._send(partial(self._add, request))
        try:
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if self._streams.get(request.request_id) is stream:  # it has not ended: its caller has left
                self._streams[request.request_id] = None
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step; its stream gets the remaining output, with the finish reason "abort".

        Unknown ids are ignored, because the request may just have finished.
        """
        self._send(partial(self._end, RequestId(request_id)), is_abort=True)

    def resolve_kv_limits(self, amounts: KVAmounts) -> Mapping[str, KVLimits]:
        """Convert tenants' floors and caps to blocks; raises `ConfigError` if they do not fit the cache."""
        return self.core.scheduler.resolve_limits(amounts)

    async def ask(self, question: Callable[[EngineCore], _T]) -> _T:
        """Call a function with the core in the engine's thread between two steps, and return its result.

        Before `start`, it is called at once.
        """
        if self._loop is None:
            return question(self.core)
        self._require_alive()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

        def ask() -> None:
            try:
                give = partial(answer.set_result, question(self.core))
            except Exception as error:
                give = partial(answer.set_exception, error)
            self._call_in_loop(lambda: None if answer.done() else give())

        self._send(ask)
        return await answer

    async def shutdown(self, drain_seconds: float) -> None:
        """Accept no more requests, let running ones finish for `drain_seconds`, abort the rest and stop the thread.

        The rest of that time is spent on writing reused blocks to the stores.
        """
        self._closing = True
        self._closes_by = deadline = time.monotonic() + drain_seconds
        while self._streams and self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._fail(EngineDeadError("the server is shutting down"))
        self._making.close()
        if self._grammars is not None:
            self._grammars.close()
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
        limits = self.info.limits
        if context.tenant:
            share = 1.0 if self.core.config.tenant_share is None else self.core.config.tenant_share
            self.stats.waiting.check_room(
                context.tenant,
                num_tokens,
                most_requests=context.max_waiting_requests or max(1, int(share * limits.max_waiting_requests)),
                most_tokens=context.max_waiting_tokens or max(1, int(share * limits.max_waiting_tokens)),
            )
        waiting = self.stats.waiting.total
        limits.check_room(waiting_requests=waiting.requests, waiting_tokens=waiting.tokens, num_tokens=num_tokens)

    def _send(self, call: Callable[[], None], *, is_abort: bool = False) -> None:
        self._inbox.append((call, is_abort))
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._step():
                pass
            self.core.close(max(0.0, self._closes_by - time.monotonic()))
        except Exception as error:  # callers must learn of any failure
            logger.critical("the step loop died: no request can be served any more", exc_info=error)
            cause = error.__cause__ or error if isinstance(error, EngineDeadError) else error
            self._error = cause
            dead = EngineDeadError(f"the engine has stopped: {error}")
            dead.__cause__ = cause
            self._call_in_loop(partial(self._fail, dead))
            try:
                self.core.abandon()  # other ranks end, and what is logged or on its way to a store is written
            except Exception:
                logger.exception("closing the engine failed too")
        finally:
            self._watchdog.stop()

    def _step(self) -> bool:
        """Accept new requests, compute one step or wait; returns whether to continue."""
        # Clear it before reading the inbox and the stop flag, so that whatever comes later sets it again.
        self._wake.clear()
        if self._stopping:
            return False
        self._watchdog.began = time.monotonic()
        self._take_in()
        has_work = self.core.has_work or self.core.runner.failure()
        news = self.core.advance() if has_work else StepNews()
        self._watchdog.began = None
        news.ended += self._aborted
        self._aborted = []
        if news:
            self._call_in_loop(partial(self._deliver, news))
        elif not self.core.has_work and not self._wake.wait(self._idle_audit_seconds):
            try:
                self._use_idle_time()
            except OSError as error:
                # Starting a process and importing a module need descriptors, of which clients may hold all.
                logger.warning("idle checks postponed: %s", error)
            if not self._wake.wait(self._idle_collect_seconds):
                # A full collection may take tens of milliseconds, so the server's settings defer it until idle.
                gc.collect()
                self._wake.wait()
        return True

    def _use_idle_time(self) -> None:
        """Audit the block accounting; a request that arrives meanwhile waits for it, about 1 ms per 1,500 blocks."""
        if self._prepares_grammars and self.core.inputs.grammars is not None:
            self.core.inputs.grammars.prepare()
            self._prepares_grammars = False
        try:
            self.core.scheduler.kv.audit()
            self.stats.on_audit(None)
        except CacheError as error:
            if self.stats.audit_problem != str(error):
                logger.error("the block accounting is wrong (found while idle); serving continues: %s", error)
            self.stats.on_audit(str(error))

    def _take_in(self) -> None:
        """Make the calls in the inbox."""
        began = time.monotonic()
        while self._inbox:
            call, is_abort = self._inbox[0]
            if time.monotonic() - began > (GIVE_UP_SECONDS if is_abort else TAKE_IN_SECONDS):
                # Many new requests must not delay the running ones; the rest is processed before the next step.
                self._wake.set()
                break
            self._inbox.popleft()
            call()

    def _end(self, request_id: RequestId) -> None:
        if (ended := self.core.end(request_id)) is not None:
            self._aborted.append(ended)

    def _add(self, request: Request) -> None:
        request_id = request.request_id
        try:
            self.core.queue(request)
        except Exception as error:
            logger.exception("request %s could not be queued", request_id)
            self.core.end(request_id)
            self.stats.waiting.leave(request_id)
            failure = error if isinstance(error, OctavoError) else RequestFailedError(request_id)
            self._call_in_loop(partial(self._refuse, request_id, failure))

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None  # `start` sets it before it starts the thread
        # A closed loop has no callers to notify.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self, news: StepNews) -> None:
        """Turn a step's results into outputs, and put these into their streams; on the event loop, as all below."""
        self._undelivered.append(news)
        if len(self._undelivered) == 1:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """Deliver some of the oldest results, and schedule the rest after other callbacks."""
        if not self._undelivered:
            return  # `_fail` has delivered everything
        news = self._undelivered[0]
        some = news.take(DELIVERED_AT_ONCE)
        if not news:
            self._undelivered.popleft()
        outputs = self.core.outputs.process(some)
        some.let_go(outputs)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if output.finished:
                self._streams.pop(output.request_id, None)
            if stream is None:
                continue
            stream.hand_over(output)
            if stream.unread > MAX_UNREAD and not output.finished:
                # The outputs are not read and would fill the memory.
                self._streams[output.request_id] = None
                stream.put_nowait(UnreadError(f"{stream.unread} tokens were not read: the request was ended"))
                self.abort(output.request_id)
        for request, error in self.core.outputs.take_failures():
            self._send(partial(self.core.output_failed, request, error))
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _refuse(self, request_id: RequestId, error: OctavoError) -> None:
        """Report that a request was never queued."""
        self.core.outputs.forget(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put_nowait(error)

    def _fail(self, error: OctavoError) -> None:
        """Deliver pending results, then end every stream and question with `error`."""
        while self._undelivered:
            self._deliver_some()
        for stream in self._streams.values():
            if stream is not None:
                stream.put_nowait(error)
        self._streams.clear()
        for answer in list(self._answers):
            if not answer.done():
                answer.set_exception(error)
