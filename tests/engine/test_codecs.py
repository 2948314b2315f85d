"""With every codec of the KV cache, the same request gives the same tokens whichever way it was computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo.kvcache.formats import KV_FORMATS
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM
from tests.engine.preempting import thrash

CODED = tuple(name for name, format in KV_FORMATS.items() if not format.plain)


def workload() -> list[dict[str, Any]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(36)]
    return [{"prompt_token_ids": shared[:length] + [rng.randrange(3, 320) for _ in range(5)]} for length in (4, 20, 36)]


def tokens(llm: Any, **how: Any) -> list[list[list[int]]]:
    params = SamplingParams(max_tokens=10, ignore_eos=True, **{"temperature": 0.0, **how})
    return [[o.token_ids for o in out.outputs] for out in llm.generate(workload(), params, use_tqdm=False)]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
@pytest.mark.parametrize("codec", CODED)
def test_the_cache_the_chunks_and_preemption_change_no_token(
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
    for mode in ("swap", "recompute"):
        blocks = {"tiny_llama": 18, "tiny_mistral": 12}[model]
        tight = make_llm(folder, preemption_mode=mode, num_blocks=blocks, swap_space="1MiB", **small)
        thrash(tight.core)
        assert tokens(tight) == expected
        assert tight.core.scheduler.counters.num_preemptions > 0 or model == "tiny_mistral"


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int4"])
def test_samples_and_beams_copy_a_shared_block_before_they_write(
    make_llm: MakeLLM, tiny_llama: Path, codec: str
) -> None:
    llm = make_llm(tiny_llama, kv_cache_dtype=codec)
    together = tokens(llm, n=3, temperature=1.0, seed=70)
    for i in range(3):
        assert [few[i] for few in together] == [one[0] for one in tokens(llm, temperature=1.0, seed=70 + i)]
    uncached = make_llm(tiny_llama, kv_cache_dtype=codec, enable_prefix_caching=False, block_size=4)
    (cached, fresh) = ([o.outputs[0].token_ids for o in _beams(engine)] for engine in (llm, uncached))
    assert cached == fresh


def _beams(llm: Any) -> Any:
    return llm.generate(
        workload(), SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8), use_tqdm=False
    )


def test_blocks_of_one_codec_are_never_found_by_another(make_llm: MakeLLM, tiny_llama: Path) -> None:
    keys = set()
    for codec in ("float32", *CODED):
        core = make_llm(tiny_llama, kv_cache_dtype=codec).core
        keys.add(bytes(core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys))
        assert core.kv_report()["block_bytes"] == core.runner.arena.spec.block_bytes
    assert len(keys) == 1 + len(CODED)
