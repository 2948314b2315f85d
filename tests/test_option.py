"""Options hold values of their declared types, whoever gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deterministic", "false", "deterministic must be true or false, got 'false'"),
        ("enable_prefix_caching", 0, "enable_prefix_caching must be true or false, got 0"),
        ("num_blocks", "100", "num_blocks must be an integer, got '100'"),
        ("num_blocks", 99.5, "num_blocks must be an integer, got 99.5"),
        ("max_num_seqs", True, "max_num_seqs must be an integer, got True"),
        ("gpu_memory_utilization", "0.9", "gpu_memory_utilization must be a number, got '0.9'"),
        ("pin_budget", None, "pin_budget must be a number, got None"),
        ("kv_cache_memory", 1.5, "kv_cache_memory must be a number of bytes, such as 2GiB, got 1.5"),
        ("block_size", "most", "block_size must be an integer or max, got 'most'"),
        ("eviction_policy", True, "eviction_policy must be one of lru, fifo"),
        ("eviction_policy", "lfu", "eviction_policy: 'lfu' was removed; use 'adaptive'"),
        ("dtype", ["auto"], "dtype must be one of auto, bfloat16"),
        ("model", 5, "model must be a string, got 5"),
        ("limits", {"max_n": 2.0}, "limits: max_n must be an integer, got 2.0"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(name: str, value: object, message: str) -> None:
    options: dict[str, Any] = {"model": "m", name: value}
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**options)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", Path("m")),
        ("max_num_seqs", np.int64(4)),
        ("pin_budget", np.float32(0.5)),
        ("pin_budget", 1),
        ("itl_slo_ms", 50),
        ("kv_cache_memory", "2GiB"),
        ("block_size", "max"),
        ("async_scheduling", None),
    ],
)
def test_values_that_stand_for_the_type_are_taken(name: str, value: object) -> None:
    options: dict[str, Any] = {"model": "m", name: value}
    kept = getattr(EngineConfig(**options), name)
    assert type(kept).__module__ != "numpy"
    assert type(kept) is float or name not in ("pin_budget", "itl_slo_ms")


def test_lists_and_numbers_of_parameters_are_pythons_own() -> None:
    given: Any = {"n": np.int64(2), "temperature": np.float32(0.5), "stop_token_ids": range(3), "seed": np.int64(7)}
    params = SamplingParams(**given)
    assert [type(value) for value in (params.n, params.temperature, params.seed)] == [int, float, int]
    assert params.stop_token_ids == frozenset({0, 1, 2})
