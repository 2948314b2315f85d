from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.workloads.latency import LatencyRun, measure, rates, summary
from octavo.workloads.workload import BenchRequest
from tests.commands.conftest import OctavoCommand
from tests.conftest import MakeLLM


@pytest.fixture
def same_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_step_after_the_last_first_token_is_a_decode_step(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_num_batched_tokens=16)
    requests = [BenchRequest(list(range(20, 20 + length)), 6) for length in (24, 30)]
    (run,) = measure(llm, requests, runs=1)
    assert len(run.first_tokens) == 2
    assert max(run.first_tokens) == run.prefill
    # The shorter prompt's output goes on while the longer one is computed: only what is left then is decode.
    assert len(run.decode_steps) == 5
    assert run.prefill + sum(run.decode_steps) <= run.total


@pytest.mark.slow
def test_passes_that_warm_up_do_not_count(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama)
    assert len(measure(llm, [BenchRequest([5, 6, 7], 2)], runs=2, warm_ups=3)) == 2


def test_a_batch_that_cannot_run_at_once_is_refused_with_the_numbers(make_llm: MakeLLM, tiny_llama: Path) -> None:
    llm = make_llm(tiny_llama, max_num_seqs=1)
    with pytest.raises(ConfigError, match="a batch of 2 prompts, but max_num_seqs is 1"):
        measure(llm, [BenchRequest([5], 1)] * 2, runs=1)


def test_a_cache_that_is_too_small_for_the_batch_is_told_apart_and_nothing_stays_behind(
    make_llm: MakeLLM, tiny_llama: Path
) -> None:
    llm = make_llm(tiny_llama, block_size=16, num_blocks=5, enable_prefix_caching=False)
    requests = [BenchRequest(list(range(20, 50)), 20) for _ in range(2)]
    with pytest.raises(ConfigError, match="too small for a batch of 2"):
        measure(llm, requests, runs=1)
    assert not llm.core.has_work


def test_a_summary_has_medians_and_percentiles_in_milliseconds() -> None:
    run = LatencyRun(0.1, (0.01, 0.02, 0.03), (0.05, 0.1), 0.2)
    figures = summary([run])
    assert figures["prefill_ms"]["p50"] == 100.0
    assert figures["decode_step_ms"]["p50"] == 20.0
    assert figures["decode_step_ms"]["p90"] == 28.0
    assert figures["ttft_ms"]["max"] == 100.0


def test_the_command_prints_one_json_object(
    octavo_command: OctavoCommand, tiny_llama: Path, same_threads: None
) -> None:
    argv = ["--model", tiny_llama, "--device", "cpu", "--dtype", "float32", "--num-threads", 1, "--token-id-end", 300]
    argv += ["--batch-size", 3, "--input-len", 20, "--output-len", 4, "--num-iters", 2, "--kv-cache-memory", "16MiB"]
    code, out, _ = octavo_command("bench", "latency", *argv, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert (result["batch_size"], result["prompt_tokens"], result["output_tokens"], result["runs"]) == (3, 60, 12, 2)
    assert result["decode_step_ms"]["p90"] >= result["decode_step_ms"]["p50"] > 0
    assert result["weights_gb_s"] >= 0


def test_rates_are_those_of_the_median_run_and_step() -> None:
    runs = [LatencyRun(prefill, (0.01, 0.02, 0.04), (), 1.0) for prefill in (0.1, 0.2, 0.5)]
    assert rates(runs, prompt_tokens=100, batch_size=4, weight_bytes=10**9) == {
        "prefill_tokens_s": 500.0,
        "decode_tokens_s": 200.0,
        "weights_gb_s": 50.0,
    }
