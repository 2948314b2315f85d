"""With every codec of the KV cache or table of codecs, a request gives the same tokens however it was computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS
from octavo.planner.deployment import Deployment
from octavo.planner.plan_options import PlanOptions
from octavo.planner.report import report_of
from octavo.planner.sources import find_shape
from octavo.request import sibling_seed
from octavo.sampling_params import SamplingParams
from octavo.storage.arena import KVArena
from tests.conftest import MakeLLM
from tests.engine.preempting import thrash

RECENT = {f"recent {codec}": codec for codec in ("int4", "k8v4", "nvfp4")}
TABLES = {
    "fused": 'keys = ["int8", "int4"]\nvalues = "int4"',
    "odd": 'keys = ["int8", "int4"]\nvalues = ["int4", "int8"]',
    "floats": 'keys = ["auto", "int8"]\nvalues = ["auto", "int8"]',
    "calibrated": 'keys = ["fp8", "auto"]\nvalues = ["int4", "nvfp4"]',
}
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


@pytest.fixture(params=[*CODED, *TABLES, *RECENT])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A `kv_cache_dtype`: a codec, a table of them, or a table whose latest blocks are in int8."""
    name: str = request.param
    if name in RECENT:
        return recent_table(tmp_path, RECENT[name])
    if name not in TABLES:
        return name
    (path := tmp_path / f"{name}.toml").write_text(TABLES[name])
    return str(path)


def test_recent_blocks_in_int8_give_other_tokens(make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path) -> None:
    for codec in RECENT.values():
        coded = tokens(make_llm(tiny_llama, kv_cache_dtype=codec, block_size=4))
        assert tokens(make_llm(tiny_llama, kv_cache_dtype=recent_table(tmp_path, codec), block_size=4)) != coded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "model"),
    # Codecs of a model without windows, and recent blocks, are in test_restored_tokens.py.
    [*((name, "tiny_mistral") for name in (*CODED, *TABLES, *RECENT)), *((name, "tiny_llama") for name in TABLES)],
    indirect=["stored"],
)
def test_the_cache_the_chunks_and_preemption_change_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, stored: str, model: str
) -> None:
    folder: Path = request.getfixturevalue(model)
    # How much is recent depends on the size of a block; nothing else does.
    is_recent = request.node.callspec.params["stored"] in RECENT
    size = 4 if is_recent else 16
    expected = tokens(make_llm(folder, kv_cache_dtype=stored, enable_prefix_caching=False, block_size=size))
    small: dict[str, Any] = {"kv_cache_dtype": stored, "block_size": 4, "max_num_batched_tokens": 24}
    warm = make_llm(folder, **small)
    assert tokens(warm) == expected
    again = warm.generate(workload(), SamplingParams(max_tokens=1), use_tqdm=False)
    assert all(out.num_cached_tokens for out in again)
    assert tokens(warm) == expected
    for mode in ("swap", "recompute") if not is_recent else ():  # those are preempted in test_restored_tokens.py
        blocks = {"tiny_llama": 18, "tiny_mistral": 12}[model]
        tight = make_llm(folder, preemption_mode=mode, num_blocks=blocks, swap_space="1MiB", **small)
        thrash(tight.core)
        assert tokens(tight) == expected


@pytest.mark.slow
def test_samples_and_beams_copy_a_shared_block_before_they_write(
    make_llm: MakeLLM, request: pytest.FixtureRequest, tiny_llama: Path, stored: str
) -> None:
    size = 4 if request.node.callspec.params["stored"] in RECENT else 16
    llm = make_llm(tiny_llama, kv_cache_dtype=stored, block_size=size)
    together = tokens(llm, n=3, temperature=1.0, seed=70)
    for i in range(3):
        assert [few[i] for few in together] == [
            one[0] for one in tokens(llm, temperature=1.0, seed=sibling_seed(70, i))
        ]
    uncached = make_llm(tiny_llama, kv_cache_dtype=stored, enable_prefix_caching=False, block_size=4)
    params = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8)
    cached, fresh = (
        [o.outputs[0].token_ids for o in engine.generate(workload(), params, use_tqdm=False)]
        for engine in (llm, uncached)
    )
    assert cached == fresh


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


def test_blocks_of_one_table_are_never_found_by_another(make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path) -> None:
    roots = {}
    for name, text in {**TABLES, "uniform": 'keys = "int8"\nvalues = "int4"'}.items():
        (path := tmp_path / f"{name}.toml").write_text(text)
        core = make_llm(tiny_llama, kv_cache_dtype=str(path)).core
        roots[name] = bytes(core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys)
        assert core.kv_report()["block_bytes"] == core.runner.arena.spec.block_bytes
    assert len(set(roots.values())) == len(roots)
    # A table that says one thing of all layers is that codec, and shares its blocks.
    core = make_llm(tiny_llama, kv_cache_dtype="k8v4").core
    assert bytes(core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys) == roots["uniform"]


def test_a_table_for_another_model_is_refused_before_the_model_is_read(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path
) -> None:
    (path := tmp_path / "table.toml").write_text('keys = ["int8", "int8", "int8"]\nvalues = "int4"')
    with pytest.raises(ConfigError, match="of 3 layers, the model has 2 layers"):
        make_llm(tiny_llama, kv_cache_dtype=str(path))


def _ones(layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = layer.gather(torch.tensor([0]), tokens)
    return torch.ones_like(key), torch.ones_like(value)
