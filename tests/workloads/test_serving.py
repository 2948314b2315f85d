from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.workloads.serving import RequestRecord, Target, peak_concurrency, run_load, summary
from octavo.workloads.workload import BenchRequest
from tests.commands.conftest import OctavoCommand
from tests.workloads.fake_server import MAX_MODEL_LEN, MODEL, FakeServer


def requests(count: int, max_tokens: int = 5) -> list[BenchRequest]:
    return [BenchRequest([i, 7, 7], max_tokens) for i in range(count)]


def load(
    server: FakeServer,
    work: list[BenchRequest],
    arrivals: list[float] | None = None,
    max_concurrency: int | None = None,
    **target: Any,
) -> list[RequestRecord]:
    arrivals = arrivals or [0.0] * len(work)
    return asyncio.run(run_load(Target(server.base_url, MODEL, **target), work, arrivals, max_concurrency))


def test_tokens_are_counted_by_their_ids_not_by_chunks(server: FakeServer) -> None:
    server.gives_usage = False
    record = load(server, requests(1, max_tokens=5))[0]
    assert record.error is None
    assert (record.output_tokens, len(record.chunk_times)) == (5, 3)


def test_without_ids_tokens_are_counted_by_usage(server: FakeServer) -> None:
    server.gives_token_ids = False
    record = load(server, requests(1, max_tokens=5))[0]
    assert (record.error, record.output_tokens, record.prompt_tokens, record.cached_tokens) == (None, 5, 3, 1)


def test_an_answer_that_cannot_be_counted_is_an_error_rather_than_a_guess(server: FakeServer) -> None:
    server.gives_token_ids = server.gives_usage = False
    assert load(server, requests(1))[0].error == "no token count"


