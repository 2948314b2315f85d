from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.workloads.traces import TraceRequest, as_requests, read_trace

DATA = Path(__file__).parent / "data"


def test_mooncake_lines_give_arrivals_lengths_and_hashes() -> None:
    first, second, third = read_trace(DATA / "mooncake.jsonl")
    assert first == TraceRequest(0.0, 1100, 12, hash_ids=(0, 1, 2))
    assert second.hash_ids == (0, 1, 3)
    assert third.arrival_s == 3.0


def test_azure_rows_give_arrivals_and_lengths() -> None:
    first, second, _ = read_trace(DATA / "azure.csv")
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_vtc_rows_give_clients_and_are_put_in_order_of_arrival() -> None:
    requests = read_trace(DATA / "vtc.csv")
    assert requests[0] == TraceRequest(0.0, 13, 199, client="13")
    assert [request.client for request in requests] == ["13", "2", "0"]


def test_a_workload_gives_its_own_token_ids_and_no_times() -> None:
    requests = as_requests(read_trace(DATA / "workload.json"))
    assert [request.prompt_token_ids for request in requests] == [[5, 6, 7, 8], [9]]
    assert [request.max_tokens for request in requests] == [3, 2]
    assert requests[0].arrival_s is None


def test_the_format_is_read_from_the_content_not_the_name(tmp_path: Path) -> None:
    for name in ("mooncake.jsonl", "azure.csv", "vtc.csv", "workload.json"):
        (tmp_path / "trace").write_bytes((DATA / name).read_bytes())
        assert read_trace(tmp_path / "trace") == read_trace(DATA / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a known trace"),
        ("a,b\n1,2\n", "is not a known trace"),
        ("[", "Expecting value"),
        ("[]", "has no request"),
        ('[{"prompt_token_ids": [1]}]', "entry 0: 'max_tokens' is missing"),
        ('[{"prompt_token_ids": [], "max_tokens": 1}]', "entry 0: both lengths must be at least 1, got 0 in and 1 out"),
        ('[{"prompt_token_ids": 3, "max_tokens": 1}]', "entry 0: "),
        ('{"timestamp": 0}', "line 1: 'hash_ids' is missing"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash ids do not match",
        ),
        ('{"timestamp": 0}\nx', "line 1: "),
        ("arrival_s,client,prompt_tokens,output_tokens\n0,1,2,3\n0,1,x,3\n", "line 3: "),
        ("arrival_s,client,prompt_tokens,output_tokens\n0,1\n", "line 2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: "),
        ("arrival_s,client,prompt_tokens,output_tokens\n0,a,2,3\nnan,b,2,3\n", "line 3: an arrival must be finite"),
        ('{"timestamp": Infinity, "input_length": 1, "output_length": 1, "hash_ids": [0]}', "line 1: an arrival must"),
        ('[{"prompt_token_ids": [5], "max_tokens": 1, "arrival_s": NaN}]', "entry 0: an arrival must be finite"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [Infinity]}', "line 1: cannot convert"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_trace(tmp_path / "trace")
    assert message in str(refused.value)
    assert "trace" in str(refused.value)


def test_a_missing_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read nowhere"):
        read_trace("nowhere")


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.1, 2.0, 0.001])
def test_equal_hash_ids_become_equal_blocks_at_any_scale(scale: float) -> None:
    first, second, third = as_requests(read_trace(DATA / "mooncake.jsonl"), scale_lengths=scale)
    shared = 2 * max(1, round(512 * scale))
    assert first.prompt_token_ids[:shared] == second.prompt_token_ids[:shared]
    assert first.prompt_token_ids[: shared + 1] != second.prompt_token_ids[: shared + 1] or scale < 0.01
    assert len(second.prompt_token_ids) == 3 * max(1, round(512 * scale))
    if scale >= 0.1:
        assert third.prompt_token_ids[:5] != first.prompt_token_ids[:5]


def test_unscaled_prompts_have_the_traces_lengths() -> None:
    for name in ("mooncake.jsonl", "azure.csv", "vtc.csv"):
        trace = read_trace(DATA / name)
        requests = as_requests(trace)
        assert [len(r.prompt_token_ids) for r in requests] == [r.prompt_tokens for r in trace]
        assert [r.max_tokens for r in requests] == [r.output_tokens for r in trace]


def test_the_same_seed_makes_the_same_prompts_and_another_seed_others() -> None:
    trace = read_trace(DATA / "mooncake.jsonl")
    assert as_requests(trace, seed=1) == as_requests(trace, seed=1)
    assert as_requests(trace, seed=1)[0].prompt_token_ids != as_requests(trace, seed=2)[0].prompt_token_ids


def test_requests_without_hashes_share_nothing_even_where_their_lengths_are_equal() -> None:
    first, second = as_requests([TraceRequest(0.0, 100, 1), TraceRequest(0.0, 100, 1)])
    assert first.prompt_token_ids[:4] != second.prompt_token_ids[:4]


def test_token_ids_stay_below_the_vocabularys_end() -> None:
    requests = as_requests(read_trace(DATA / "mooncake.jsonl"), end=64)
    assert max(max(request.prompt_token_ids) for request in requests) < 64


def test_a_prompt_that_is_given_can_be_cut_but_not_grown() -> None:
    trace = read_trace(DATA / "workload.json")
    assert as_requests(trace, scale_lengths=0.5)[0].prompt_token_ids == [5, 6]
    with pytest.raises(ConfigError, match="scaled down, not up"):
        as_requests(trace, scale_lengths=2)


def test_a_scale_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="scale_lengths must be above 0, got 0"):
        as_requests([], scale_lengths=0)
