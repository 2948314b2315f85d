"""The engine behind an event loop: the step loop in a thread of its own, one wake-up of the loop a step.

    event loop                                engine thread
    generate() ── add / abort ──> inbox ──>   take in, step, step, …
       ^                                         │ all requests' outputs of one step
       └── stream <── _deliver <── call_soon_threadsafe
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore, Prompt
from octavo.engine.outputs import OutputKind, RequestOutput
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.models.tokenizer import Tokenizer
from octavo.observe.stats import EngineStats
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

IDLE_AUDIT_SECONDS = 1.0

_Stream = asyncio.Queue[RequestOutput | OctavoError]


class AsyncEngine:
    """Many callers of one `EngineCore`. Everything but `start` is called from the event loop that started it."""

    def __init__(self, core: EngineCore, model_name: str) -> None:
        self.core = core
        self.model_name = model_name
        self._streams: dict[RequestId, _Stream] = {}
        self._to_add: deque[tuple[Request, str | None, OutputKind]] = deque()
        self._to_abort: deque[RequestId] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
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
    def stats(self) -> EngineStats:
        return self.core.stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, as they come. Closing the iterator aborts the request within one step.

        Raises:
            RequestError: from the first step of the iterator; nothing has been queued then.
            EngineDeadError: the step loop died, or the engine is shut down.
        """
        self._require_alive()
        request = self.core.make_request(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, tenant=tenant
        )
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        stream = self._streams[request.request_id] = asyncio.Queue()
        self._to_add.append((request, prompt if isinstance(prompt, str) else None, output_kind))
        self._wake.set()
        finished = False
        try:
            while not finished:
                output = await stream.get()
                if isinstance(output, OctavoError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; unknown ids are ignored: it may just have finished."""
        self._to_abort.append(RequestId(request_id))
        self._wake.set()

    async def shutdown(self, drain_seconds: float) -> None:
        """Take no more requests, let what runs finish for up to `drain_seconds`, abort the rest, stop the thread."""
        self._closing = True
        deadline = time.monotonic() + drain_seconds
        while self._streams and self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._fail_streams(EngineDeadError("the server is shutting down"))
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _require_alive(self) -> None:
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        if self._error is not None:
            raise EngineDeadError(f"the engine has stopped: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_in()
                if self.core.has_work:
                    if outputs := self.core.step():
                        self._call_in_loop(outputs)
                elif not self._wake.wait(IDLE_AUDIT_SECONDS):
                    self.core.scheduler.kv.audit()
                    self._wake.wait()
            self._take_in()
            self.core.close()
        except Exception as error:  # whatever it is, callers must hear of it
            logger.exception("the step loop died")
            self._error = error
            if self._loop is not None and not self._loop.is_closed():
                dead = EngineDeadError(f"the engine has stopped: {error}")
                dead.__cause__ = error
                self._loop.call_soon_threadsafe(self._fail_streams, dead)

    def _take_in(self) -> None:
        self._wake.clear()
        while self._to_add:
            request, prompt, kind = self._to_add.popleft()
            self.core.add(request, prompt=prompt, kind=kind)
        while self._to_abort:
            self.core.abort(self._to_abort.popleft())

    def _call_in_loop(self, outputs: list[RequestOutput]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            # Without a stream its caller has left; the abort is on its way.
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)

    def _fail_streams(self, error: OctavoError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
