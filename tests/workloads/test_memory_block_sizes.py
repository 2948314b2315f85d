from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.model_shape import ModelShape
from octavo.planner.sources import find_shape
from octavo.workloads.memory_block_sizes import CacheBudget, play, simulated_engine
from octavo.workloads.memory_report import markdown
from octavo.workloads.workload import named_workload
from tests.commands.conftest import OctavoCommand

SPEEDS = (1000.0, 100_000.0)
"""About an A100's, in GB/s and GFLOP/s: reading the weights is most of a decode step."""
SIMULATE = ["--simulate", "--model", "llama-2-7b", "--max-model-len", 2048]


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return find_shape("llama-2-7b")


@pytest.fixture
def same_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_budget_is_what_contiguous_sequences_reserve_and_the_null_block_comes_on_top(llama: ModelShape) -> None:
    config = EngineConfig(max_model_len=2048)
    budget = CacheBudget.build(llama, config, contiguous_seqs=4)
    assert budget.num_bytes == 4 * 2048 * 524_288
    assert budget.pool("max").usable_blocks == budget.contiguous_seqs == 4
    assert budget.pool(16).usable_blocks == 4 * 2048 // 16


def test_a_budget_below_one_contiguous_sequence_is_refused_with_the_numbers(llama: ModelShape) -> None:
    config = EngineConfig(max_model_len=2048, kv_cache_memory=1000)
    with pytest.raises(
        ConfigError, match=r"1000 bytes are too few for one contiguous sequence of 2048 tokens.*1073741824"
    ):
        CacheBudget.build(llama, config, 4)


def test_a_step_costs_its_weights_its_tokens_and_its_context(llama: ModelShape) -> None:
    parameters = llama.parameters.total
    step_s, token_s = 2 * parameters / 1e12, 2 * parameters / 1e14
    config = EngineConfig(max_model_len=2048)
    engine = simulated_engine(CacheBudget.build(llama, config, 4), 16, config, *SPEEDS)
    engine.add(named_workload("single")[0])
    assert engine.step() == pytest.approx(step_s + 64 * token_s + 64 * 524_288 / 1e12)
    assert engine.step() == pytest.approx(step_s + token_s + 65 * 524_288 / 1e12)


@pytest.mark.parametrize("speeds", [(0, 1), (1, -1)])
def test_a_speed_must_be_positive(llama: ModelShape, speeds: tuple[int, int]) -> None:
    config = EngineConfig(max_model_len=2048)
    with pytest.raises(ConfigError, match="speeds must be above 0"):
        simulated_engine(CacheBudget.build(llama, config, 4), 16, config, *speeds)


@pytest.mark.slow
def test_paging_wastes_under_four_per_cent_and_runs_several_times_as_many_at_once(llama: ModelShape) -> None:
    config = EngineConfig(max_model_len=2048, enable_prefix_caching=False)
    budget = CacheBudget.build(llama, config, contiguous_seqs=4)
    played = {}
    for size in (16, "max"):
        engine = simulated_engine(budget, size, config, *SPEEDS)
        played[size] = play(engine, named_workload("mixed96"), budget)
        engine.scheduler.kv.audit()
    paged, contiguous = played[16], played["max"]
    assert paged.usage["waste"] < 0.04
    assert contiguous.usage["waste"] > 0.6
    assert contiguous.usage["running_max"] == 4
    assert paged.usage["running_mean"] > 4 * contiguous.usage["running_mean"]
    assert paged.output_tok_s > 2 * contiguous.output_tok_s
    assert paged.output_tokens == contiguous.output_tokens == sum(r.max_tokens for r in named_workload("mixed96"))


