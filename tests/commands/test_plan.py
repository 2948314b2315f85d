from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.model_source import resolve_model
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.engine.builder import build_engine
from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import LayerKVSpec
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.machine import MEMORY_LIMIT_VARIABLE
from tests.conftest import runner_of
from tests.models.tiny import write_hf_model


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The JSON that `octavo plan` ends with."""

    def run(*argv: Path | int | str) -> dict[str, Any]:
        assert main(["plan", *map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `octavo plan` says on standard error when it cannot answer."""

    def run(*argv: str) -> str:
        assert main(["plan", *map(str, argv)]) == 1
        return capsys.readouterr().err

    return run


def test_llama_3_1_70b_at_4096_tokens_and_256_sequences(plan: Callable[..., Any]) -> None:
    answer = plan("--model", "llama-3.1-70b", "--context", 4096, "--concurrency", 256)
    assert answer["kv_bytes_per_token"] == 327_680
    assert answer["kv_bytes_per_sequence"] == 1_342_177_280
    assert answer["kv_bytes_total"] == 343_597_383_680 == 320 * 2**30


def test_llama_3_1_70b_at_8192_tokens_and_32_sequences_takes_85_9_gb(plan: Callable[..., Any]) -> None:
    answer = plan("llama-3.1-70b", "--context", 8192, "--concurrency", 32)
    assert round(answer["kv_bytes_total"] / 1e9, 1) == 85.9


