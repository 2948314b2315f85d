"""Traces: one span for each request and its phases, part of the trace that the client names."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.observe import tracing
from tests.engine.tiny_engine import tiny_core
from tests.server.conftest import Running, running_server

pytestmark = pytest.mark.integration

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """An OTLP collector over HTTP that keeps the spans it is sent."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk", reason="the packages of octavo[otel] are not installed")
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans: list[Any] = []
        self.spans = spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                spans.extend(s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def traced(collector: Collector) -> Iterator[Running]:
    """A server over a tiny model; closing its tracer exports all spans."""
    with tiny_core() as core:
        core.stats.tracer = tracing.otlp_tracer(collector.endpoint, "tiny")
        with running_server(
            AsyncEngine(core, "tiny"), shutdown_timeout=0, otlp_traces_endpoint=collector.endpoint, api_key=["sk-a"]
        ) as server:
            server.client.headers["x-api-key"] = "sk-a"
            yield server
        core.stats.tracer.close()


def ask(server: Running, **headers: str) -> dict[str, Any]:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    response = server.post("/v1/completions", body, headers=headers)
    assert response.status_code == 200
    server.engine.core.stats.tracer.close()
    return response.json()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def test_a_request_has_a_span_for_each_phase_within_the_clients_trace(traced: Running, collector: Collector) -> None:
    answer = ask(traced, traceparent=TRACEPARENT)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert whole.parent_span_id.hex() == PARENT
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent_span_id for part in parts} == {whole.span_id}
    times = [whole.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert times == sorted(times)
    assert [part.start_time_unix_nano for part in parts] == times[:3]
    assert times[3] == whole.end_time_unix_nano
    told = attributes(whole)
    assert told["gen_ai.response.id"] == answer["id"]
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 4)
    assert told["gen_ai.request.model"] == "tiny"
    assert "sk-a" not in str(collector.spans)


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_without_a_trace_of_the_clients_a_new_one_begins(traced: Running, collector: Collector, given: str) -> None:
    ask(traced, **({"traceparent": given} if given else {}))
    (whole,) = (span for span in collector.spans if span.name == "llm_request")
    assert whole.parent_span_id == b""
    assert any(whole.trace_id)


def test_a_request_that_never_ran_has_only_its_wait(traced: Running, collector: Collector) -> None:
    core = traced.engine.core
    request = core.inputs.make([5], _params())
    core.stats.tracer.on_finished(request, _abort(), request.arrival_time + 1)
    core.stats.tracer.close()
    assert sorted(span.name for span in collector.spans) == ["llm_request", "queue"]


def test_spans_tell_what_a_request_had_when_it_ended(
    traced: Running, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = traced.engine.core
    tracer = core.stats.tracer
    request = core.inputs.make([5], _params())
    request.sequences[0].output_token_ids.append(7)
    make = tracer._make_spans
    # The event loop lets go of a request's sequences while its spans are made.
    monkeypatch.setattr(tracer, "_make_spans", lambda ended: (request.sequences.clear(), make(ended)))
    tracer.on_finished(request, _abort(), request.arrival_time + 1)
    tracer.close()
    (whole,) = (span for span in collector.spans if span.name == "llm_request")
    assert attributes(whole)["gen_ai.usage.output_tokens"] == 1


def _params() -> Any:
    from octavo.sampling_params import SamplingParams

    return SamplingParams()


def _abort() -> Any:
    from octavo.request import FinishReason

    return FinishReason.ABORT


def test_opentelemetry_is_imported_only_where_traces_are_made() -> None:
    code = "import sys, octavo.engine.async_engine, octavo.server.app, octavo.observe.tracing; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert not [name for name in ran.stdout.split() if name.startswith("opentelemetry")]
