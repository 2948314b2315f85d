"""Layers in codecs of their own: what holds with one codec holds with a table of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams, kernels
from octavo.attention.native import NativeAttention
from octavo.errors import ConfigError
from octavo.request import sibling_seed
from octavo.runner.runner import ModelRunner
from tests.conftest import MakeLLM
from tests.engine.preempting import thrash
from tests.engine.test_codecs import tokens, workload
from tests.models.tiny import write_hf_model

TABLES = {
    "fused": 'keys = ["int8", "int4"]\nvalues = "int4"',
    "odd": 'keys = ["int8", "int4"]\nvalues = ["int4", "int8"]',
    "floats": 'keys = ["auto", "int8"]\nvalues = ["auto", "int8"]',
    "calibrated": 'keys = ["fp8", "auto"]\nvalues = ["int4", "nvfp4"]',
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / f"{request.param}.toml"
    path.write_text(TABLES[request.param])
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
def test_the_cache_the_chunks_and_preemption_change_no_token(
    make_llm: MakeLLM, request: pytest.FixtureRequest, table: str, model: str
) -> None:
    folder: Path = request.getfixturevalue(model)
    expected = tokens(make_llm(folder, kv_cache_dtype=table, enable_prefix_caching=False))
    small: dict[str, Any] = {"kv_cache_dtype": table, "block_size": 4, "max_num_batched_tokens": 24}
    warm = make_llm(folder, **small)
    assert tokens(warm) == expected
    again = warm.generate(workload(), SamplingParams(max_tokens=1), use_tqdm=False)
    assert all(out.num_cached_tokens for out in again)
    for mode in ("swap", "recompute"):
        blocks = {"tiny_llama": 18, "tiny_mistral": 12}[model]
        tight = make_llm(folder, preemption_mode=mode, num_blocks=blocks, swap_space="1MiB", **small)
        thrash(tight.core)
        assert tokens(tight) == expected


@pytest.mark.slow
def test_samples_and_beams_copy_a_shared_block_before_they_write(
    make_llm: MakeLLM, tiny_llama: Path, table: str
) -> None:
    llm = make_llm(tiny_llama, kv_cache_dtype=table)
    together = tokens(llm, n=3, temperature=1.0, seed=70)
    for i in range(3):
        assert [few[i] for few in together] == [
            one[0] for one in tokens(llm, temperature=1.0, seed=sibling_seed(70, i))
        ]
    uncached = make_llm(tiny_llama, kv_cache_dtype=table, enable_prefix_caching=False, block_size=4)
    params = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8)
    cached, fresh = (
        [o.outputs[0].token_ids for o in engine.generate(workload(), params, use_tqdm=False)]
        for engine in (llm, uncached)
    )
    assert cached == fresh


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


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")
def test_tokens_do_not_depend_on_how_they_were_computed_where_kernels_read_all_layers(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Llama", hidden_size=128, head_dim=32)
    (path := tmp_path / "table.toml").write_text(TABLES["fused"])
    prompts: list[Any] = [
        {"prompt_token_ids": [(7 * i + j * j) % 300 + 5 for j in range(20 + 23 * i)]} for i in range(3)
    ]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9 * (i % 2), seed=i) for i in range(3)]

    def make(**options: Any) -> LLM:
        fixed = {"deterministic": True, "kv_cache_dtype": str(path), "num_blocks": 64, "num_threads": 1}
        return LLM(str(tmp_path), **{**fixed, **options})

    with make(enable_prefix_caching=False) as llm:
        assert isinstance(llm.core.runner, ModelRunner)
        assert all(map(NativeAttention.supports, llm.core.runner.arena.layers))
        alone = [
            llm.generate(prompt, one, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, one in zip(prompts, params, strict=True)
        ]
    with make(max_num_batched_tokens=17, max_num_seqs=4) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == alone
        llm.core.scheduler.kv.audit()


def test_a_table_for_another_model_is_refused_before_the_model_is_read(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path
) -> None:
    (path := tmp_path / "table.toml").write_text('keys = ["int8", "int8", "int8"]\nvalues = "int4"')
    with pytest.raises(ConfigError, match="of 3 layers, the model has 2 layers"):
        make_llm(tiny_llama, kv_cache_dtype=str(path))
