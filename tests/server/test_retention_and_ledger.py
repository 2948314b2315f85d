"""Pins and the ledger from outside: `cache_control`, the `octavo` object, /debug, and metrics that add up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.request import cache_scope
from octavo.server.handling import IGNORED_HEADER
from octavo.server.keys import tenant_of
from tests.engine.preempting import thrash
from tests.engine.tiny_engine import slow_down
from tests.server.real_engine import RealServer, error_of, real_server, sse_objects

ADMIN = {"Authorization": "Bearer admin-key"}
SYSTEM = "Answer as a patient teacher would, in whole sentences, and never guess. " * 6
LONG = "The tide went out before the fishermen had mended the last of their nets. " * 4


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server({"admin_key": "admin-key"}, num_blocks=257) as running:
        yield running
        running.assert_nothing_runs()


@pytest.fixture(autouse=True)
def nothing_cached(real: RealServer) -> None:
    for pin in pins(real):
        assert real.client.delete(f"/debug/pins/{pin['id']}", headers=ADMIN).json()["deleted"] is True
    real.core.scheduler.kv.reset_prefix_cache()


def pins(real: RealServer) -> list[dict[str, Any]]:
    return real.client.get("/debug/pins", headers=ADMIN).json()["data"]


def debug_kv(real: RealServer) -> dict[str, Any]:
    response = real.client.get("/debug/kv", headers=ADMIN)
    assert response.status_code == 200, response.text
    return response.json()


def chat(real: RealServer, question: str, control: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    system: dict[str, Any] = {"role": "system", "content": SYSTEM}
    if control is not None:
        system["cache_control"] = control
    body = {"messages": [system, {"role": "user", "content": question}], "max_tokens": 2, "temperature": 0, **fields}
    response = real.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def flood(real: RealServer) -> None:
    """Prompts without a token in common with others, together more than the pool."""
    for i in range(12):
        real.complete([(i * 37 + j * j + i * j) % 300 for j in range(500)], max_tokens=1)


@pytest.mark.slow
def test_a_system_message_with_cache_control_survives_a_flood(real: RealServer) -> None:
    first = chat(real, "Why is the sea salt?", {"type": "ephemeral", "ttl": "5m"})
    (pin,) = first["octavo"]["pins"]
    assert pin["ttl_seconds"] == 300
    assert 100 < pin["pinned_tokens"] == pin["requested_tokens"] // 16 * 16
    flood(real)
    cached = chat(real, "And the rain?")["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == pin["pinned_tokens"]


def test_without_cache_control_it_does_not_and_nothing_is_said_of_pins(real: RealServer) -> None:
    assert "octavo" not in chat(real, "Why is the sea salt?")
    flood(real)
    assert chat(real, "And the rain?")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_prompt_is_the_same_with_cache_control_and_without(real: RealServer) -> None:
    marked, plain = (chat(real, "Why?", control)["usage"] for control in ({"type": "ephemeral"}, None))
    assert marked["prompt_tokens"] == plain["prompt_tokens"]
    body = {"messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}]}
    bare = {"messages": [{"role": "user", "content": "x"}]}
    assert real.post("/tokenize", body).json() == real.post("/tokenize", bare).json()


def test_cache_control_on_a_content_part_marks_its_message(real: RealServer) -> None:
    part = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    (pin,) = real.post("/v1/chat/completions", body).json()["octavo"]["pins"]
    assert pin["ttl_seconds"] == 3600
    assert pin["pinned_tokens"] > 32


def test_a_prompt_that_lost_its_beginning_has_no_prefix_to_pin(real: RealServer) -> None:
    message = {"role": "user", "content": LONG}
    marked = {**message, "cache_control": {"type": "ephemeral"}}

    def ask(kept: int, *messages: dict[str, Any]) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": kept}
        return real.post("/v1/chat/completions", body).json()

    length = ask(-1, message)["usage"]["prompt_tokens"]
    assert len(ask(length, marked)["octavo"]["pins"]) == 1
    # What is left begins with the same tokens.
    assert "octavo" not in ask(length, marked, message)


def test_each_marked_message_is_a_pin(real: RealServer) -> None:
    control = {"type": "ephemeral"}
    messages = [
        {"role": "system", "content": SYSTEM, "cache_control": control},
        {"role": "user", "content": LONG, "cache_control": control},
    ]
    answer = real.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    short, long = answer["octavo"]["pins"]
    assert short["pinned_tokens"] < long["pinned_tokens"]
    assert {pin["id"] for pin in pins(real)} == {short["id"], long["id"]}


def test_over_the_budget_the_answer_says_how_much_is_pinned() -> None:
    with real_server({"admin_key": "admin-key"}, num_blocks=65, pin_budget=0.05) as small:
        (pin,) = chat(small, "Why?", {"type": "ephemeral"})["octavo"]["pins"]
        assert pin["requested_tokens"] > pin["pinned_tokens"] == 3 * 16
        told = debug_kv(small)["pins"]
        assert told["held_bytes"] == told["budget_bytes"]
        (nothing,) = small.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG, "cache_control": {"type": "ephemeral"}}], "max_tokens": 1},
        ).json()["octavo"]["pins"]
        assert (nothing["id"], nothing["pinned_tokens"]) == (None, 0)


def test_over_its_share_a_tenant_is_told_how_much_is_pinned_and_another_has_its_own() -> None:
    server = {"admin_key": "admin-key", "api_key": ["first", "second"]}
    with real_server(server, num_blocks=65, pin_budget=0.1, tenant_share=0.5) as shared:
        for number, key in enumerate(server["api_key"]):
            message = {"role": "user", "content": f"{number} {LONG}", "cache_control": {"type": "ephemeral"}}
            headers = {"Authorization": f"Bearer {key}"}
            answer = shared.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1}, headers=headers)
            (pin,) = answer.json()["octavo"]["pins"]
            assert pin["requested_tokens"] > pin["pinned_tokens"] == 3 * 16
        report = debug_kv(shared)
        assert report["pins"]["tenant_budget_bytes"] * 2 == report["pins"]["budget_bytes"]
        held = [tenant["pins"]["held_bytes"] for tenant in report["tenants"].values()]
        assert held == [report["pins"]["tenant_budget_bytes"]] * 2


def test_a_stream_tells_of_its_pins_in_its_last_event(real: RealServer) -> None:
    messages = [{"role": "user", "content": LONG, "cache_control": {"type": "ephemeral"}}]
    body = {"messages": messages, "max_tokens": 3, "octavo": {"ledger": True}}
    *before, last = sse_objects(real.events("/v1/chat/completions", body))
    assert all("octavo" not in event for event in before)
    assert last["choices"] == []
    assert last["octavo"]["pins"][0]["pinned_tokens"] > 0
    assert last["octavo"]["ledger"][0]["cached_tokens"] == 0
    body["stream_options"] = {"include_usage": True}
    *_, last = sse_objects(real.events("/v1/chat/completions", body))
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == last["octavo"]["ledger"][0]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("control", "says"),
    [
        ({"type": "forever"}, "must be"),
        ("ephemeral", "must be"),
        ({"type": "ephemeral", "ttl": "soon"}, "ttl must be like"),
        ({"type": "ephemeral", "ttl": "0m"}, "ttl must be like"),
        ({"type": "ephemeral", "ttl": "25h"}, "at most"),
        ({"type": "ephemeral", "ttl": 300}, "ttl must be like"),
        ({"type": "ephemeral", "scope": "all"}, "must be"),
    ],
)
def test_cache_control_of_another_form_is_refused(real: RealServer, control: Any, says: str) -> None:
    body = {"messages": [{"role": "user", "content": "x", "cache_control": control}]}
    error = real.error("/v1/chat/completions", body, 400)
    assert says in error["message"]
    assert error["param"].startswith("messages[0].cache_control")


def test_at_most_four_messages_are_marked(real: RealServer) -> None:
    marked = {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}
    error = real.error("/v1/chat/completions", {"messages": [marked] * 5}, 400)
    assert "messages must have at most 4 with cache_control, got 5" in error["message"]


def test_pins_are_listed_and_let_go_by_the_admin(real: RealServer) -> None:
    (told,) = chat(real, "?", {"type": "ephemeral", "ttl": "10m"})["octavo"]["pins"]
    (pin,) = pins(real)
    assert (pin["id"], pin["num_tokens"], pin["tenant"]) == (told["id"], told["pinned_tokens"], "")
    assert 590 < pin["expires_in"] <= 600
    assert debug_kv(real)["bytes"]["pinned"] == pin["num_bytes"] > 0
    answer = real.client.delete(f"/debug/pins/{pin['id']}", headers=ADMIN)
    assert answer.json() == {"id": pin["id"], "object": "pin", "deleted": True}
    assert pins(real) == []
    assert debug_kv(real)["bytes"]["pinned"] == 0
    again = real.client.delete(f"/debug/pins/{pin['id']}", headers=ADMIN)
    assert (again.status_code, error_of(again)["code"]) == (404, "no_such_pin")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/debug/kv"), ("GET", "/debug/pins"), ("DELETE", "/debug/pins/pin-1")]
)
def test_debug_needs_the_admin_key(real: RealServer, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        response = real.client.request(method, path, headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"


def test_the_ledger_tells_a_client_why_its_prompt_was_not_cached(real: RealServer) -> None:
    def ledger(prompt: list[int], **fields: Any) -> dict[str, Any]:
        answer = real.complete(prompt, max_tokens=1, octavo={"ledger": True}, **fields)
        (entry,) = answer["octavo"]["ledger"]
        assert entry["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert entry["prompt_tokens"] == answer["usage"]["prompt_tokens"] == len(prompt)
        return entry

    prompt = [(7 * i + i * i) % 300 for i in range(64)]
    assert ledger(prompt[:16])["reason"] == "too_short"
    real.core.scheduler.kv.reset_prefix_cache()
    assert ledger([*range(100, 164)])["reason"] == "cold"
    assert ledger(prompt)["reason"] in ("cold", "evicted")
    assert ledger(prompt)["reason"] is None
    other = [*prompt[:40], *((t + 1) % 300 for t in prompt[40:])]
    assert ledger(other)["diverged_at"] == 40
    assert ledger(prompt, cache_salt="pepper")["reason"] == "cold", "another salt's cache is nobody's business"
    assert debug_kv(real)["prefix_cache"]["requests"]["salt"] >= 1
    real.core.scheduler.kv.reset_prefix_cache()
    gone = ledger(prompt)
    assert gone["reason"] == "evicted"
    assert gone["evicted_seconds_ago"] >= 0


def test_every_prompt_of_a_body_has_its_entry(real: RealServer) -> None:
    answer = real.complete([[*range(40)], [*range(200, 204)]], max_tokens=1, octavo={"ledger": True})
    assert [entry["prompt_tokens"] for entry in answer["octavo"]["ledger"]] == [40, 4]
    assert answer["octavo"]["ledger"][1]["reason"] == "too_short"


def test_an_unknown_octavo_option_is_ignored_and_named(real: RealServer) -> None:
    response = real.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "octavo": {"legder": True}})
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "octavo.legder"


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.labels[label]: sample.value for sample in samples if sample.name == name}


def by_reason(text: str, name: str) -> dict[str, float]:
    return by_label(text, f"octavo:{name}_total", "reason")


def cancel_after_a_token(real: RealServer, prompt: list[int]) -> dict[str, Any]:
    """Ask for a completion and hang up with its first token; returns the usage that came with that."""
    body = {"prompt": prompt, "max_tokens": 240, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with real.client.stream("POST", "/v1/completions", json=body) as response:
        first = next(line for line in response.iter_lines() if line)
    return json.loads(first.removeprefix("data: "))["usage"]


def await_departures(real: RealServer, prompts: list[list[int]]) -> None:
    """Let no completion of these prompts get far before its client has hung up."""
    core, execute = real.core, real.core.runner.execute

    def waiting(plan: Any) -> Any:
        while not real.engine._inbox and any(
            list(request.prompt_token_ids) in prompts and request.sequences[0].num_output_tokens > 30
            for request in core.scheduler.requests
        ):
            time.sleep(0.001)
        return execute(plan)

    core.runner.execute = waiting


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_ledger_usage_and_metrics_add_up_under_preemption(mode: str) -> None:
    """Eight requests of ten blocks each in a pool of 24, beside others that are cancelled and asked again."""
    options = {"num_blocks": 25, "max_num_seqs": 8, "preemption_mode": mode}
    prompts = [[(i * 31 + j * (i + 3)) % 300 for j in range(60)] for i in range(12)]
    with real_server({"admin_key": "admin-key"}, **options) as small, ThreadPoolExecutor(1) as beside:
        thrash(small.core)
        slow_down(small.core, 0.001)
        await_departures(small, prompts[8:])
        usages = []
        for _ in range(2):
            crowd = beside.submit(small.complete, [prompts[0], *prompts[:8]], max_tokens=100)
            usages += [cancel_after_a_token(small, prompt) for prompt in prompts[8:]]
            usages.append(crowd.result()["usage"])
        usages += [small.complete(prompt, max_tokens=4)["usage"] for prompt in prompts[8:]]
        small.assert_nothing_runs()
        counters, text = small.counters(), small.client.get("/metrics").text
        report = debug_kv(small)
    assert counters["vllm:num_preemptions_total"] > 0
    assert counters["vllm:request_success_total/abort"] == 8
    assert (counters["octavo:swapped_out_bytes_total"] > 0) == (mode == "swap")
    swap = report["swap"]
    assert swap["out_bytes"] == counters["octavo:swapped_out_bytes_total"] == swap["in_bytes"] + swap["dropped_bytes"]
    assert swap["in_bytes"] == counters["octavo:swapped_in_bytes_total"]
    cache = report["prefix_cache"]
    assert cache["queried_tokens"] == counters["vllm:prefix_cache_queries_total"]
    assert cache["queried_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert cache["cached_tokens"] == counters["vllm:prefix_cache_hits_total"]
    assert cache["cached_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cache["queried_tokens"] == cache["cached_tokens"] + sum(cache["uncached_tokens"].values())
    # One tenant and one salt: nothing is hidden from anybody.
    assert cache["uncached_tokens"] == by_reason(text, "prefix_cache_uncached_tokens")
    assert cache["requests"] == by_reason(text, "prefix_cache_requests")
    assert sum(cache["requests"].values()) == 2 * (9 + 4) + 4
    sizes = report["bytes"]
    assert sum(sizes.values()) == report["num_blocks"] * report["block_bytes"]
    assert sizes["active"] == sizes["pinned"] == sizes["swapped"] == 0
    assert sizes == by_label(text, "octavo:kv_cache_bytes", "state")
    assert sum(sum(tenant["bytes"].values()) for tenant in report["tenants"].values()) == sizes["cached"]


def test_the_bytes_of_two_tenants_and_what_is_free_are_the_whole_cache() -> None:
    keys = ("first-key", "second-key")
    with real_server({"admin_key": "admin-key", "api_key": list(keys)}, num_blocks=65) as shared:
        for number, key in enumerate(keys):
            body = {"prompt": [number * 100 + i for i in range(50)], "max_tokens": 1, "octavo": {"ledger": True}}
            headers = {"Authorization": f"Bearer {key}"}
            assert shared.post("/v1/completions", body, headers=headers).status_code == 200
        stolen = {"prompt": [*range(20), *range(200, 220)], "max_tokens": 1, "octavo": {"ledger": True}}
        answer = shared.post("/v1/completions", stolen, headers={"Authorization": f"Bearer {keys[1]}"}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["octavo"]["ledger"][0]["reason"] == "cold", "where the first tenant's prompt went is not told"
        report = debug_kv(shared)
    assert len(report["tenants"]) == 2
    owned = sum(sum(tenant["bytes"].values()) for tenant in report["tenants"].values())
    assert owned + report["bytes"]["free"] == report["num_blocks"] * report["block_bytes"]
    assert report["prefix_cache"]["requests"]["salt"] == 1, "the admin is told that another tenant has it"


def test_one_key_cannot_read_anothers_prompts_off_the_cached_tokens() -> None:
    secret = [(i * 31) % 300 for i in range(100)]
    with real_server({"api_key": ["ada", "bob"]}, num_blocks=65) as shared:

        def cached(key: str, tokens: list[int], **fields: Any) -> int:
            body = {"prompt": tokens, "max_tokens": 1, **fields}
            response = shared.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("ada", secret) == 0
        assert cached("ada", secret) == 96
        assert cached("bob", [*secret[:16], 1]) == 0
        assert cached("bob", [*secret[:32], 1]) == 16, "what bob has sent before, and no more"
        for salt in ("ada", tenant_of("ada"), "tenant", cache_scope(tenant_of("ada"), None, "")):
            assert cached("bob", secret, cache_salt=salt) == 0
        assert cached("ada", secret) == 96
