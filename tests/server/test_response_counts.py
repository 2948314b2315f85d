"""`http_requests_total`: answers by endpoint, method and class of status, as many series as there are endpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.server.route import ResponseCounts
from tests.server.real_engine import RealServer, real_server


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server(num_blocks=65) as running:
        yield running


def counted(real: RealServer) -> set[str]:
    lines = real.client.get("/metrics").text.splitlines()
    return {line.removeprefix("http_requests_total") for line in lines if line.startswith("http_requests_total")}


def test_answers_are_counted_by_endpoint_method_and_status(real: RealServer) -> None:
    real.complete("x", max_tokens=1)
    real.complete("x", max_tokens=1)
    real.client.get("/v1/completions")
    real.client.post("/v1/completions", json={"max_tokens": -1})
    assert {
        '{handler="/v1/completions",method="POST",status="2xx"} 2.0',
        '{handler="/v1/completions",method="GET",status="4xx"} 1.0',
        '{handler="/v1/completions",method="POST",status="4xx"} 1.0',
    } <= counted(real)


def test_what_clients_choose_makes_no_series_of_its_own(real: RealServer) -> None:
    for number in range(3):
        real.client.get(f"/nowhere/{number}")
        real.client.get(f"/live/requests/{number}")
        real.client.request(f"BREW{number}", "/v1/completions")
    assert {
        '{handler="none",method="GET",status="4xx"} 3.0',
        '{handler="/live/requests/{request_id}",method="GET",status="4xx"} 3.0',
        '{handler="/v1/completions",method="none",status="4xx"} 3.0',
    } <= counted(real)


def test_a_client_that_left_before_its_answer_is_not_counted() -> None:
    responses = ResponseCounts()
    responses.add({"path": "/", "method": "GET"}, 0)
    assert not responses.counts
