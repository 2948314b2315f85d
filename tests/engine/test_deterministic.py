"""`deterministic`: in bfloat16, the same tokens whichever way they were computed, for 24 prompts on the real model."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, ConfigError, SamplingParams, kernels
from tests.engine.preempting import thrash
from tests.models.tiny import write_hf_model

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")

NUM_PROMPTS = 24


def prompts() -> list[str]:
    """Ends of English paragraphs of many lengths; every fifth shares a long beginning with the one before."""
    texts = [text.strip() for _, text in sorted(pydoc_data.topics.topics.items())]
    chosen = [text[: 40 + 26 * index] for index, text in enumerate(texts[:NUM_PROMPTS])]
    for index in range(4, NUM_PROMPTS, 5):
        chosen[index] = chosen[index - 1] + " And then"
    return chosen


def params() -> list[SamplingParams]:
    """Greedy and seeded in turns; the short prompts, of which many run at once, grow by several blocks."""
    return [
        SamplingParams(
            max_tokens=24 if i < 12 else 4, ignore_eos=True, temperature=0.0 if i % 2 else 0.9, top_p=0.95, seed=i
        )
        for i in range(NUM_PROMPTS)
    ]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), params(), use_tqdm=False)]


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    """Each request by itself, on a cold cache."""
    with LLM("smollm2", deterministic=True, enable_prefix_caching=False, max_model_len=2048, num_blocks=200) as llm:
        yield [
            llm.generate(prompt, each, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, each in zip(prompts(), params(), strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 32, "num_threads": 2},
        {"max_num_seqs": 16, "max_num_batched_tokens": 77, "num_threads": 1, "block_size": 32},
    ],
    ids=["in a batch of 32 on two threads", "in odd chunks of blocks of 32 on one thread"],
)
def test_bfloat16_tokens_do_not_depend_on_how_they_were_computed(
    alone: list[list[int]], options: dict[str, int]
) -> None:
    with LLM("smollm2", deterministic=True, max_model_len=2048, **options) as llm:
        assert tokens(llm) == alone
        assert tokens(llm) == alone, "the second time from the prefix cache"
        assert llm.core.stats.prefix_cache_hits > 0
        llm.core.scheduler.kv.audit()


@pytest.mark.slow
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_bfloat16_tokens_survive_preemption(alone: list[list[int]], preemption_mode: str) -> None:
    with LLM("smollm2", deterministic=True, max_model_len=2048, num_blocks=20, preemption_mode=preemption_mode) as llm:
        thrash(llm.core)
        assert tokens(llm) == alone
        assert llm.core.scheduler.counters.num_preemptions > 0
        llm.core.scheduler.kv.audit()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_backend": "reference"}, "does not run on the native decoder"),
        ({"block_size": 8}, "blocks of 8 tokens"),
        ({"dtype": "float16"}, "does not run on the native decoder"),
        ({"kv_cache_dtype": "nvfp4"}, "blocks of 16 tokens in nvfp4"),
    ],
)
def test_deterministic_is_refused_where_it_cannot_be_kept(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    write_hf_model(tmp_path, "Llama")
    with pytest.raises(ConfigError, match=reason):
        LLM(str(tmp_path), deterministic=True, num_blocks=8, **options)
