"""Every endpoint over a real model: what it answers, and that usage and counters tell the same story."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.request import RequestId
from octavo.server.keys import tenant_of
from tests.engine.faults import injected
from tests.engine.tiny_engine import POISON, VOCAB_SIZE, break_after, poison, step_for_news
from tests.server.conftest import wait_until
from tests.server.real_engine import MODEL, RealServer, error_of, real_server, sse_objects

MESSAGES: list[Any] = [{"role": "user", "content": "the rest is not lost"}]
LONG = "The scheduler takes what fits and leaves the rest; the rest is not lost, it waits for its turn. " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").assert_nothing_runs()


# Series in the queries of vLLM's published Grafana dashboards: examples/observability/prometheus_grafana/grafana.json
# and, of those in dashboards/grafana/, what applies to any server (commits 4b5c627c to 0b9faa41).
VLLM_SECONDS = ("e2e_request_latency", "time_to_first_token", "inter_token_latency", "time_per_output_token")
VLLM_DASHBOARDS = {
    *(f"{name}_seconds_{part}" for name in VLLM_SECONDS for part in ("bucket", "sum", "count")),
    *(f"request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")),
    *(f"request_{name}_tokens_{part}" for name in ("prompt", "generation") for part in ("bucket", "sum", "count")),
    *("request_max_num_generation_tokens_sum", "request_success_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "engine_sleep_state"),
}
VLLM_IDLE = {"num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"}
VLLM_IDLE |= {"num_preemptions_total"}


def test_a_live_server_has_every_series_of_vllms_dashboards(server: RealServer) -> None:
    for _ in range(2):
        server.complete(list(range(5, 40)), max_tokens=3, n=2, temperature=1)
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    largest: dict[str, float] = {}
    for sample in samples:
        if sample.labels.get("model_name") == MODEL:
            largest[sample.name] = max(largest.get(sample.name, 0), sample.value)
    assert {f"vllm:{name}" for name in VLLM_DASHBOARDS | VLLM_IDLE} - largest.keys() == set()
    assert {name for name in VLLM_DASHBOARDS if not largest[f"vllm:{name}"]} == set()
    assert {("http_requests_total", "2xx"), ("process_start_time_seconds", None)} <= {
        (sample.name, sample.labels.get("status")) for sample in samples
    }


class TestEndpoints:
    def test_tokens_come_back_as_the_text_they_were(self, server: RealServer) -> None:
        text = "the blocks, ünïcödé, 日本語 😀"
        answer = server.post("/tokenize", {"prompt": text}).json()
        assert server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == text
        chat = server.post("/tokenize", {"messages": MESSAGES}).json()
        rendered = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
        assert rendered == "<|im_start|>user\nthe rest is not lost<|im_end|>\n<|im_start|>assistant\n"

    def test_a_prompt_is_the_same_as_text_and_as_its_tokens(self, server: RealServer) -> None:
        token_ids = server.post("/tokenize", {"prompt": LONG}).json()["tokens"]
        as_text, as_ids = (server.complete(prompt, max_tokens=8) for prompt in (LONG, token_ids))
        assert as_text["choices"] == as_ids["choices"]
        assert as_text["usage"]["prompt_tokens"] == len(token_ids)

    def test_a_chat_answers_what_its_rendered_prompt_is_completed_with(self, server: RealServer) -> None:
        token_ids = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        chat = server.post("/v1/chat/completions", body).json()
        assert (
            chat["choices"][0]["message"]["content"] == server.complete(token_ids, max_tokens=8)["choices"][0]["text"]
        )

    def test_beams_come_best_first_and_usage_counts_what_is_returned(self, server: RealServer) -> None:
        fields: dict[str, Any] = {"use_beam_search": True, "best_of": 4, "max_tokens": 6, "logprobs": 0}
        answer = server.complete(LONG, n=2, length_penalty=0.0, **fields)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        first, second = (sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"])
        assert first >= second
        assert answer["usage"]["completion_tokens"] == 12
        greedy = server.complete(LONG, max_tokens=6, logprobs=0)["choices"][0]
        assert server.complete(LONG, **{**fields, "best_of": 1})["choices"][0]["text"] == greedy["text"]
        assert first >= sum(greedy["logprobs"]["token_logprobs"])

    def test_a_chat_searches_with_beams_too(self, server: RealServer) -> None:
        body = {"messages": MESSAGES, "n": 3, "use_beam_search": True, "max_tokens": 5, "ignore_eos": True}
        choices = server.post("/v1/chat/completions", body).json()["choices"]
        assert len({choice["message"]["content"] for choice in choices}) == 3

    def test_echo_without_output_scores_the_prompt(self, server: RealServer) -> None:
        answer = server.complete(LONG, max_tokens=0, echo=True, logprobs=1)
        (choice,) = answer["choices"]
        assert choice["text"] == LONG
        assert answer["usage"]["completion_tokens"] == 0
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
        again = server.complete(LONG, max_tokens=0, echo=True, logprobs=1)  # its blocks are cached; its scores are not
        assert again["choices"] == answer["choices"]


class TestOpenAIClient:
    def test_a_stream_tells_what_the_whole_answer_tells(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 24, "temperature": 0, "logprobs": 3}
        whole = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
        streamed = [entry for chunk in chunks[:-1] for entry in chunk.choices[0].logprobs.token_logprobs]
        assert streamed == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-4)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None] * (len(chunks) - 2) + [whole.choices[0].finish_reason]
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_a_chat_stream_tells_what_the_whole_answer_tells(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": MESSAGES,
            "max_tokens": 24,
            "n": 2,
            "seed": 5,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = client.chat.completions.create(**asked)
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        assert {piece.delta.role for piece in pieces[:2]} == {whole.choices[0].message.role} == {"assistant"}
        for choice in whole.choices:
            ours = [piece for piece in pieces if piece.index == choice.index]
            assert "".join(piece.delta.content or "" for piece in ours) == choice.message.content
            assert ours[-1].finish_reason == choice.finish_reason
            tokens = [entry.token for piece in ours if piece.logprobs for entry in piece.logprobs.content]
            assert tokens == [entry.token for entry in choice.logprobs.content]
            assert len(choice.logprobs.content[0].top_logprobs) == 2

    def test_several_samples_differ_and_a_seed_brings_them_back(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "the", "max_tokens": 12, "n": 3}
        first, second = (client.completions.create(**asked, seed=7) for _ in range(2))
        texts = [choice.text for choice in first.choices]
        assert len(set(texts)) == 3
        assert [choice.text for choice in second.choices] == texts
        assert [choice.text for choice in client.completions.create(**asked, seed=8).choices] != texts

    def test_without_a_seed_two_answers_differ(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "the", "max_tokens": 12}
        assert len({client.completions.create(**asked).choices[0].text for _ in range(3)}) > 1

    def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 40, "temperature": 0}
        text = client.completions.create(**asked).choices[0].text
        stop = text[len(text) // 2 :][:3]
        stopped = client.completions.create(**asked, stop=[stop]).choices[0]
        assert stopped.text == text[: text.index(stop)]
        assert stopped.finish_reason == "stop"
        chunks = list(client.completions.create(**asked, stop=[stop], stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text

    def test_the_asynchronous_client_streams_side_by_side(self, server: RealServer) -> None:
        import asyncio

        async def ask(client: openai.AsyncOpenAI, count: int) -> int:
            stream = await client.completions.create(
                model=MODEL, prompt=[5, 6], max_tokens=count, stream=True, extra_body={"ignore_eos": True}
            )
            return len([chunk async for chunk in stream])

        async def ask_all() -> list[int]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
                return await asyncio.gather(*(ask(client, count) for count in range(1, 9)))

        assert asyncio.run(ask_all()) == list(range(1, 9))


class TestUsage:
    def test_a_prompt_seen_before_reports_its_cached_tokens(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "in a table " * 20, "max_tokens": 4, "temperature": 0}
        first, second = (client.completions.create(**asked) for _ in range(2))
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        # Whole blocks of 16, and at least one token is computed to have something to sample from.
        assert second.usage.prompt_tokens_details.cached_tokens == (second.usage.prompt_tokens - 1) // 16 * 16 > 0
        assert second.choices == first.choices

    @pytest.mark.slow
    def test_the_sums_over_responses_are_the_servers_counters(self) -> None:
        with real_server(num_blocks=40) as server:  # so small that cached blocks are evicted
            reports = []
            for i in range(12):
                prompts = [LONG[: 20 * (i % 4 + 1)], "ab"[i % 2] * 40]
                reports.append(server.complete(prompts, max_tokens=1 + i, n=1 + i % 3, temperature=1)["usage"])
                body = {"messages": MESSAGES, "max_tokens": 3, "stream_options": {"include_usage": True}}
                reports.append(sse_objects(server.events("/v1/chat/completions", body))[-1]["usage"])
            server.assert_nothing_runs()
            counters = server.counters()
        sums = {name: sum(r[name] for r in reports) for name in ("prompt_tokens", "completion_tokens")}
        cached = sum(report["prompt_tokens_details"]["cached_tokens"] for report in reports)
        assert counters["vllm:prompt_tokens_total"] == sums["prompt_tokens"]
        assert counters["vllm:generation_tokens_total"] == sums["completion_tokens"]
        assert counters["vllm:prefix_cache_queries_total"] == sums["prompt_tokens"]
        assert counters["vllm:prefix_cache_hits_total"] == cached > 0
        assert counters["vllm:request_generation_tokens_sum"] == sums["completion_tokens"]
        assert counters["vllm:request_prompt_tokens_sum"] == sums["prompt_tokens"]
        finished = {name: value for name, value in counters.items() if name.startswith("vllm:request_success_total")}
        assert sum(finished.values()) == counters["vllm:e2e_request_latency_seconds_count"] == 12 * 3
        assert counters["vllm:time_to_first_token_seconds_count"] == 12 * 3
        assert counters["vllm:num_requests_running"] == counters["vllm:num_requests_waiting"] == 0


class TestTenants:
    def test_prompts_of_different_salts_share_nothing(self, server: RealServer) -> None:
        prompt = "a secret of one tenant, " * 6

        def cached_tokens(salt: str | None) -> int:
            return server.complete(prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached_tokens("one") == 0
        assert cached_tokens("one") > 0
        assert cached_tokens("two") == 0
        assert cached_tokens(None) == 0
        assert cached_tokens("two") > 0

    def test_a_request_that_its_tenants_cap_cannot_hold_is_a_400_with_the_numbers(self) -> None:
        with real_server({"api_key": ["sk"]}) as server:
            server.client.headers["x-api-key"] = "sk"
            engine = server.engine
            engine.core.scheduler.set_limits(engine.resolve_kv_limits({tenant_of("sk"): (None, 64)}))
            answer = server.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": 30})
            assert answer.status_code == 400
            assert "this API key's tenant may hold" in answer.json()["error"]["message"]
            # Without a number of its own, an output is as long as the cap allows.
            answer = server.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": None, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] <= 5
            server.assert_nothing_runs()

    def test_of_those_that_wait_the_more_important_is_served_first(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with real_server(max_num_seqs=1) as server, ThreadPoolExecutor(8) as callers:
            served: list[int] = []
            scheduler, go_on = server.core.scheduler, step_for_news(server.engine)
            scheduler.on_admitted = lambda request: served.append(request.priority)

            def ask(priority: int) -> Any:
                return callers.submit(server.complete, [5, 6], max_tokens=5, priority=priority)

            asked = [callers.submit(server.complete, [5], max_tokens=40)]
            wait_until(lambda: scheduler.num_running == 1)
            asked += [ask(priority) for priority in (3, 0, 2, -1, 1)]
            wait_until(lambda: scheduler.num_waiting == 5)
            go_on()
            for each in asked:
                each.result()
            assert served == [0, -1, 0, 1, 2, 3]


class TestFailures:
    @pytest.fixture
    def faulty(self) -> Iterator[RealServer]:
        with real_server() as server:
            poison(server.core)
            yield server
            server.assert_nothing_runs()
            assert server.client.get("/health").status_code == 200

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_unusable_logits_are_an_internal_error(self, faulty: RealServer, path: str, stream: bool) -> None:
        """The request is steered to the poisoned token, which is sent; the token after it cannot be sampled."""
        asked = {"prompt": "the"} if path == "/v1/completions" else {"messages": MESSAGES}
        body = {**asked, "max_tokens": 9, "temperature": 0, "logit_bias": {str(POISON): 100}}
        if stream:
            *_, error = sse_objects(faulty.events(path, body))
        else:
            response = faulty.post(path, body)
            assert response.status_code == 500
            error = response.json()
        assert error["error"]["code"] == "unusable_logits"
        assert "NaN or infinite logits" in error["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("prompts", [[5, POISON], [[5, 6], [POISON]]])
    def test_an_error_before_the_first_token_is_an_ordinary_response(
        self, faulty: RealServer, prompts: Any, stream: bool
    ) -> None:
        response = faulty.post("/v1/completions", {"prompt": prompts, "max_tokens": 900, "stream": stream, "n": 2})
        if stream and response.status_code == 200:  # the sound prompt's first token was quicker
            assert "unusable_logits" in response.text
        else:
            assert (response.status_code, error_of(response)["code"]) == (500, "unusable_logits")

    def test_the_others_in_the_batch_do_not_notice(self, faulty: RealServer) -> None:
        expected = faulty.complete([5, 6, 7], max_tokens=60)["choices"]
        with ThreadPoolExecutor(8) as callers:
            sound = [callers.submit(faulty.complete, [5, 6, 7], max_tokens=60) for _ in range(4)]
            bad = [callers.submit(faulty.post, "/v1/completions", {"prompt": [9, POISON]}) for _ in range(4)]
            assert [each.result()["choices"] for each in sound] == [expected] * 4
            assert [each.result().status_code for each in bad] == [500] * 4

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("place", ["before computing", "in its output"])
    def test_a_failing_request_gets_an_error_with_its_id_and_the_others_their_answers(
        self, place: str, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        marker = 77

        with real_server() as server:
            expected = server.complete([5, 6, 7], max_tokens=40)["choices"]

            def strikes(concerned: set[str]) -> bool:
                # On a busy machine a request may have all of its tokens before an output is made of the first.
                outputs = (server.core.outputs._tracked.get(RequestId(name)) for name in concerned)
                return any(output is not None and marker in output.request.prompt_token_ids for output in outputs)

            with injected(server.core, place, strikes), ThreadPoolExecutor(4) as callers:
                sound = [callers.submit(server.complete, [5, 6, 7], max_tokens=40) for _ in range(3)]
                body = {"prompt": [9, marker], "max_tokens": 30, "stream": stream}
                answer = server.post("/v1/completions", body)
                assert [each.result()["choices"] for each in sound] == [expected] * 3
            if stream and answer.status_code == 200:
                (event,) = (line for line in answer.text.splitlines() if '"error"' in line)
                error = json.loads(event.removeprefix("data: "))["error"]
            else:
                assert answer.status_code == 500
                error = error_of(answer)
            assert (error["code"], error["type"]) == ("step_failed", "server_error")
            (request_id,) = re.findall(r"cmpl-[0-9a-f]+", error["message"])
            assert server.client.get("/health").json() == {"status": "ok"}
            assert "octavo:failed_steps_total" in server.client.get("/metrics").text
        assert any(request_id in record.getMessage() and record.exc_info for record in caplog.records)

    def test_a_dead_engine_is_told_to_whom_it_served_and_to_all_who_come(self) -> None:
        with real_server() as server:
            break_after(server.core, 5)
            *_, last = sse_objects(server.events("/v1/completions", {"prompt": [5], "max_tokens": 900}))
            assert last["error"]["code"] == "engine_dead"
            for answer in (
                server.client.get("/health"),
                server.post("/v1/completions", {"prompt": [5]}),
                server.post("/v1/completions", {"prompt": [5], "stream": True}),
                server.post("/v1/chat/completions", {"messages": MESSAGES}),
            ):
                assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_dead")
                assert "secret" not in answer.text


def test_ids_end_at_the_vocabulary(server: RealServer) -> None:
    assert server.complete([VOCAB_SIZE - 1], max_tokens=1)
