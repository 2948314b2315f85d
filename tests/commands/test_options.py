from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.commands.options import (
    add_options,
    add_sampling_options,
    engine_argv,
    given_options,
)
from octavo.config import MOST_THREADS, EngineConfig
from octavo.errors import ConfigError
from octavo.option import Options, flag, options_of
from octavo.request_limits import RequestLimits
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.structured_outputs import StructuredOutputsParams


def engine_parser(**keywords: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_options(parser, EngineConfig, **keywords)
    return parser


def sampling(*argv: str) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_sampling_options(parser)
    return given_options(parser.parse_args(argv), SamplingParams)


counts = st.integers(1, 10**6)
optional_counts = st.none() | counts
ENGINE_CONFIGS = st.builds(
    EngineConfig,
    # argparse drops a value that is "--" alone, even after "="; no model is called that.
    model=st.text("abc/-. 1", min_size=1).filter(lambda name: name != "--"),
    dtype=st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    max_model_len=optional_counts,
    max_num_seqs=counts,
    max_num_batched_tokens=counts,
    block_size=counts | st.just("max"),
    kv_cache_memory=st.none() | counts | st.sampled_from(["2GiB", "1.5G", "300 MB"]),
    num_blocks=st.none() | st.integers(2, 10**6),
    gpu_memory_utilization=st.floats(0.01, 1.0),
    kv_cache_dtype=st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
    enable_prefix_caching=st.booleans(),
    attention_backend=st.sampled_from(["auto", "native", "reference"]),
    deterministic=st.booleans(),
    num_threads=st.none() | st.integers(1, MOST_THREADS),
    seed=st.integers(-(2**31), 2**31),
    limits=st.builds(RequestLimits, max_n=counts, max_tools=counts),
)


@pytest.mark.slow
@given(ENGINE_CONFIGS)
def test_any_engine_config_survives_the_way_over_the_command_line(config: EngineConfig) -> None:
    argv = engine_argv(asdict(config))
    assert EngineConfig.from_options(given_options(engine_parser().parse_args(argv), EngineConfig)) == config


CONFIGS = [EngineConfig, ServerConfig]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_option_is_in_a_group_and_an_untouched_command_line_gives_the_defaults(config: type[Options]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, config)
    assert all(option.group for option in options_of(config).values())
    assert config(**given_options(parser.parse_args([]), config)) == config()


def test_every_sampling_field_has_a_flag_and_the_defaults_are_its_own() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    assert all(flag(option.name) in parser.format_help() for option in fields(SamplingParams))
    assert sampling() == {}


def test_sampling_flags_of_each_kind_are_read() -> None:
    argv = ["--temperature", "0", "--stop", "a", "--stop", "b c", "--stop-token-ids", "1,2", "--ignore-eos"]
    argv += ["--logit-bias", '{"7": -100}', "--presence-penalty", "-1.5", "--seed", "3"]
    argv += ["--structured-outputs", '{"choice": ["a", "b"]}']
    params = SamplingParams(**sampling(*argv))
    assert params == SamplingParams(
        temperature=0.0,
        stop=["a", "b c"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias={7: -100.0},
        presence_penalty=-1.5,
        seed=3,
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--stop-token-ids", "1;2"],
        ["--logit-bias", "[1]"],
        ["--logit-bias", "{"],
        ["--structured-outputs", "{"],
        ["--structured-outputs", '{"choices": ["a"]}'],
    ],
)
def test_a_sampling_value_that_cannot_be_read_is_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        sampling(*argv)
    assert leaving.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_a_false_default_has_a_flag_that_says_no() -> None:
    parser = engine_parser()
    assert given_options(parser.parse_args(["--no-enable-prefix-caching"]), EngineConfig) == {
        "enable_prefix_caching": False
    }


@pytest.mark.parametrize(
    "argv", [["--block-size", "min"], ["--dtype", "int3"], ["--max-num-seqs", "many"], ["--max-num-seq", "3"]]
)
def test_a_bad_value_or_an_abbreviation_is_refused(argv: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        engine_parser().parse_args(argv)


def test_the_model_may_stand_alone() -> None:
    assert given_options(engine_parser(positional_model=True).parse_args(["m.gguf"]), EngineConfig) == {
        "model": "m.gguf"
    }
    assert given_options(engine_parser(positional_model=True).parse_args([]), EngineConfig) == {}


def test_two_models_are_refused_rather_than_one_of_them_ignored() -> None:
    with pytest.raises(ConfigError, match=r"a\.gguf.*b\.gguf"):
        given_options(engine_parser(positional_model=True).parse_args(["a.gguf", "--model", "b.gguf"]), EngineConfig)


@pytest.mark.parametrize("config", CONFIGS)
def test_help_shows_each_default_that_has_a_value(config: type[Options]) -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=400))
    add_options(parser, config)
    help = parser.format_help()
    for option in options_of(config).values():
        if type(option.default) in (int, float):
            assert f"(default: {option.default})" in help