def test_requests_ask_for_a_fixed_number_of_greedy_tokens(server: FakeServer) -> None:
    load(server, requests(1), api_key="secret")
    assert server.bodies[0] == {
        "model": MODEL,
        "prompt": [0, 7, 7],
        "max_tokens": 5,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_the_field_that_a_strict_server_refuses_can_be_left_out(server: FakeServer) -> None:
    record = load(server, requests(1), return_token_ids=False)[0]
    assert "return_token_ids" not in server.bodies[0]
    assert record.output_tokens == 5


def test_each_failure_is_counted_under_its_kind_and_harms_no_other_request(server: FakeServer) -> None:
    kinds = ["http 503", "cut", "hang up", "error event", "garbage", "no finish", "silent"]
    server.misbehave = dict(enumerate(kinds))
    records = load(server, requests(len(kinds) + 2))
    assert [record.error for record in records] == [
        "http 503",
        "stream cut off",
        "no valid answer",
        "error event",
        "unreadable event",
        "stream cut off",
        "no token",
        None,
        None,
    ]
    figures = summary(records)
    assert (figures["completed"], figures["failed"], figures["errors"]["stream cut off"]) == (2, 7, 2)
    assert figures["output_tokens"] == 10


def test_nobody_listening_is_an_error_of_each_request(server: FakeServer) -> None:
    target = Target("http://127.0.0.1:9", MODEL)
    records = asyncio.run(run_load(target, requests(2), [0.0, 0.0]))
    assert {record.error for record in records} == {"cannot connect"}
    assert summary(records)["completed"] == 0


def test_requests_go_out_when_they_are_due_whatever_became_of_the_others(server: FakeServer) -> None:
    server.misbehave, server.num_awaited = {0: "last"}, 3
    records = load(server, requests(3), arrivals=[0.0, 0.1, 0.2])
    assert [record.error for record in records] == [None] * 3, "the first ends once the others have come"
    assert all(record.sent_s >= record.scheduled_s for record in records)


def test_an_answer_that_does_not_end_in_time_is_given_up(server: FakeServer) -> None:
    server.misbehave = {0: "endless"}
    assert [record.error for record in load(server, requests(1), timeout_s=0.2)] == ["timeout"]


@pytest.mark.slow
def test_waiting_for_a_slot_counts_from_the_schedule_but_not_from_the_sending(server: FakeServer) -> None:
    server.chunk_delay_s = 0.05
    records = load(server, requests(3, max_tokens=4), max_concurrency=1)
    assert peak_concurrency(records) == 1
    figures = summary(records)
    assert figures["ttft_ms"]["max"] < figures["ttft_from_schedule_ms"]["max"]
    assert figures["client_queue_ms"]["max"] > 150
    assert figures["e2e_from_schedule_ms"]["max"] > figures["e2e_ms"]["max"]


@pytest.mark.slow
def test_a_client_that_runs_late_says_so(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any | list[RequestRecord]:
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.4)
        return await run_load(Target(server.base_url, MODEL), requests(2), [0.0, 0.1])

    figures = summary(asyncio.run(main()))
    assert figures["client_late_ms"]["max"] > 100


def test_latencies_are_what_the_times_say() -> None:
    record = RequestRecord(1.0, 1.1, 1.25, 2.0, chunk_times=[1.5, 1.6, 1.9], prompt_tokens=10, output_tokens=5)
    figures = summary([record])
    assert figures["ttft_ms"]["p50"] == 250
    assert figures["ttft_from_schedule_ms"]["p50"] == 500
    assert figures["itl_ms"]["mean"] == 200
    assert figures["tpot_ms"]["p99"] == 100
    assert figures["e2e_ms"]["p50"] == 650
    assert figures["e2e_from_schedule_ms"]["p50"] == 900
    assert figures["client_late_ms"]["p50"] == pytest.approx(100)
    assert figures["client_queue_ms"]["p50"] == pytest.approx(150)
    assert (figures["output_tok_s"], figures["total_tok_s"]) == (2.5, 7.5)


def test_no_request_at_all_gives_a_report_of_nothing() -> None:
    figures = summary([])
    assert (figures["requests"], figures["output_tok_s"], figures["ttft_ms"]["p50"]) == (0, 0.0, None)


def test_sixty_four_streams_at_once_all_complete(server: FakeServer) -> None:
    records = load(server, requests(64, max_tokens=20))
    assert {(record.error, record.output_tokens) for record in records} == {(None, 20)}


def test_bench_serve_measures_a_server_that_runs(server: FakeServer, octavo_command: OctavoCommand) -> None:
    argv = ["--base-url", server.base_url + "/v1", "--workload", "random", "--num-prompts", 4, "--json"]
    code, out, err = octavo_command("bench", "serve", *argv, "--output-len", 6, "--request-rate", 200)
    assert (code, err) == (0, "")
    result = json.loads(out.splitlines()[-1])
    assert (result["model"], result["completed"], result["output_tokens"]) == (MODEL, 4, 24)
    assert result["arrivals"] == "200 a second, burstiness 1"
    assert set(result["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99", "max"}


def test_bench_serve_cuts_requests_to_the_models_limit(server: FakeServer, octavo_command: OctavoCommand) -> None:
    argv = ["--base-url", server.base_url, "--workload", "random", "--num-prompts", 2, "--input-len", 500]
    code, out, _ = octavo_command("bench", "serve", *argv, "--output-len", 10, "--json")
    assert code == 0
    assert json.loads(out)["clipped"] == 2
    assert [len(body["prompt"]) for body in server.bodies[-2:]] == [MAX_MODEL_LEN - 10] * 2


def test_bench_serve_follows_a_traces_arrivals_and_names_the_model(
    server: FakeServer, octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    trace = [{"prompt_token_ids": [1, 2], "max_tokens": 2, "arrival_s": at} for at in (5.0, 5.25)]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    argv = ["other-name", "--base-url", server.base_url, "--trace", tmp_path / "trace.json"]
    code, out, _ = octavo_command("bench", "serve", *argv)
    assert code == 0
    assert server.bodies[-1]["model"] == "other-name"
    assert "trace" in out
    assert "ttft ms" in out
    assert float(out.split("duration s")[1].split()[0]) >= 0.25


def test_bench_serve_with_failures_exits_with_1_and_still_reports(
    server: FakeServer, octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    server.misbehave = {5: "http 503"}
    (tmp_path / "trace.json").write_text('[{"prompt_token_ids": [5], "max_tokens": 2}]')
    argv = ["--base-url", server.base_url, "--trace", tmp_path / "trace.json", "--json"]
    code, out, _ = octavo_command("bench", "serve", *argv)
    assert code == 1
    assert json.loads(out)["errors"] == {"http 503": 1}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--base-url", "localhost:8000"], "not an http URL"),
        (["--base-url", "http://127.0.0.1:9"], "cannot read http://127.0.0.1:9/v1/models"),
        (["--base-url", "http://x", "--max-num-seqs", "3"], "engine options (max_num_seqs) have no effect"),
        (["--max-concurrency", "0"], "max_concurrency must be at least 1"),
        (["--timeout", "0"], "timeout must be above 0"),
        (["--workload", "nothing"], "unknown workload 'nothing'"),
        (["--workload", "single", "--num-prompts", "2"], "single has 1 requests"),
    ],
)
def test_bench_serve_refuses_what_cannot_work(octavo_command: OctavoCommand, argv: list[str], message: str) -> None:
    code, _, err = octavo_command("bench", "serve", *argv)
    assert code == 1
    assert message in err
