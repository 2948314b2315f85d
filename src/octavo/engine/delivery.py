"""Delivers the results of steps to the callers' streams, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from octavo.engine.outputs import RequestOutput, StepNews
from octavo.engine.processor import OutputProcessor
from octavo.errors import OctavoError, RequestError, UnreadError
from octavo.request import Request, RequestId

# Number of sequences processed before other callbacks of the event loop get a turn.
DELIVERED_AT_ONCE = 64
# Unread tokens and their alternatives (about 100 bytes each) at which a request is ended.
MAX_UNREAD = 262_144


class Stream(asyncio.Queue["RequestOutput | OctavoError"]):
    """The queue of one request's outputs for its caller.

    Attributes:
        unread: unread tokens and alternatives in the queue.
    """

    unread = 0

    def hand_over(self, output: RequestOutput) -> None:
        self.unread += _num_objects(output)
        self.put_nowait(output)

    async def next(self) -> RequestOutput:
        """Return the next output; raises if an error was queued instead."""
        output = await self.get()
        if isinstance(output, OctavoError):
            raise output
        self.unread -= _num_objects(output)
        return output


def _num_objects(output: RequestOutput) -> int:
    count = 0
    for completion in output.outputs:
        count += 1 + len(completion.token_ids)
        if completion.logprobs:
            count += sum(len(entry.top) for entry in completion.logprobs)
    return count


class Delivery:
    """Turns results into outputs for the open streams. Every method runs on the event loop.

    Args:
        outputs: makes outputs from the results of a step.
        abort: ends a request whose outputs are not read.
        output_failed: ends a request whose output could not be made, given the exception.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        abort: Callable[[RequestId], None],
        output_failed: Callable[[Request, Exception], None],
    ) -> None:
        self._outputs = outputs
        self._abort = abort
        self._output_failed = output_failed
        # Every request until its last output; None once its caller has left.
        self._streams: dict[RequestId, Stream | None] = {}
        self._undelivered: deque[StepNews] = deque()

    def __bool__(self) -> bool:
        """Whether any request has yet to get its last output, including those whose caller has left."""
        return bool(self._streams)

    def open(self, request_id: RequestId) -> Stream:
        """Open the stream of a request; raises `RequestError` if its id is in use."""
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        stream = self._streams[request_id] = Stream()
        return stream

    def close(self, request_id: RequestId, stream: Stream) -> None:
        """Abort the request of a caller that has left, unless it has ended."""
        if self._streams.get(request_id) is stream:
            self._streams[request_id] = None
            self._abort(request_id)

    def deliver(self, news: StepNews) -> None:
        """Turn a step's results into outputs, and put these into their streams."""
        self._undelivered.append(news)
        if len(self._undelivered) == 1:
            self._deliver_some()

    def refuse(self, request_id: RequestId, error: OctavoError) -> None:
        """Report that the request was never queued."""
        self._outputs.forget(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put_nowait(error)

    def fail(self, error: OctavoError) -> None:
        """Deliver pending results, then end every stream with `error`."""
        while self._undelivered:
            self._deliver_some()
        for stream in self._streams.values():
            if stream is not None:
                stream.put_nowait(error)
        self._streams.clear()

    def _deliver_some(self) -> None:
        """Deliver some of the oldest results, and schedule the rest after other callbacks."""
        if not self._undelivered:
            return  # `fail` has delivered everything
        news = self._undelivered[0]
        some = news.take(DELIVERED_AT_ONCE)
        if not news:
            self._undelivered.popleft()
        outputs = self._outputs.process(some)
        _let_go(some, outputs)
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
                self._abort(output.request_id)
        for request, error in self._outputs.take_failures():
            self._output_failed(request, error)
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)


def _let_go(news: StepNews, outputs: list[RequestOutput]) -> None:
    """Break the reference cycles between ended requests and their sequences.

    Otherwise only a full garbage collection would free them, and a busy server defers it.
    """
    finished = {output.request_id for output in outputs if output.finished and output.error is None}
    for update in news.updates:
        request = update.seq.request
        if request.request_id in finished:
            request.sequences.clear()
    for ended in news.ended:
        ended.request.sequences.clear()
