"""From the news of a step to the streams of its callers, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from octavo.engine.outputs import RequestOutput, StepNews
from octavo.engine.processor import OutputProcessor
from octavo.errors import OctavoError, RequestError, UnreadError
from octavo.request import Request, RequestId

# Sequences whose news become outputs before other callbacks of the event loop have a turn.
DELIVERED_AT_ONCE = 64
# Tokens and alternatives of them (each about 100 bytes) that wait for one request's caller before the request is ended.
MAX_UNREAD = 262_144


class Stream(asyncio.Queue["RequestOutput | OctavoError"]):
    """One request's outputs on their way to its caller.

    Attributes:
        unread: how much waits in it, in tokens and alternatives.
    """

    unread = 0

    def hand_over(self, output: RequestOutput) -> None:
        self.unread += _num_objects(output)
        self.put_nowait(output)

    async def next(self) -> RequestOutput:
        """Raises the error that was put in place of an output."""
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
    """The open streams, and the news that have not become outputs yet. Every method runs on the event loop.

    Args:
        outputs: makes outputs of news.
        abort: ends a request that nobody reads.
        output_failed: ends a request whose output could not be made, with the exception.
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
        # From a request's start to its last output, which the engine owes for each; None once its caller has left.
        self._streams: dict[RequestId, Stream | None] = {}
        self._undelivered: deque[StepNews] = deque()

    def __bool__(self) -> bool:
        """Whether the engine still owes an output to anyone, callers that have left among them."""
        return bool(self._streams)

    def open(self, request_id: RequestId) -> Stream:
        """Raises `RequestError` where the id is in use."""
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        stream = self._streams[request_id] = Stream()
        return stream

    def close(self, request_id: RequestId, stream: Stream) -> None:
        """The caller has left: ends its request, unless that has happened."""
        if self._streams.get(request_id) is stream:
            self._streams[request_id] = None
            self._abort(request_id)

    def deliver(self, news: StepNews) -> None:
        """Make outputs of a step's news, and put them into their streams."""
        self._undelivered.append(news)
        if len(self._undelivered) == 1:
            self._deliver_some()

    def refuse(self, request_id: RequestId, error: OctavoError) -> None:
        """The request was never queued."""
        self._outputs.forget(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put_nowait(error)

    def fail(self, error: OctavoError) -> None:
        """Deliver what there is, then end every stream with `error`."""
        while self._undelivered:
            self._deliver_some()
        for stream in self._streams.values():
            if stream is not None:
                stream.put_nowait(error)
        self._streams.clear()

    def _deliver_some(self) -> None:
        """Some of the oldest news; the rest after other tasks have had their turn."""
        if not self._undelivered:
            return  # by `fail`
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
                # The engine computes for nobody, and its outputs would fill the memory.
                self._streams[output.request_id] = None
                stream.put_nowait(UnreadError(f"{stream.unread} tokens were not read: the request was ended"))
                self._abort(output.request_id)
        for request, error in self._outputs.take_failures():
            self._output_failed(request, error)
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._deliver_some)


def _let_go(news: StepNews, outputs: list[RequestOutput]) -> None:
    """Part the requests that have ended from their sequences, which refer back to them.

    Together they would be garbage that only a collection of everything finds, which a busy server puts off.
    """
    finished = {output.request_id for output in outputs if output.finished and output.error is None}
    for update in news.updates:
        request = update.seq.request
        if request.request_id in finished:
            request.sequences.clear()
    for ended in news.ended:
        ended.request.sequences.clear()
