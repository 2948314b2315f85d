"""OpenTelemetry traces: one span per request, with child spans for the time in the queue, in prefill and in decode.

    llm_request   arrival ─────────────────────────────────────── last token
      queue       arrival ──> first scheduled
      prefill                 first scheduled ──> first token
      decode                                      first token ──> last token

The engine's thread only records times; spans are made in a separate thread and exported by the SDK in another.
Needs the packages of `octavo[otel]`, which are only imported when a tracer is made.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from octavo.request import FinishReason, Request

# Time limit for exporting the last spans when a server ends.
FLUSH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Ended:
    """The data of a request's spans, copied at its end, because the request then drops its sequences."""

    traceparent: str | None
    attributes: dict[str, Any]
    arrival: float
    admitted: float | None
    first_token: float | None
    reason: FinishReason
    finished: float


class RequestTracer:
    """Makes the spans of one engine's requests.

    Args:
        exporter: an OpenTelemetry `SpanExporter`.
    """

    def __init__(self, exporter: Any, model_name: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES in the environment override this name.
        self._provider = TracerProvider(resource=Resource({SERVICE_NAME: "octavo"}).merge(Resource.create()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._thread = threading.Thread(target=self._run, name="octavo-tracing", daemon=True)
        self._thread.start()

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """Record the end of a request, whether it was ever scheduled or not, and make its spans."""
        times = request.arrival_time, request.admitted_time, request.first_token_time
        self._ended.put(_Ended(request.traceparent, self._attributes(request, reason), *times, reason, now))

    def close(self) -> None:
        """Export the remaining spans, waiting up to `FLUSH_SECONDS` for each of the two threads."""
        self._ended.put(None)
        self._thread.join(FLUSH_SECONDS)
        self._provider.force_flush(int(FLUSH_SECONDS * 1000))

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            self._make_spans(ended)

    def _make_spans(self, ended: _Ended) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {} if ended.traceparent is None else {"traceparent": ended.traceparent}
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            attributes=ended.attributes,
            start_time=self._ns(ended.arrival),
        )
        if ended.reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(span)
        marks = [("queue", ended.arrival)]
        if ended.admitted is not None:
            marks.append(("prefill", ended.admitted))
        if ended.first_token is not None:
            marks.append(("decode", ended.first_token))
        ends = [start for _, start in marks[1:]] + [ended.finished]
        for (name, start), end in zip(marks, ends, strict=True):
            part = self._tracer.start_span(name, context, start_time=self._ns(start))
            part.end(self._ns(end))
        span.end(self._ns(ended.finished))

    def _attributes(self, request: Request, reason: FinishReason) -> dict[str, Any]:
        """Return a span's attributes, with OpenTelemetry's names for generative AI if they exist; no text or tokens."""
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": [reason.value],
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.output_tokens": sum(seq.num_output_tokens for seq in request.sequences),
            "octavo.cached_tokens": request.num_cached_tokens or 0,
            "octavo.preemptions": sum(seq.num_preemptions for seq in request.sequences),
        }
        if request.tenant:
            attributes["octavo.tenant"] = request.tenant
        return attributes

    def _ns(self, monotonic: float) -> int:
        return self._epoch_ns + int(monotonic * 1e9)


def otlp_tracer(endpoint: str, model_name: str) -> RequestTracer:
    """Return a tracer that sends spans to a collector by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return RequestTracer(OTLPSpanExporter(endpoint=endpoint), model_name)
