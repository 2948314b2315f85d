"""A step of each kind before the first request: sound plans in a cache of any size, and nothing of them left."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import SamplingParams
from octavo.engine import runner_builder
from octavo.kvcache.spec import KVCacheSpec
from octavo.runner.warm_up import plans
from tests.conftest import MakeLLM, runner_of
from tests.kvcache.caches import FULL, sliding
from tests.runner.test_graphs import FakeCapture
from tests.scheduler.plans import ToldRunner, rows_of


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_tokens", "lengths"),
    [
        (1000, 8, 2048, [(300,), (1, 20, 20), (1, 1, 1), (1, 1), (1,), (1,)]),
        (1000, 2, 2048, [(300,), (1,)]),
        (1000, 8, 40, [(35,), (1,)]),
        (30, 8, 2048, [(219,), (1,)]),
        (4, 8, 2048, [(11,), (1,)]),
        (2, 8, 2048, []),
    ],
)
def test_the_steps_fit_the_cache_and_the_limits(
    num_blocks: int, max_num_seqs: int, max_tokens: int, lengths: list[tuple[int, ...]]
) -> None:
    spec = KVCacheSpec.build((FULL, sliding(5)), 16, "float32")
    runner = ToldRunner()
    found = list(plans(spec, num_blocks, max_num_seqs=max_num_seqs, max_tokens=max_tokens))
    assert [plan.lengths for plan in found] == lengths
    for plan in found:
        runner.apply(plan)
        assert plan.num_rows <= max_num_seqs
        assert plan.num_tokens <= max_tokens
        for row in rows_of(plan):
            assert all(row.end <= len(table) * spec.block_size for table in runner.tables[row.seq_id])
    blocks = [block for tables in runner.tables.values() for table in tables for block in table]
    assert len(set(blocks)) == len(blocks)
    assert all(0 < block < num_blocks for block in blocks)


def test_decodes_are_recorded_and_the_first_request_has_the_tokens_of_any(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    options = {"attention_backend": "reference", "max_num_seqs": 4}
    expected = make_llm(tiny_llama, **options).generate(prompt, params, use_tqdm=False)
    monkeypatch.setattr(runner_builder, "_capture", lambda *_: FakeCapture())
    llm = make_llm(tiny_llama, **options)
    runner_builder._warm_up(llm.core.config, runner_of(llm.core))
    graphs = runner_of(llm.core).graphs
    assert graphs is not None
    assert graphs.sizes == [(4, 256), (2, 256), (1, 256)]
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    assert result.outputs[0].token_ids == expected[0].outputs[0].token_ids
