"""Decode steps by recorded graphs: padded, found again, and with the answers of steps that are launched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from octavo import SamplingParams
from octavo.runner.graphs import CudaCapture, padded_context
from octavo.runner.inputs import StepInputs, padded_size
from tests.conftest import MakeLLM, runner_of


class FakeCapture:
    """Runs what was recorded anew at each replay; counts both. Has memory for `most`."""

    def __init__(self, most: int = 1000) -> None:
        self.recorded = self.replayed = 0
        self._most = most

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        if self.recorded == self._most:
            raise torch.OutOfMemoryError("no memory")
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


@pytest.mark.parametrize(
    ("longest", "mean", "padded"),
    [(1, 1, 256), (256, 200, 256), (257, 2, 512), (900, 512, 512), (900, 513, 1000), (1000, 1000, 1000)],
)
def test_the_mean_context_beyond_one_split_is_padded_to_a_power_of_two(longest: int, mean: int, padded: int) -> None:
    assert padded_context(longest, mean, 1000) == padded


def test_padding_is_one_token_in_the_null_block() -> None:
    inputs = StepInputs(4, [torch.zeros(4, 3, dtype=torch.int32)], torch.device("cpu"), mirrored=True)
    for entries in (inputs.token_ids, inputs.rows, inputs.lengths, *inputs.places):
        entries[:] = 7
    inputs.bounds[:] = inputs.indices[:] = range(5)
    inputs.pad(2)
    inputs.push()
    token_ids, batch, indices = inputs.views(4, 4, 4)
    assert token_ids.tolist() == [7, 7, 0, 0]
    assert indices.tolist() == [0, 1, 2, 3]
    assert batch.context_lens.tolist() == [7, 7, 1, 1]
    assert batch.context_lens.dtype is torch.int32
    assert batch.groups[0].slot_mapping.tolist() == [7, 7, 0, 0]
    assert batch.table_rows.tolist() == [7, 7, 0, 0]
    assert batch.positions.tolist() == [7, 7, 0, 0]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one by one", "planned ahead"])
def test_replayed_steps_give_the_tokens_of_launched_ones_and_each_size_is_recorded_when_it_comes_again(
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
    monkeypatch.setattr("octavo.runner.graphs._RECORD_AFTER", 2)
    llm = make_llm(tiny_llama, async_scheduling=is_ahead, **options)
    replayed = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in replayed] == [out.outputs[0].token_ids for out in launched]
    graphs = runner_of(llm.core).graphs
    assert graphs is not None
    assert graphs.sizes == [(8, 256), (4, 256), (2, 256), (1, 256)]
    assert capture.recorded == 4
    assert capture.replayed == 3 + 4 * 4 - 1 - 4, "every step but the prompts', and the first of each size"


def test_before_serving_sizes_are_recorded_from_short_contexts_on_as_far_as_memory_goes(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = FakeCapture(most=5)
    monkeypatch.setattr("octavo.engine.runner_builder._capture", lambda *_: capture)
    monkeypatch.setattr("octavo.runner.graphs._LEAST_CONTEXT", 64)
    llm = make_llm(tiny_llama, attention_backend="reference", max_num_seqs=4, max_model_len=200)
    runner = runner_of(llm.core)
    assert runner.graphs is not None
    assert list(runner.graphs._all_sizes()) == [(size, most) for most in (64, 128, 200) for size in (4, 2, 1)]
    assert runner.graphs.record(seconds=-1.0) == 0
    assert runner.graphs.record(seconds=60.0) == 5
    assert runner.graphs.sizes == [(4, 64), (2, 64), (1, 64), (4, 128), (2, 128), (1, 128)]
    assert not runner.arena.read_blocks(range(1, runner.arena.num_blocks)).any(), "padding goes to the null block"
    params = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    (replayed,) = llm.generate(prompt, params, use_tqdm=False)
    assert (capture.recorded, capture.replayed) == (5, 61), "beyond 64 tokens it is launched: memory did not suffice"
    (launched,) = make_llm(tiny_llama, attention_backend="reference").generate(prompt, params, use_tqdm=False)
    assert replayed.outputs[0].token_ids == launched.outputs[0].token_ids


def test_a_step_that_cannot_be_recorded_is_launched_and_no_other_is_tried(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Callable[[], None]] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    options = {"attention_backend": "reference", "max_num_seqs": 4}
    prompt, params = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (expected,) = make_llm(tiny_llama, **options).generate(prompt, params, use_tqdm=False)
    monkeypatch.setattr("octavo.engine.runner_builder._capture", lambda *_: capture)
    monkeypatch.setattr("octavo.runner.graphs._RECORD_AFTER", 1)
    llm = make_llm(tiny_llama, **options)
    graphs = runner_of(llm.core).graphs
    assert graphs is not None
    assert graphs.record(seconds=60.0) == 0
    (launched,) = llm.generate(prompt, params, use_tqdm=False)
    assert launched.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(tried) == 1
    assert "--enforce-eager" in caplog.text


class FakeCuda:
    """Stands in for `torch.cuda`, and notes the order of calls; `free` is its memory, which `cached` adds to."""

    def __init__(self, free: int, cached: int = 0) -> None:
        self.calls: list[str] = []
        self._free, self._cached = free, cached
        self.current = "computing"
        self.device = "cuda:0"

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return self._free, 80 << 30

    def empty_cache(self) -> None:
        self._free, self._cached = self._free + self._cached, 0

    def Stream(self, device: str) -> FakeCuda:  # noqa: N802
        return self

    current_stream = Stream

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextmanager
    def stream(self, stream: FakeCuda) -> Iterator[None]:
        self.current = "side"
        try:
            yield
        finally:
            self.current = "computing"

    def wait_stream(self, stream: FakeCuda) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def CUDAGraph(self) -> FakeCuda:  # noqa: N802
        return self

    def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
        self.calls.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.calls.append("end")

    def replay(self) -> None:
        self.calls.append("replay")


def test_a_graph_is_recorded_after_the_step_was_run_and_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(free=0, cached=2 << 30)
    monkeypatch.setattr("octavo.runner.graphs.torch.cuda", cuda)
    CudaCapture(torch.device("cuda"))(lambda: cuda.calls.append(f"step, {cuda.current}"))()
    assert cuda.calls == [
        "wait", "step, side", "synchronize", "begin in pool, thread_local", "step, side", "end", "wait", "replay",
    ]  # fmt: skip
    assert cuda.current == "computing"


def test_recording_ends_where_a_step_fails_or_memory_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(free=2 << 30)
    monkeypatch.setattr("octavo.runner.graphs.torch.cuda", cuda)

    def fail() -> None:
        if "end" not in cuda.calls and cuda.calls[-1].startswith("begin"):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaCapture(torch.device("cuda"))(fail)
    assert cuda.calls[-1] == "end"
    assert cuda.current == "computing"
    cuda.empty_cache()
    cuda._free = 1 << 20
    with pytest.raises(torch.OutOfMemoryError, match="1 MiB of the GPU's memory are free"):
        CudaCapture(torch.device("cuda"))(lambda: None)
