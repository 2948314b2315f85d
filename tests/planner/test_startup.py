import logging
import re
import shlex

import pytest
import torch

from octavo.cli import build_parser
from octavo.commands.options import engine_options
from octavo.config import EngineConfig, format_bytes, parse_bytes
from octavo.engine.builder import build_engine
from octavo.errors import ConfigError
from octavo.planner.machine import CPU_MEMORY_SHARE, MEMORY_LIMIT_VARIABLE, limited_memory
from octavo.planner.sources import find_shape
from octavo.planner.startup import StartSizing, serve_command
from octavo.sampling_params import SamplingParams
from tests.models.tiny import write_hf_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a model")  # a name that the shell must not cut in two
    write_hf_model(folder, "Llama", tokenizer=True, vocab_size=4000)
    return str(folder)


def sizing(available: int, model: str = "llama-3.1-8b", cache_share: float = 1.0, **options) -> StartSizing:
    config = EngineConfig(model=model, **options)
    return StartSizing(
        config=config,
        shape=find_shape(model),
        dtype=config.dtype if config.dtype != "auto" else "bfloat16",
        kv_dtype=config.dtype if config.dtype != "auto" else "bfloat16",
        available=available,
        cache_share=cache_share,
        tied_head_copied=False,
    )


def suggested_config(error: ConfigError) -> EngineConfig:
    """What the command in an error's message says, read by the command line's own parser."""
    command = re.search(r"This would start: (octavo serve .*)", str(error))
    assert command, str(error)
    program, *argv = shlex.split(command[1])
    assert program == "octavo"
    return EngineConfig.from_options(engine_options(build_parser().parse_args(argv)))


def generate_a_token(config: EngineConfig) -> None:
    engine = build_engine(config)
    request = engine.make_request([1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0))
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert request.sequences[0].num_output_tokens == 1
    engine.close()


def test_the_error_itemises_what_does_not_fit():
    with pytest.raises(ConfigError) as caught:
        sizing(15 * 2**30).pool()
    message = str(caught.value)
    needed, available = re.match(r"llama-3.1-8b needs (.*?), but (.*?) are available", message).groups()
    items = [
        parse_bytes(size) for size in re.findall(r"(?:weights|activations|KV cache at least) ([\d.]+ [KMG]iB)", message)
    ]
    assert available == "15.00 GiB"
    assert items[0] == pytest.approx(16_060_522_496, rel=0.01)
    assert parse_bytes(needed) == pytest.approx(sum(items), rel=0.01)


@pytest.mark.parametrize("gibibytes", [15.0, 15.1, 15.2, 15.5])
@pytest.mark.parametrize("options", [{}, {"block_size": "max"}, {"kv_cache_memory": "20GiB"}, {"num_blocks": 10_000}])
def test_what_is_suggested_fits_and_holds_a_sequence_of_its_full_length(gibibytes, options):
    with pytest.raises(ConfigError) as caught:
        sizing(int(gibibytes * 2**30), **options).pool()
    config = suggested_config(caught.value)
    smaller = sizing(int(gibibytes * 2**30), **{n: getattr(config, n) for n in EngineConfig.__dataclass_fields__})
    pool = smaller.pool()
    assert pool.usable_blocks >= smaller.spec.peak_blocks(smaller.max_model_len, config.max_num_batched_tokens)
    assert smaller.budget.weights + smaller.budget.activations + pool.num_bytes <= int(gibibytes * 2**30)


def test_weights_that_fit_no_way_get_no_command():
    with pytest.raises(ConfigError, match=r"weights 14\.96 GiB.*No smaller length or batch.*octavo plan llama-3.1-8b"):
        sizing(10 * 2**30).pool()


def test_an_engine_that_is_refused_names_a_command_that_starts(tiny_model, monkeypatch):
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "4MiB")
    with pytest.raises(ConfigError, match=r"4\.00 MiB are available") as caught:
        build_engine(EngineConfig(model=tiny_model, device="cpu"))
    config = suggested_config(caught.value)
    assert config.model == tiny_model
    assert config != EngineConfig(model=tiny_model)
    generate_a_token(config)


def test_a_model_is_refused_before_its_weights_are_read(tiny_model, monkeypatch):
    monkeypatch.setattr("octavo.engine.builder.open_weights", lambda *args: pytest.fail("the weights were opened"))
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "1MiB")
    with pytest.raises(ConfigError, match=r"1\.00 MiB are available"):
        build_engine(EngineConfig(model=tiny_model, device="cpu"))


def test_a_model_that_only_its_loader_can_count_is_sized_once_it_is_loaded(tmp_path, monkeypatch):
    model = write_hf_model(tmp_path, "Phi", tokenizer=True)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config = EngineConfig(model=str(tmp_path), device="cpu", max_num_batched_tokens=16, max_num_seqs=1)
    engine = build_engine(config)
    weights = engine.runner.model.weight_bytes
    engine.close()
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, str(weights))
    with pytest.raises(ConfigError, match=f"weights {re.escape(format_bytes(weights))}"):
        build_engine(config)


def test_what_is_planned_is_what_is_allocated(tiny_model, monkeypatch):
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "64MiB")
    options = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 64, "max_num_seqs": 8}
    engine = build_engine(EngineConfig(model=tiny_model, **options))
    predicted = sizing(64 * 2**20, tiny_model, CPU_MEMORY_SHARE, **options)
    assert engine.runner.arena.nbytes == predicted.pool().num_bytes
    assert engine.runner.model.weight_bytes == predicted.budget.weights
    engine.close()


def test_a_pool_too_short_for_max_model_len_starts_with_a_warning(tiny_model, caplog):
    with caplog.at_level(logging.WARNING, "octavo"):
        generate_a_token(EngineConfig(model=tiny_model, device="cpu", num_blocks=4, block_size=16))
    assert "holds a sequence of at most 48 tokens, not of max_model_len (256)" in caplog.text
    assert "--max-model-len 48" in caplog.text


def test_a_cache_too_small_for_a_token_is_refused_with_what_it_needs(tiny_model):
    with pytest.raises(ConfigError, match="at least 2 are needed: raise kv_cache_memory"):
        build_engine(EngineConfig(model=tiny_model, device="cpu", kv_cache_memory=1000))


def test_max_model_len_over_the_models_own_is_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"max_model_len is 300, but .* was made for 256 tokens"):
        build_engine(EngineConfig(model=tiny_model, device="cpu", max_model_len=300))


def test_a_cpus_cache_takes_its_share_of_what_the_weights_leave_and_more_only_where_it_must():
    weights = 16_060_522_496
    share = sizing(weights + 10 * 2**30, cache_share=0.4)
    assert share.budget.for_cache == 4 * 2**30
    tight = sizing(weights + 4 * 2**20 + sizing(0).budget.activations, cache_share=0.0)
    assert tight.pool().num_blocks == 2


def test_a_command_leaves_defaults_unsaid_and_quotes_the_rest():
    config = EngineConfig(model="my model", max_num_seqs=4, enable_prefix_caching=False, kv_cache_dtype="float32")
    assert serve_command(config) == (
        "octavo serve 'my model' --max-num-seqs 4 --kv-cache-dtype float32 --no-enable-prefix-caching"
    )


def test_the_memory_limit_is_a_ceiling_and_no_more(monkeypatch):
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "1KiB")
    assert [limited_memory(500), limited_memory(5000)] == [500, 1024]
    monkeypatch.setenv(MEMORY_LIMIT_VARIABLE, "much")
    with pytest.raises(ConfigError, match="cannot read 'much'"):
        limited_memory(500)