@pytest.mark.slow
def test_the_command_simulates_every_block_size(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "t.csv"
    rows = "\n".join(f"{i},alice,{300 * (i + 1)},{40 * (i + 1)}" for i in range(12))
    trace.write_text(f"arrival_s,client,prompt_tokens,output_tokens\n{rows}\n")
    argv = ["--workload", "mixed12", "--trace", trace, "--contiguous-seqs", 2, "--json"]
    output = tmp_path / "deep" / "memory-1.5"
    code, out, _ = octavo_command("bench", "memory", *SIMULATE, *argv, "--output", output)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert [work["name"] for work in result["workloads"]] == ["mixed12", "t"]
    assert result["workloads"][1]["scale"] < 1
    for work in result["workloads"]:
        assert [row["block_size"] for row in work["rows"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, "max"]
        wastes = [row["waste"] for row in work["rows"]]
        assert wastes == sorted(wastes)
        assert work["rows"][0]["waste"] == 0.0
        assert work["rows"][-1]["throughput_ratio"] == 1.0
        assert all(sum(row["shares"].values()) == pytest.approx(1.0, abs=1e-3) for row in work["rows"])
    assert json.loads((tmp_path / "deep" / "memory-1.5.json").read_text()) == result
    assert (tmp_path / "deep" / "memory-1.5.md").read_text() == markdown(result) + "\n"
    assert (tmp_path / "deep" / "memory-1.5.png").read_bytes().startswith(b"\x89PNG")


def test_without_json_there_are_markdown_tables(octavo_command: OctavoCommand) -> None:
    argv = ["--workload", "mixed4", "--block-sizes", "16"]
    code, out, _ = octavo_command("bench", "memory", *SIMULATE, *argv)
    assert code == 0
    assert "| block size | waste |" in out
    assert "Simulated: a step takes" in out


@pytest.mark.slow
def test_the_real_engine_plays_the_same_comparison(
    octavo_command: OctavoCommand, tiny_llama: Path, same_threads: None
) -> None:
    argv = ["--model", tiny_llama, "--device", "cpu", "--dtype", "float32", "--num-threads", 1, "--max-model-len", 128]
    argv += ["--workload", "alpaca6", "--contiguous-seqs", 2, "--runs", 2, "--json"]
    code, out, err = octavo_command("bench", "memory", *argv)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    paged, contiguous = result["workloads"][0]["rows"]
    assert result["mode"] == "real"
    assert len(paged["seconds_of_runs"]) == 2
    assert (paged["usable_blocks"], contiguous["usable_blocks"]) == (16, 2)
    assert paged["running_max"] > contiguous["running_max"] == 2
    assert paged["waste"] < contiguous["waste"]


@pytest.mark.slow
def test_codecs_hold_more_sequences_in_the_same_memory(octavo_command: OctavoCommand) -> None:
    argv = ["--workload", "mixed64", "--contiguous-seqs", 2, "--codecs", "all", "--json"]
    code, out, err = octavo_command("bench", "memory", *SIMULATE, *argv)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    plain, *coded = result["workloads"][0]["rows"]
    assert plain["kv_cache_dtype"] == "bfloat16"
    least = {"fp8_e4m3": 2.0, "fp8_e5m2": 2.0, "int8": 1.9, "k8v4": 2.5, "int4": 3.5, "nvfp4": 3.5}
    assert {row["kv_cache_dtype"] for row in coded} == set(least)
    for row in coded:  # heads of 128 dimensions
        assert row["usable_blocks"] / plain["usable_blocks"] >= least[row["kv_cache_dtype"]]
        assert row["running_ratio"] > 1.5
        assert row["throughput_ratio"] > 1.0
    assert "| KV cache | bytes a token |" in markdown(result)


@pytest.mark.slow
def test_codecs_are_drawn(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = ["--workload", "mixed4", "--codecs", "int8", "--output", tmp_path / "codecs"]
    assert octavo_command("bench", "memory", *SIMULATE, *argv)[0] == 0
    assert (tmp_path / "codecs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_real_engine_plays_with_each_codec(
    octavo_command: OctavoCommand, tiny_llama: Path, same_threads: None
) -> None:
    argv = ["--model", tiny_llama, "--device", "cpu", "--dtype", "float32", "--num-threads", 1, "--max-model-len", 128]
    argv += ["--workload", "alpaca6", "--contiguous-seqs", 2, "--codecs", "int8,k8v4", "--json"]
    code, out, err = octavo_command("bench", "memory", *argv)
    assert code == 0, err
    plain, int8, k8v4 = json.loads(out.splitlines()[-1])["workloads"][0]["rows"]
    assert (plain["kv_cache_dtype"], plain["running_ratio"]) == ("float32", 1.0)
    assert plain["usable_blocks"] < int8["usable_blocks"] < k8v4["usable_blocks"]
    assert plain["running_max"] <= int8["running_max"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--codecs", "int8", "--block-sizes", "16"], "leave out --block-sizes"),
        (["--codecs", "int8", "--kv-cache-dtype", "int8"], "leave out --kv-cache-dtype"),
        (["--codecs", "int3"], "got 'int3'"),
        (["--block-size", "16"], "use --block-sizes"),
        (["--num-blocks", "9"], "use --kv-cache-memory"),
        (["--max-model-len", "999999"], "supports at most 4096"),
        (["--workload", "odd64"], "unknown workload"),
    ],
)
def test_what_cannot_be_compared_is_refused(octavo_command: OctavoCommand, argv: list[str], message: str) -> None:
    code, _, err = octavo_command("bench", "memory", "--simulate", "--model", "llama-2-7b", *argv)
    assert code == 1
    assert message in err
