"""With every codec of the KV cache, the same request gives the same tokens whichever way it was computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kvcache.formats import KV_FORMATS
from octavo.planner.deployment import Deployment
from octavo.planner.plan_options import PlanOptions
from octavo.planner.report import report_of
from octavo.planner.sources import find_shape
from octavo.request import sibling_seed
from octavo.sampling_params import SamplingParams
from octavo.storage.arena import KVArena
from tests.conftest import MakeLLM

CODED = tuple(name for name, format in KV_FORMATS.items() if not format.plain)


def workload() -> list[dict[str, Any]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(36)]
    return [{"prompt_token_ids": shared[:length] + [rng.randrange(3, 320) for _ in range(5)]} for length in (4, 20, 36)]


def tokens(llm: Any, **how: Any) -> list[list[list[int]]]:
    params = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "temperature": 0.0, **how})
    return [[o.token_ids for o in out.outputs] for out in llm.generate(workload(), params, use_tqdm=False)]


def recent_table(folder: Path, codec: str, sinks: int = 1, recent: int = 2) -> str:
    """Write a table whose layers keep their first and most recent blocks in int8."""
    path = folder / f"{codec}-{sinks}-{recent}.toml"
    keys, values = ("int8", "int4") if codec == "k8v4" else (codec, codec)
    path.write_text(f'keys = "{keys}"\nvalues = "{values}"\nsink_blocks = {sinks}\nrecent_blocks = {recent}\n')
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
@pytest.mark.parametrize("codec", ["int4", "k8v4", "nvfp4"])
def test_recent_blocks_in_int8_are_read_alike_cold_warm_and_in_chunks(
    make_llm: MakeLLM, request: pytest.FixtureRequest, tmp_path: Path, codec: str, model: str
) -> None:
    folder: Path = request.getfixturevalue(model)
    how: dict[str, Any] = {"kv_cache_dtype": recent_table(tmp_path, codec), "block_size": 4}
    expected = tokens(make_llm(folder, **how, enable_prefix_caching=False))
    assert expected != tokens(make_llm(folder, kv_cache_dtype=codec, block_size=4))
    warm = make_llm(folder, **how, max_num_batched_tokens=24)
    assert tokens(warm) == expected
    again = warm.generate(workload(), SamplingParams(max_tokens=1), use_tqdm=False)
    assert all(out.num_cached_tokens for out in again)
    assert tokens(warm) == expected
    together = tokens(warm, n=3, temperature=1.0, seed=70)
    for i in range(3):
        assert [few[i] for few in together] == [
            one[0] for one in tokens(warm, temperature=1.0, seed=sibling_seed(70, i))
        ]
    uncached = make_llm(folder, **how, enable_prefix_caching=False)
    cached, fresh = ([o.outputs[0].token_ids for o in _beams(engine)] for engine in (warm, uncached))
    assert cached == fresh


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
@pytest.mark.parametrize("codec", CODED)
def test_the_cache_and_the_chunks_change_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, codec: str, model: str
) -> None:
    folder: Path = request.getfixturevalue(model)
    cold = make_llm(folder, kv_cache_dtype=codec, enable_prefix_caching=False)
    expected = tokens(cold)
    small: dict[str, Any] = {"kv_cache_dtype": codec, "block_size": 4, "max_num_batched_tokens": 24}
    warm = make_llm(folder, **small)
    assert tokens(warm) == expected
    again = warm.generate(workload(), SamplingParams(max_tokens=1), use_tqdm=False)
    assert all(out.num_cached_tokens for out in again)
    assert tokens(warm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODED)
def test_samples_and_beams_copy_a_shared_block_before_they_write(
    make_llm: MakeLLM, tiny_llama: Path, codec: str
) -> None:
    llm = make_llm(tiny_llama, kv_cache_dtype=codec)
    together = tokens(llm, n=3, temperature=1.0, seed=70)
    for i in range(3):
        assert [few[i] for few in together] == [
            one[0] for one in tokens(llm, temperature=1.0, seed=sibling_seed(70, i))
        ]
    uncached = make_llm(tiny_llama, kv_cache_dtype=codec, enable_prefix_caching=False, block_size=4)
    (cached, fresh) = ([o.outputs[0].token_ids for o in _beams(engine)] for engine in (llm, uncached))
    assert cached == fresh


def _beams(llm: Any) -> Any:
    return llm.generate(
        workload(), SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8), use_tqdm=False
    )


def test_blocks_of_one_codec_are_never_found_by_another(make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path) -> None:
    keys = set()
    tables = [recent_table(tmp_path, "int4", sinks, recent) for sinks, recent in ((0, 1), (1, 1), (0, 2))]
    for codec in ("float32", *CODED, *tables):
        core = make_llm(tiny_llama, kv_cache_dtype=codec).core
        keys.add(bytes(core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys))
        assert core.kv_report()["block_bytes"] == core.runner.arena.spec.block_bytes
    assert len(keys) == 1 + len(CODED) + len(tables)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
def test_the_plan_and_the_ledger_count_the_bytes_that_are_there(
    make_llm: MakeLLM, request: pytest.FixtureRequest, tmp_path: Path, model: str
) -> None:
    folder: Path = request.getfixturevalue(model)
    (table := tmp_path / "table.toml").write_text('keys = ["int8", "auto"]\nvalues = ["int4", "nvfp4"]')
    for codec in (*CODED, str(table), recent_table(tmp_path, "int4"), recent_table(tmp_path, "k8v4")):
        core = make_llm(folder, kv_cache_dtype=codec, num_blocks=9, max_model_len=64).core
        options = PlanOptions(kv_cache_dtype=codec, dtype="float32", max_model_len=64)
        arena, planned = core.runner.arena, Deployment(find_shape(str(folder)), options)
        assert planned.spec == arena.spec
        assert arena.nbytes == 9 * report_of(planned)["block_bytes_per_device"]
        report = core.kv_report()
        assert report["block_bytes"] * (report["num_blocks"] + 1) == arena.nbytes
        fresh = KVArena(arena.spec, 3)
        for layer in (part for stored in fresh.layers for part in stored.parts):  # inside the block that its slot is in
            layer.write(*_ones(layer, 1), torch.tensor([layer.block_size]))
        assert fresh.read_blocks([1]).any()
        assert not fresh.read_blocks([0, 2]).any()


def _ones(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = layer.gather(torch.tensor([0]), tokens)
    return torch.ones_like(key), torch.ones_like(value)
