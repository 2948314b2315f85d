"""The options: what they offer is what there is."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, get_args, get_type_hints

import pytest

from octavo import kernels
from octavo.attention import BACKENDS
from octavo.config import KV_CACHE_ALIASES, KV_CACHE_DTYPES, MOST_THREADS, EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.kvcache.formats import KV_FORMATS
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.planner.calculator import DTYPE_BYTES
from octavo.storage.codec import CODECS
from octavo.units import parse_count

SPEC = KVCacheSpec.build((LayerKVSpec(1, 8, 8),), 16, "float32")


def choices(option: str) -> tuple[Any, ...]:
    return get_args(get_type_hints(EngineConfig)[option])


@pytest.mark.parametrize(
    ("option", "offered"),
    [
        ("eviction_policy", tuple(EVICTION_POLICIES)),
        ("attention_backend", BACKENDS),
    ],
)
def test_an_option_offers_exactly_the_policies_there_are(option: str, offered: tuple[str, ...]) -> None:
    assert choices(option) == offered


def test_the_dtypes_offered_are_those_whose_weights_have_a_size() -> None:
    # vLLM's other names for two of them.
    assert set(choices("dtype")) - {"half", "float"} == {"auto", *DTYPE_BYTES}


def test_the_kv_cache_dtypes_offered_are_the_codecs_and_their_other_names() -> None:
    assert set(KV_CACHE_DTYPES) == {"auto", *KV_FORMATS, *KV_CACHE_ALIASES}
    assert tuple(CODECS) == tuple(KV_FORMATS)
    assert EngineConfig(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("count", [0, -1, MOST_THREADS + 1])
def test_a_number_of_threads_that_the_kernels_refuse_is_an_error_of_the_option(count: int) -> None:
    with pytest.raises(ConfigError, match=f"num_threads must be between 1 and 1024, got {count}"):
        EngineConfig(num_threads=count)
    if kernels.available():
        with pytest.raises(ValueError, match=f"num_threads must be between 1 and 1024, got {count}"):
            kernels.set_num_threads(count)


def test_an_option_that_was_removed_is_refused_with_what_there_is_instead() -> None:
    with pytest.raises(ConfigError, match="unknown option 'preemption_victim'; it was removed: the last running"):
        EngineConfig.from_options({"preemption_victim": "latest"})
    with pytest.raises(ConfigError, match="scheduling_policy: 'dlpm' was removed; use 'vtc'"):
        EngineConfig(scheduling_policy="dlpm")  # type: ignore[arg-type]


def test_the_package_is_marked_as_typed() -> None:
    """The marker is shipped with everything else under src/octavo."""
    assert files("octavo").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("given", "swap_space"),
    [(4, 4 * 2**30), ("4", 4 * 2**30), ("0.5", 2**29), ("1023", 1023 * 2**30), (4096, 4096), ("2MiB", 2**21), (0, 0)],
)
def test_a_bare_swap_space_is_gib_as_in_vllm(given: int | str, swap_space: int) -> None:
    config = EngineConfig.from_options({"swap_space": given})
    assert config.swap_space == swap_space
    assert config.replace(seed=1).swap_space == swap_space


def test_dtypes_have_vllms_other_names() -> None:
    assert EngineConfig(dtype="half").dtype == "float16"
    assert EngineConfig(dtype="float").dtype == "float32"


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("1m", 10**6), ("-1", -1)]
)
def test_counts_may_be_written_as_in_vllm(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["4kb", "k", "", "4.0", "1.0001k"])
def test_a_value_that_is_not_a_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_count(text)
