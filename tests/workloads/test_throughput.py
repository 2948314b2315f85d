from __future__ import annotations

import json

import pytest

from octavo.workloads.throughput import ThroughputRun, summary
from tests.commands.conftest import OctavoCommand
from tests.commands.fake_llm import MAX_MODEL_LEN, FakeLLM


def test_a_summary_is_the_median_of_each_figure() -> None:
    runs = [ThroughputRun(2, seconds, 100, 0, 50) for seconds in (1.0, 4.0, 2.0)]
    figures = summary(runs)
    assert (figures["seconds"], figures["seconds_of_runs"]) == (2.0, [1.0, 4.0, 2.0])
    assert (figures["prompt_tok_s"], figures["output_tok_s"], figures["requests_s"]) == (50.0, 25.0, 1.0)
    assert figures["total_tok_s"] == 75.0


def test_the_command_warms_up_runs_and_prints_one_json_object_last(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM]
) -> None:
    argv = ["--workload", "uniform3", "--runs", 2, "--json", "--no-enable-prefix-caching"]
    code, out, _ = octavo_command("bench", "throughput", *argv)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (3, 192, 384)
    assert (result["runs"], result["workload"]) == (2, "uniform3")
    assert result["options"] == {"enable_prefix_caching": False}
    assert len(fake_llm.last.prompts) == 2 + 2 * 3
    assert fake_llm.last.num_cache_resets == 2
    assert all(p.ignore_eos and p.greedy and not p.detokenize for p in fake_llm.last.params)


def test_without_json_there_is_a_table(octavo_command: OctavoCommand, fake_llm: type[FakeLLM]) -> None:
    code, out, _ = octavo_command("bench", "throughput", "--workload", "single")
    assert code == 0
    assert "output tok/s" in out


def test_requests_are_cut_to_the_models_limit(octavo_command: OctavoCommand, fake_llm: type[FakeLLM]) -> None:
    argv = ["--workload", "random", "--num-prompts", 2, "--input-len", 5000, "--output-len", 8, "--json"]
    code, out, _ = octavo_command("bench", "throughput", *argv)
    assert code == 0
    assert json.loads(out)["clipped"] == 2
    assert len(fake_llm.last.prompts[-1]["prompt_token_ids"]) == MAX_MODEL_LEN - 8


@pytest.mark.parametrize(
    "argv",
    [["--runs", "0"], ["--trace", "nowhere"], ["--workload", "random", "--input-len", "x"], ["--output-len", "4"]],
)
def test_what_cannot_work_is_told_before_a_model_is_loaded(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], argv: list[str]
) -> None:
    code, _, err = octavo_command("bench", "throughput", *argv)
    assert code == 1
    assert err.startswith("octavo: error: ")
    assert fake_llm.last is None
