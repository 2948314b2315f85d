"""Cold, warm, restored from each tier, swapped or computed again: the same tokens with every codec of the KV cache.

With `--deterministic` wherever it is to be had. It is refused for float16 and nvfp4, whose attention is summed by torch
in an order that depends on the batch: what they store and load is shown without it, over short contexts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams, kernels
from octavo.kvcache.formats import KV_FORMATS
from tests.conftest import MakeLLM
from tests.engine.preempting import thrash
from tests.models.tiny import write_hf_model
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")

BLOCK_SIZE = 16
WINDOW = 40
INEXACT = {"float16", "nvfp4"}
# Files of what each layer stores. Recent: it keeps its first block and its last two in int8 too.
TABLES = {
    "int4+recent": 'keys = "int4"\nvalues = "int4"\nsink_blocks = 1\nrecent_blocks = 2\n',
    "k8v4+recent": 'keys = "int8"\nvalues = "int4"\nsink_blocks = 1\nrecent_blocks = 2\n',
    "a codec a layer": 'keys = ["int8", "int4"]\nvalues = "int4"',
}

Answer = list[list[int]]

# Their first answered tokens take a block more each.
PROMPTS: list[Any] = [{"prompt_token_ids": [(7 * i + j * j) % 300 + 5 for j in range(31 + 16 * i)]} for i in range(4)]
PARAMS = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9 * (i % 2), seed=i) for i in range(4)]
# All full blocks of the prompts before their last tokens.
RESTORABLE = sum((len(prompt["prompt_token_ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)


_COLD: dict[tuple[Path, str], Answer] = {}


@dataclass
class Engines:
    """Engines of one model and one codec, which differ in their other options alone."""

    make_llm: MakeLLM
    folder: Path
    codec: str

    def make(self, **options: Any) -> Any:
        codec = self.codec
        if (table := TABLES.get(codec)) is not None:
            (path := self.folder / f"{codec}.toml").write_text(table)
            fixed = {"kv_cache_dtype": str(path), "dtype": "bfloat16", "num_blocks": 128}
        else:
            dtype = codec if KV_FORMATS[codec].plain else "float32" if codec in INEXACT else "bfloat16"
            fixed = {"kv_cache_dtype": codec, "dtype": dtype, "num_blocks": 64}
        return self.make_llm(self.folder, **{**fixed, "deterministic": codec not in INEXACT, **options})

    def cold(self) -> Answer:
        """The tokens of each request by itself, with nothing cached."""
        if (self.folder, self.codec) not in _COLD:
            _COLD[self.folder, self.codec] = self.alone(PARAMS)
        return _COLD[self.folder, self.codec]

    def alone(self, params: list[SamplingParams]) -> Answer:
        """The tokens of each request by itself, computed now."""
        llm, pairs = self.make(enable_prefix_caching=False), zip(PROMPTS, params, strict=True)
        return [tokens(llm.generate(*pair, use_tqdm=False))[0] for pair in pairs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("Llama", "Mistral")}
    write_hf_model(made["Llama"], "Llama", hidden_size=128, head_dim=32)
    write_hf_model(made["Mistral"], "Mistral", hidden_size=128, head_dim=32, sliding_window=WINDOW)
    return made


@pytest.fixture(
    params=[
        *(("Llama", codec) for codec in (*KV_FORMATS, *TABLES)),
        *(("Mistral", codec) for codec in ("bfloat16", "k8v4", "int4+recent")),
    ],
    ids="-".join,
)
def engines(request: pytest.FixtureRequest, make_llm: MakeLLM, folders: dict[str, Path]) -> Engines:
    family, codec = request.param
    return Engines(make_llm, folders[family], codec)


def tokens(outputs: list[Any]) -> Answer:
    return [output.outputs[0].token_ids for output in outputs]


def assert_found(engines: Engines, llm: Any, tier: str) -> None:
    """All requests together get the tokens that they get cold, and nothing is computed that the tier has."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens(outputs) == engines.cold()
    found = Counter[str]()
    for output in outputs:
        found.update(output.cached_by_tier)
    assert found.total() == RESTORABLE
    # Where a window has passed them, blocks are needed nowhere, and count as the device's.
    assert found[tier] == RESTORABLE or (engines.folder.name.startswith("Mistral") and found[tier] > 0)


@pytest.mark.slow
def test_a_batch_in_chunks_and_the_device_give_the_cold_tokens(engines: Engines) -> None:
    llm = engines.make(max_num_batched_tokens=17, max_num_seqs=4)
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == engines.cold()
    assert_found(engines, llm, "device")


def test_host_memory_gives_the_cold_tokens(engines: Engines) -> None:
    llm = engines.make(kv_host_memory="2MiB", kv_demotion="on_evict")
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    # What is stored leaves with the next step, which may give its place on the device to others at once.
    llm.core.scheduler.kv.pool.evict_all_cached()
    llm.generate({"prompt_token_ids": [9] * 40}, use_tqdm=False)
    assert_found(engines, llm, "host")


@pytest.mark.slow
def test_the_disk_gives_the_cold_tokens_after_a_restart(engines: Engines, tmp_path: Path) -> None:
    options = {"kv_disk": str(tmp_path), "kv_disk_size": "4MiB", "kv_demotion": "all"}
    first = engines.make(**options)
    first.generate(PROMPTS, PARAMS, use_tqdm=False)
    first.core.close()
    second = engines.make(**options)
    assert_found(engines, second, "disk")
    second.core.close()


def test_redis_gives_another_engine_the_cold_tokens(engines: Engines, redis_server: RedisServer) -> None:
    options = {"kv_remote": redis_server.url, "kv_demotion": "all"}
    first = engines.make(**options)
    first.generate(PROMPTS, PARAMS, use_tqdm=False)
    first.core.close()
    second = engines.make(**options)
    assert_found(engines, second, "remote")
    second.core.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_resume_with_the_cold_tokens(engines: Engines, mode: str) -> None:
    num_blocks, params, expected = 10, PARAMS, engines.cold
    if "recent" in engines.codec:
        # Copies slide, so that a sequence grows little: only long answers take more than there is.
        num_blocks, params = 30, [replace(each, max_tokens=60) for each in PARAMS]
        expected = partial(engines.alone, params)
    llm = engines.make(num_blocks=num_blocks, preemption_mode=mode, enable_prefix_caching=False)
    thrash(llm.core)
    assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == expected()
    assert llm.core.scheduler.counters.num_preemptions > 0
    assert (llm.core.scheduler.kv.hierarchy.swapped.blocks_in > 0) == (mode == "swap")