def test_without_grouped_queries_it_would_take_687_gb(plan: Callable[..., Any], tmp_path: Path) -> None:
    row = {**KNOWN_MODELS["llama-3.1-70b"], "num_key_value_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(row))
    answer = plan(tmp_path, "--context", 8192, "--concurrency", 32, "--kv-cache-dtype", "float16")
    assert round(answer["kv_bytes_total"] / 1e9) == 687


def test_llama_2_7b_takes_524288_bytes_a_token(plan: Callable[..., Any]) -> None:
    assert plan("llama-2-7b")["kv_bytes_per_token"] == 524_288


def test_150_tokens_are_10_blocks_of_16(plan: Callable[..., Any]) -> None:
    assert plan("llama-2-7b", "--context", 150)["blocks_per_sequence"] == 10


def test_every_codec_that_the_allocator_has_is_answered_for(plan: Callable[..., Any]) -> None:
    answer = plan("llama-2-7b", "--context", 160)
    assert {d: f["kv_bytes_per_sequence"] for d, f in answer["by_kv_dtype"].items()} == {
        dtype: 10 * 32 * LayerKVSpec(32, 128, 128).block_bytes(format, 16) for dtype, format in KV_FORMATS.items()
    }
    assert answer["by_kv_dtype"]["float32"]["kv_bytes_per_sequence"] == 160 * 1_048_576
    assert plan("llama-2-7b", "--kv-cache-dtype", "float32")["kv_bytes_per_token"] == 1_048_576


def test_a_contiguous_allocator_reserves_max_model_len_for_each_sequence(plan: Callable[..., Any]) -> None:
    options = ["llama-3.1-70b", "--context", 1000, "--max-model-len", 8192, "--concurrency", 7]
    paged = plan(*options)
    assert paged["contiguous"]["kv_bytes_per_sequence"] == 8192 * 327_680
    assert paged["contiguous"]["waste"] == pytest.approx(1 - 1000 / 8192, abs=1e-6)
    assert paged["waste"] == pytest.approx(1 - 1000 / 1008, abs=1e-6)
    assert plan(*options, "--block-size", "max")["kv_bytes_total"] == paged["contiguous"]["kv_bytes_total"]


def test_as_many_sequences_fit_as_memory_needed_for_them_says(plan: Callable[..., Any]) -> None:
    options = ["llama-3.1-8b", "--context", 4096, "--max-num-seqs", 64]
    fitting = plan(*options, "--memory", "80GiB")
    count = fitting["memory"]["sequences_that_fit"]
    assert fitting["concurrency"] == count > 0
    assert fitting["memory_needed_per_device"] <= 0.9 * 80 * 2**30
    more = plan(*options, "--memory", "80GiB", "--concurrency", count + 1)
    assert more["memory"]["fits"] is False
    assert more["memory_needed_per_device"] > 0.9 * 80 * 2**30
    exact = plan(*options, "--gpu-memory-utilization", 1, "--memory", more["memory_needed_per_device"])
    assert exact["memory"]["sequences_that_fit"] == count + 1


@pytest.mark.slow
def test_what_one_device_cannot_hold_is_given_a_number_of_devices_that_can(plan: Callable[..., Any]) -> None:
    options = ["llama-3.1-70b", "--context", 8192, "--concurrency", 32, "--memory", "80GiB"]
    answer = plan(*options)["memory"]
    assert (answer["fits"], answer["sequences_that_fit"]) == (False, 0)
    devices = answer["smallest_tensor_parallel_size"]
    assert plan(*options, "--tensor-parallel-size", devices)["memory"]["fits"] is True
    assert plan(*options, "--tensor-parallel-size", devices // 2)["memory"]["fits"] is False


def test_devices_divide_the_kv_heads_and_repeat_them_beyond_their_number(plan: Callable[..., Any]) -> None:
    options = ["llama-3.1-70b", "--context", 4096, "--tensor-parallel-size"]
    eight, sixteen = plan(*options, 8), plan(*options, 16)
    assert eight["kv_bytes_per_token"] == 327_680
    assert eight["kv_bytes_total_per_device"] == sixteen["kv_bytes_total_per_device"] == 1_342_177_280 // 8
    assert sixteen["kv_bytes_per_token"] == 2 * 327_680
    assert "kept by 2 of the 16 devices" in sixteen["notes"][0]


def test_devices_that_divide_the_kv_heads_unevenly_are_planned_as_they_are_served(plan: Callable[..., Any]) -> None:
    one, two = (plan("smollm2", "--concurrency", 4, "--tensor-parallel-size", count) for count in (1, 2))
    assert two["kv_bytes_per_token"] == one["kv_bytes_per_token"]
    assert two["kv_bytes_total_per_device"] * 3 == one["kv_bytes_total_per_device"] * 2
    assert "3 KV heads are divided unevenly among 2 devices" in two["notes"][0]


def test_output_tokens_cost_what_the_machine_takes_to_read_weights_and_contexts(plan: Callable[..., Any]) -> None:
    workload = ["llama-3.1-8b", "--machine", "h100", "--context", 8192, "--concurrency", 32, "--price-per-hour", 3.6]
    price = plan(*workload)["price"]
    read = 8.03e9 * 2 + 32 * 8192 * 131_072  # bytes a step
    seconds = read / (0.8 * 3350e9)
    assert price["output_tokens_per_second"] == pytest.approx(32 / seconds, rel=0.05)
    assert price["per_million_output_tokens"] == pytest.approx(0.001 * seconds / 32 * 1e6, rel=0.05)
    cheaper = plan(*workload, "--weights", "int4")["price"]
    assert cheaper["per_million_output_tokens"] < price["per_million_output_tokens"]


def test_sliding_windows_make_output_tokens_cheaper(plan: Callable[..., Any]) -> None:
    options = ["--machine", "h100", "--concurrency", 8, "--price-per-hour", 1, "--context"]
    short, long = (plan("mistral-7b-v0.1", *options, context)["price"] for context in (4096, 32768))
    assert long["output_tokens_per_second"] == pytest.approx(short["output_tokens_per_second"], rel=0.01)


def test_a_price_is_not_guessed(plan: Callable[..., Any], refusal: Callable[..., Any]) -> None:
    assert "octavo calibrate-speed" in refusal("llama-3.1-8b", "--memory", "80GiB", "--price-per-hour", "3")
    assert "must be above 0, got 0" in refusal("llama-3.1-8b", "--machine", "h100", "--price-per-hour", "0")
    too_much = ["llama-3.1-70b", "--machine", "h100", "--concurrency", 8, "--price-per-hour", 3]
    assert plan(*too_much)["price"] is None


def test_sliding_windows_say_what_they_save(plan: Callable[..., Any]) -> None:
    mistral = plan("mistral-7b-v0.1", "--context", 32768)
    assert mistral["blocks_per_sequence"] == 4096 // 16 + 1
    window = mistral["sliding_window"]
    assert window["share_saved"] == pytest.approx(1 - 257 / 2048, abs=1e-6)
    assert window["kv_bytes_per_sequence_without"] == 32768 * mistral["kv_bytes_per_token"]
    gemma = plan("gemma-3-27b", "--context", 32768)
    assert [g["layers"] for g in gemma["kv_groups"]] == [10, 10, 10, 10, 10, 10, 2]
    assert gemma["kv_groups"][0]["sliding_window"] is None
    assert 0.7 < gemma["sliding_window"]["share_saved"] < 0.84
    assert plan("llama-3.1-8b")["sliding_window"] is None


def test_deepseek_says_how_it_is_counted(plan: Callable[..., Any]) -> None:
    answer = plan("deepseek-v3", "--context", 4096, "--device", "cpu")
    assert answer["kv_bytes_per_token"] == 61 * (512 + 64) * 2
    assert any("128 heads share; the last 512" in note for note in answer["notes"])
    expanded = "its cache on a GPU holds expanded keys and values, 4.77 MiB a token in bfloat16"
    assert not any(expanded in note for note in answer["notes"])
    assert any(expanded in note for note in plan("deepseek-v3", "--device", "cuda")["notes"])


def test_the_default_is_the_packaged_model(plan: Callable[..., Any]) -> None:
    assert plan()["model"] == "smollm2"
    assert plan()["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2


def test_a_folder_is_read(plan: Callable[..., Any], tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Qwen2")
    answer = plan("--model", tmp_path)
    assert (answer["kv_bytes_per_token"], answer["context"]) == (2 * 2 * (16 + 16) * 2, 256)


def test_a_plan_for_this_machine_is_what_an_engine_allocates_on_it(
    plan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_model(tmp_path, "Qwen3", tokenizer=True, tie_word_embeddings=True)
    options: dict[str, Any] = {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "max_num_seqs": 64}
    flags = [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), value)]
    answer = plan(*flags, "--memory", "32MiB")
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "32MiB")
    engine = build_engine(EngineConfig(**options))
    assert answer["memory"]["pool_bytes_per_device"] == runner_of(engine).arena.nbytes
    assert answer["weight_bytes"] == runner_of(engine).model.weight_bytes
    engine.close()


def test_without_options_the_plan_is_for_this_machine(
    plan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "1GiB")
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = plan("smollm2")
    assert (answer["device"], answer["memory"]["memory_per_device"]) == ("cpu", 2**30)
    size = resolve_model("smollm2").path.stat().st_size
    assert 0.98 * size < answer["weight_bytes"] < size, "a CPU computes with Q4_1 as it is"
    assert plan("smollm2", "--device", "cuda")["memory"] is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 81559\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv(MEMORY_LIMIT_VARIABLE)
    answer = plan("smollm2")
    assert (answer["device"], answer["memory"]["memory_per_device"]) == ("cuda", 81559 << 20)
    assert answer["weight_bytes"] > resolve_model("smollm2").path.stat().st_size, "a GPU dequantises them"


def test_a_machine_by_name_has_the_memory_of_its_data_sheet(
    plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    by_memory = plan("llama-3.1-8b", "--memory", 80 * 10**9, "--device", "cuda")
    assert plan("llama-3.1-8b", "--machine", "h100") == by_memory
    assert plan("smollm2", "--machine", "epyc-9654")["device"] == "cpu"
    assert main(["plan", "--machine", "h100", "--memory", "40GiB"]) == 1
    assert "--machine gives --memory and --device; leave out --memory" in capsys.readouterr().err


def test_the_table_names_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-70b", "--context", "4096", "--concurrency", "256", "--memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Does not fit: 256 users with 4,096 tokens each need ")
    assert "by an engine that can: Octavo's ranks share one machine" in out
    for figure in ("320.00 KiB", "1.25 GiB", "320.00 GiB", "(bfloat16 weights, bfloat16 cache)"):
        assert figure in out
    assert "contiguous" in out


@pytest.mark.slow
def test_users_and_contexts_that_fit_are_counted(plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3.1-8b", "--memory", "24GiB"]
    memory = plan(*options)["memory"]
    longest = memory["longest_context"]
    assert plan(*options, "--context", longest)["memory"]["sequences_that_fit"] >= 1
    assert plan(*options, "--context", longest + 1)["memory"]["sequences_that_fit"] == 0
    for row in memory["by_context"]:
        at_once = plan(*options, "--context", row["context"])["memory"]["sequences_that_fit"]
        assert at_once == row["sequences_that_fit"] == row["by_kv_dtype"]["bfloat16"]
        in_fp8 = plan(*options, "--context", row["context"], "--kv-cache-dtype", "fp8")["memory"]
        assert in_fp8["sequences_that_fit"] == row["by_kv_dtype"]["fp8_e4m3"]
    assert main(["plan", *options, "--context", "8192"]) == 0
    assert capsys.readouterr().out.startswith("Fits: 5 users with 8,192 tokens each need ")


@pytest.mark.slow
def test_users_over_context_are_drawn(plan: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "users.png"
    plan("llama-3.1-8b", "--memory", "24GiB", "--context", "8192", "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_plot_without_anything_to_draw_says_what_to_give(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = ["--plot", str(tmp_path / "users.png")]
    assert main(["plan", "llama-3.1-8b", "--device", "cuda", *plot]) == 1
    assert "give --memory" in capsys.readouterr().err
    assert main(["plan", "llama-3.1-70b", "--memory", "24GiB", *plot]) == 1
    assert "no user fits" in capsys.readouterr().err


def test_weights_are_counted_by_kind_without_the_file(plan: Callable[..., Any]) -> None:
    parameters = plan("llama-3.1-8b")["parameters"]
    assert plan("llama-3.1-8b", "--weights", "q8_0")["weight_bytes"] == parameters * 34 // 32
    # llama.cpp's file of it has 4.92e9 bytes.
    assert plan("llama-3.1-8b", "--weights", "q4_k_m")["weight_bytes"] == pytest.approx(4.92e9, rel=0.01)
    fp8 = plan("deepseek-r1", "--weights", "fp8")
    assert fp8["weight_bytes"] == pytest.approx(671e9, rel=0.01)
    assert any("does not load fp8" in note for note in fp8["notes"])
    published = "weights are counted in bfloat16, but published in fp8: --weights fp8 counts it so"
    assert published in plan("deepseek-r1")["notes"]
    assert not any("published in" in note for note in fp8["notes"])


def test_weights_are_quantised_as_the_server_would(plan: Callable[..., Any]) -> None:
    def weights(model: str, *options: str) -> tuple[str, int]:
        answer = plan(model, *options)
        return answer["weights"], answer["weight_bytes"]

    on_cpu = ("--device", "cpu")
    parameters = plan("smollm2")["parameters"]
    assert weights("smollm2", *on_cpu)[0] == "the GGUF file's"
    assert weights("smollm2", *on_cpu, "--quantization", "none") == ("bfloat16", 2 * parameters)
    parameters = plan("llama-3.1-8b")["parameters"]
    assert weights("llama-3.1-8b", *on_cpu, "--quantization", "q4_0") == ("q4_0", parameters * 18 // 32)
    assert weights("llama-3.1-8b", *on_cpu) == ("bfloat16", 2 * parameters)


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_without_bf16_is_noted_where_it_matters(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("octavo.planner.machine.gpu_memory", lambda: None)
    monkeypatch.setattr("octavo.planner.machine.computes_bf16", lambda: native)

    def is_noted(*arguments: str) -> bool:
        return any("--dtype float32" in note for note in plan(*arguments)["notes"])

    assert is_noted("llama-3.1-8b") == (not native)
    assert not is_noted("llama-3.1-8b", "--quantization", "q8_0")
    assert not is_noted("smollm2")


def test_a_process_on_a_cpu_is_counted(plan: Callable[..., Any]) -> None:
    answer = plan("smollm2", "--device", "cpu", "--memory", "8GiB")
    assert not any("as a GPU's" in note for note in answer["notes"])
    assert any("as a GPU's: give --device cpu" in note for note in plan("smollm2", "--memory", "8GiB")["notes"])
    assert answer["process_bytes"] == 383 << 20
    parts = ("weight_bytes_per_device", "activation_bytes_per_device", "kv_bytes_total_per_device", "process_bytes")
    null_block = answer["block_bytes_per_device"]
    assert answer["memory_needed_per_device"] == sum(answer[part] for part in parts) + null_block
    assert plan("smollm2", "--device", "cuda", "--memory", "8GiB")["process_bytes"] == 0


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "vocab_size": 201088,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                     "original_max_position_embeddings": 4096},
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "eos_token_id": 200002,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]},
}  # fmt: skip


def test_gpt_oss_is_planned_from_its_configuration(plan: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    answer = plan(tmp_path, "--context", 8192)
    assert answer["parameters"] == pytest.approx(20.9e9, rel=0.01)
    assert answer["kv_bytes_per_token"] == 24 * 8 * 64 * 2 * 2
    assert answer["sliding_window"]["windows"] == [128]
    assert any("--weights mxfp4" in note for note in answer["notes"])


@pytest.mark.slow
def test_well_known_models_of_every_kind_have_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {(*row["architectures"], row.get("sliding_window")): name for name, row in KNOWN_MODELS.items()}
    for name in kinds.values():
        assert main(["plan", name, "--memory", "48GiB", "--context", "1024"]) == 0
    assert main(["plan", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-len(KNOWN_MODELS) :] == list(KNOWN_MODELS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["llama-3.1-8b", "--memory", "80"], "memory is 80 bytes; if you mean gigabytes, write 80GiB"),
        (["llma-3.1-70b"], "did you mean llama-3.1-70b"),
        (["llama-2-7b", "--context", "5000"], "a context of 5000 tokens is over max_model_len, which is 4096"),
        (["llama-2-7b", "--max-model-len", "5000"], "max_model_len is 5000, but llama-2-7b supports at most 4096"),
        (["qwen2.5-7b", "--tensor-parallel-size", "29"], "has 28 heads, so 29 devices cannot share it"),
        (["deepseek-r1", "--device", "cpu", "--tensor-parallel-size", "2"], "caches latents that all heads share"),
        (
            ["qwen3-30b-a3b", "--device", "cpu", "--tensor-parallel-size", "32"],
            "has the experts' intermediate_size 768",
        ),
        (["llama-2-7b", "--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["llama-2-7b", "--block-size", "0"], "block_size must be at least 1, got 0"),
        (["llama-2-7b", "--memory", "lots"], "cannot read 'lots' as a number of bytes"),
        (["llama-2-7b", "--kv-cache-dtype", "int3"], "kv_cache_dtype must be one of auto, bfloat16"),
        (
            ["llama-2-7b", "--gpu-memory-utilization", "2"],
            "must be above 0 and at most 1, got 2",
        ),
        (["a", "--model", "b"], "two models were given: a and --model b"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_numbers(
    refusal: Callable[..., str], argv: list[str], message: str
) -> None:
    assert message in refusal(*argv)


@pytest.mark.slow
def test_a_plan_needs_no_torch() -> None:
    code = "import sys; from octavo.cli import main; main(['plan', 'llama-2-7b']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_on_a_cpu_a_swap_space_asked_for_is_part_of_the_memory_needed(
    plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("llama-3.1-8b", "--device", "cpu", "--context", 4096, "--concurrency", 4)
    none, some = (plan(*options, "--swap-space", size) for size in ("0", "4GiB"))
    assert (none["swap_bytes"], some["swap_bytes"]) == (0, 4 * 2**30)
    assert some["memory_needed_per_device"] - none["memory_needed_per_device"] == 4 * 2**30
    default = plan(*options)
    assert default["swap_bytes"] == 2**30, "taken where it is left, needed nowhere"
    assert default["memory_needed_per_device"] == none["memory_needed_per_device"]
    tight = plan(*options, "--memory", "20GiB", "--kv-cache-memory", "4GiB")
    assert 0 < tight["swap_bytes"] < 2**30
    main(["plan", "llama-3.1-8b", "--device", "cpu", "--swap-space", "4GiB"])
    assert "swap space   4.00 GiB" in capsys.readouterr().out


def test_beside_a_gpu_the_swap_space_is_the_hosts(plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    none, some = (plan("llama-3.1-8b", "--device", "cuda", "--swap-space", size) for size in ("0", "4GiB"))
    assert none["memory_needed_per_device"] == some["memory_needed_per_device"]
    main(["plan", "llama-3.1-8b", "--device", "cuda"])
    assert "1.00 GiB, in the host's memory" in capsys.readouterr().out


def test_prefixes_in_host_memory_are_part_of_the_plan(
    plan: Callable[..., Any], capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    options = ("llama-3.1-8b", "--context", 4096, "--concurrency", 4)
    for device, needed in (("cpu", 8 * 2**30), ("cuda", 0)):
        none, some = (plan(*options, "--device", device, "--kv-host-memory", size) for size in ("0", "8GiB"))
        assert (none["host_prefix_slots"], some["host_prefix_bytes"]) == (0, 8 * 2**30)
        assert 0.99 < some["host_prefix_slots"] * some["block_bytes_per_device"] / 2**33 < 1
        assert some["memory_needed_per_device"] - none["memory_needed_per_device"] == needed
    main(["plan", "llama-3.1-8b", "--device", "cuda", "--kv-host-memory", "8GiB"])
    slots = some["host_prefix_slots"]
    assert f"8.00 GiB, {slots:,} blocks, {16 * slots:,} tokens, in the host's memory" in (capsys.readouterr().out)
    assert "a block and its bookkeeping take" in refusal("llama-3.1-8b", "--kv-host-memory", "10")


def test_a_swap_space_that_is_no_size_is_refused(refusal: Callable[..., str]) -> None:
    assert "cannot read '-1' as a number of bytes" in refusal("llama-3.1-8b", "--swap-space=-1")


def test_a_disk_and_redis_are_planned_with_the_memory_that_they_take(plan: Callable[..., Any]) -> None:
    machine = ("smollm2", "--device", "cpu", "--memory", "16GiB", "--concurrency", 1)
    none, disk = plan(*machine), plan(*machine, "--kv-disk-size", "20GiB")
    remote = plan(*machine, "--kv-remote", "redis://here", "--kv-host-memory", "1GiB")
    assert (none["store_bytes"], none["host_prefix_bytes"]) == (0, 0)
    assert 0 < disk["store_bytes"] < 64 << 20
    assert (disk["host_prefix_bytes"], remote["host_prefix_bytes"]) == (256 << 20, 1 << 30)
    for some in (disk, remote):
        more = some["memory_needed_per_device"] - none["memory_needed_per_device"]
        assert more == some["host_prefix_bytes"] + some["store_bytes"]
