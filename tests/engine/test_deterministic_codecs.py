"""`deterministic` over coded caches: the same tokens alone, in a batch in chunks, and from the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams, kernels
from tests.models.tiny import write_hf_model

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")

PROMPTS: list[Any] = [{"prompt_token_ids": [(7 * i + j * j) % 300 + 5 for j in range(20 + 23 * i)]} for i in range(4)]
PARAMS = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9 * (i % 2), seed=i) for i in range(4)]


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "fp8_e5m2", "k8v4", "int4"])
def test_tokens_do_not_depend_on_how_they_were_computed(tmp_path: Path, codec: str) -> None:
    write_hf_model(tmp_path, "Llama", hidden_size=128, head_dim=32)

    def make(**options: Any) -> LLM:
        return LLM(str(tmp_path), deterministic=True, kv_cache_dtype=codec, num_blocks=64, num_threads=1, **options)

    with make(enable_prefix_caching=False) as llm:
        alone = [
            llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
    with make(max_num_batched_tokens=17, max_num_seqs=4) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == alone
        assert llm.core.stats.prefix_cache_hits > 0
        llm.core.scheduler.kv.audit()
