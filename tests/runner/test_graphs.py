"""Decode steps by recorded graphs: padded, found again, and with the answers of steps that are launched one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo import SamplingParams
from octavo.runner.graphs import padded_context
from octavo.runner.step_inputs import StepInputs, padded_size
from tests.conftest import MakeLLM, runner_of


class FakeCapture:
    """Runs what was recorded anew at each replay; counts both."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        step()

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (33, 40), (64, 64), (65, 80), (256, 256), (257, 288)]
)
def test_a_step_is_padded_to_the_next_size(count: int, size: int) -> None:
    assert padded_size(count) == size


@pytest.mark.parametrize(("context", "padded"), [(1, 256), (256, 256), (257, 512), (900, 1000), (1000, 1000)])
def test_a_context_is_padded_to_a_power_of_two_within_the_longest(context: int, padded: int) -> None:
    assert padded_context(context, 1000) == padded


def test_padding_is_one_token_in_the_null_block() -> None:
    inputs = StepInputs(4, [torch.zeros(4, 3, dtype=torch.int32)], torch.device("cpu"), mirrored=True)
    for field in (inputs.token_ids, inputs.positions, inputs.rows, inputs.lengths, inputs.slots[0]):
        field[:] = 7
    inputs.pad(2)
    inputs.push()
    batch = inputs.batch(4, 8)
    assert inputs.device_token_ids(4).tolist() == [7, 7, 0, 0]
    assert batch.context_lens.tolist() == [7, 7, 1, 1]
    assert batch.context_lens.dtype is torch.int32
    assert batch.groups[0].slot_mapping.tolist() == [7, 7, 0, 0]
    assert batch.table_rows.tolist() == [7, 7, 0, 0]
    assert batch.positions.tolist() == [7, 7, 0, 0]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one by one", "planned ahead"])
def test_replayed_steps_give_the_tokens_of_launched_ones_and_each_size_is_recorded_once(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    prompts = [{"prompt_token_ids": [(i * 31 + j) % 300 for j in range(3 + 7 * i)]} for i in range(5)]
    params = [
        SamplingParams(max_tokens=3 + 4 * i, temperature=0.9 * (i % 2), seed=i, ignore_eos=True) for i in range(5)
    ]
    options = {"attention_backend": "reference", "max_num_seqs": 5}
    launched = make_llm(tiny_llama, **options).generate(prompts, params, use_tqdm=False)
    capture = FakeCapture()
    monkeypatch.setattr("octavo.engine.runner_builder._capture", lambda *_: capture)
    llm = make_llm(tiny_llama, async_scheduling=is_ahead, **options)
    replayed = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in replayed] == [out.outputs[0].token_ids for out in launched]
    graphs = runner_of(llm.core).graphs
    assert graphs is not None
    assert graphs.sizes == [(8, 256), (4, 256), (2, 256), (1, 256)]
    assert capture.recorded == 4
    assert capture.replayed == 3 + 4 * 4 - 1, "every step but the prompts'"
