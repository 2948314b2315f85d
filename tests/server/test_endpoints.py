"""The endpoints beside completions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

import octavo
from octavo.observe.stats import Gauges
from octavo.request_limits import RequestLimits
from octavo.server.app import create_app
from octavo.server.bodies.fields import Served
from octavo.server.openapi import describe
from octavo.server.route import Endpoint
from tests.server.conftest import Running
from tests.server.fake_engine import BOS, VOCAB_SIZE, FakeEngine, InfillTokenizer


def test_health_and_version(server: Running) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/version").json() == {"version": octavo.__version__}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/api/chat", "/tokenize"])
def test_a_compressed_body_is_refused_as_such(server: Running, path: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    refused = server.client.post(path, content=b"\x1f\x8b", headers=headers)
    assert refused.status_code == 415
    assert "Content-Encoding 'gzip': send the body as it is" in refused.text
    plain = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert server.client.post("/tokenize", content=b'{"prompt": "a"}', headers=plain).status_code == 200


def test_health_and_metrics_tell_of_a_failed_audit(start_server: Callable[..., Running]) -> None:
    server = start_server()
    stats = server.engine.stats
    stats.on_audit("audit failed: " + "block 7 counts 1 references, tables hold 0; " * 100)
    answer = server.client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert answer.json()["detail"].startswith("audit failed: block 7 counts 1 references")
    assert len(answer.json()["detail"]) <= 1000
    metrics = server.client.get("/metrics").text
    assert 'octavo:failed_audits_total{model_name="fake"} 1.0' in metrics
    assert 'octavo:audits_total{model_name="fake"} 1.0' in metrics
    stats.on_audit(None)
    assert server.client.get("/health").json() == {"status": "ok"}


def test_models_tell_their_context_length(server: Running) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 4096)
    assert server.client.get("/v1/models/fake").json() == model


def test_the_model_can_be_served_under_other_names(start_server: Callable[..., Running]) -> None:
    server = start_server(served_model_name=["gpt/mine", "alias"])
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["gpt/mine", "alias"]
    assert server.client.get("/v1/models/gpt/mine").json()["root"] == "fake"
    assert server.post("/v1/completions", {"model": "alias", "prompt": "x"}).json()["model"] == "alias"
    assert server.post("/v1/completions", {"prompt": "x"}).json()["model"] == "gpt/mine"
    server.error("/v1/completions", {"model": "fake", "prompt": "x"}, 404)


def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    answer = server.post("/tokenize", {"model": "fake", "prompt": "héllo"}).json()
    assert answer == {
        "count": 7,
        "max_model_len": 4096,
        "tokens": [BOS, *"héllo".encode()],
        "token_strs": None,
    }
    assert server.post("/detokenize", {"tokens": answer["tokens"][1:]}).json()["prompt"] == "héllo"
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == "<bos>héllo"


def test_tokenize_takes_chats_and_shows_tokens(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False, "return_token_strs": True}
    answer = server.post("/tokenize", body).json()
    assert bytes(answer["tokens"]) == b"#user: x\n"
    assert answer["token_strs"][0] == "<0x23>"
    assert server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_takes_either_a_prompt_or_messages(server: Running, body: dict[str, Any]) -> None:
    assert (
        "prompt must be given, or messages, or llama.cpp's content: one of them, got"
        in server.error("/tokenize", body, 400)["message"]
    )


def test_detokenize_refuses_ids_out_of_the_vocabulary(server: Running) -> None:
    assert (
        "tokens must contain token ids from 0 to 257, got 258"
        in server.error("/detokenize", {"tokens": [258]}, 400)["message"]
    )


def test_metrics_are_exposed_under_the_served_name(start_server: Callable[..., Running]) -> None:
    engine = FakeEngine()
    engine.stats.gauges = lambda: Gauges(num_running=2, num_waiting=1, kv_usage=0.25)
    server = start_server(engine, served_model_name="mine")
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
    assert [(s.labels, s.value) for s in samples if s.name == "vllm:num_requests_running"] == [
        ({"model_name": "mine"}, 2.0)
    ]
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = server.client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "vllm:prompt_tokens" in {family.name for family in parse_openmetrics(answer.text)}
    assert "vllm:prompt_tokens_total{" in answer.text


def test_the_description_has_exactly_the_routes_that_are_served() -> None:
    app = create_app(FakeEngine())
    routes = [route for route in app.routes if isinstance(route, Route)]
    # Starlette answers HEAD wherever it answers GET.
    served = {(re.sub(r":\w+}", "}", r.path), m.lower()) for r in routes for m in (r.methods or ()) if m != "HEAD"}
    described = {(path, method) for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert described == served


def test_the_api_documents_itself(server: Running) -> None:
    schema = server.client.get("/openapi.json").json()
    assert set(schema["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/tokenize"}
    reference = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = reference["$ref"].removeprefix("#/components/schemas/")
    assert "max_tokens" in schema["components"]["schemas"][name]["properties"]


def test_the_page_that_shows_it_loads_nothing_from_elsewhere(server: Running) -> None:
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    text = page.text + server.client.get("/live/docs.js").text + server.client.get("/live/docs.css").text
    loaded = re.findall(r'(?:src|href|fetch)[=(]"([^"]*)"', text)
    assert sorted({*loaded}) == ["data:,", "live/docs.css", "live/docs.js", "openapi.json"]
    assert "://" not in text


LIMITS = RequestLimits(
    max_n=3, max_stop_strings=2, max_stop_string_length=5, max_logit_bias=2, max_bad_words=2, max_bad_word_length=4
)
ENDPOINTS: list[Endpoint] = create_app(FakeEngine()).state.endpoints
DESCRIPTION = describe("1", Served(LIMITS, 4096, VOCAB_SIZE, 4), ENDPOINTS)
EXAMPLES = {endpoint.path: dict(endpoint.body.EXAMPLE) for endpoint in ENDPOINTS if endpoint.body is not None}


def test_an_endpoint_with_a_body_has_an_example_of_it() -> None:
    assert [each.path for each in ENDPOINTS if each.body is not None and "EXAMPLE" not in vars(each.body)] == []


def body_schema(path: str) -> dict[str, Any]:
    reference = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {**reference, "components": DESCRIPTION["components"]}


def is_valid(path: str, body: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(body_schema(path)).is_valid(body))


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_valid_and_their_answers_too(path: str, start_server: Callable[..., Running]) -> None:
    engine = FakeEngine(limits=LIMITS)
    engine.tokenizer = InfillTokenizer()
    server = start_server(engine)
    assert is_valid(path, EXAMPLES[path])
    response = server.post(path, EXAMPLES[path])
    assert response.status_code == 200, response.text
    answer = DESCRIPTION["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), {**answer, "components": DESCRIPTION["components"]})


# At the edge of each range, and one past it.
EDGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 3, "temperature": 1}, {"n": 4}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}),
    ({"stop": "abcde"}, {"stop": "abcdef"}),
    ({"logit_bias": {"1": 100, "2": -100}}, {"logit_bias": {"1": 1, "2": 1, "3": 1}}),
    ({"logit_bias": {"1": 100}}, {"logit_bias": {"1": 101}}),
    ({"bad_words": ["abcd"]}, {"bad_words": ["abcde"]}),
    ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}),
    ({"stop_token_ids": [VOCAB_SIZE - 1]}, {"stop_token_ids": [VOCAB_SIZE]}),
    ({"allowed_token_ids": [0]}, {"allowed_token_ids": []}),
    ({"top_p": 1}, {"top_p": 0}),
    ({"top_k": -1}, {"top_k": -2}),
    ({"min_p": 1}, {"min_p": 1.1}),
    ({"repetition_penalty": 0.1}, {"repetition_penalty": 0}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.1}),
    ({"seed": 2**64 - 1}, {"seed": 2**64}),
    ({"logprobs": 20}, {"logprobs": 21}),
    ({"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    ({"priority": 1000}, {"priority": 1001}),
    ({"cache_salt": "a" * 256}, {"cache_salt": "a" * 257}),
    ({"user": "a" * 256}, {"user": "a" * 257}),
    ({"max_tokens": 4000}, {"max_tokens": 0}),
    ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 0}),
    ({"suffix": ""}, {"suffix": "a"}),
    ({"prompt": [1, VOCAB_SIZE - 1]}, {"prompt": [VOCAB_SIZE]}),
    ({"prompt": [[1], [2]]}, {"prompt": []}),
    ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "xml"}}),
]


def test_the_described_ranges_are_those_that_hold(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine(limits=LIMITS, eos_after=1))
    path = "/v1/completions"
    for inside, outside in EDGES:
        for fields, allowed in ((inside, True), (outside, False)):
            body = {"prompt": "a", "max_tokens": 1, **fields}
            assert is_valid(path, body) == allowed, fields
            assert server.post(path, body).status_code == (200 if allowed else 400), fields


@pytest.mark.parametrize("value", [0, 0.0, "a", [0], True])
def test_what_is_not_supported_may_only_be_left_empty(server: Running, value: Any) -> None:
    for path, field in (("/v1/completions", "suffix"), ("/v1/chat/completions", "audio")):
        body = {**EXAMPLES[path], field: value}
        assert not is_valid(path, body)
        assert server.post(path, body).status_code == 400


def test_a_method_that_a_path_lacks_is_told_all_that_it_has(server: Running) -> None:
    answer = server.client.put("/v1/responses/resp_1")
    assert answer.status_code == 405
    assert {method.strip() for method in answer.headers["allow"].split(",")} == {"GET", "HEAD", "DELETE"}
    assert server.client.delete("/v1/responses/resp_1").status_code == 404
    assert server.client.head("/v1/responses/resp_1").status_code == 404
