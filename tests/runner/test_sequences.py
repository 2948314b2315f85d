"""The runner's rows follow what plans say, and a device that has its own memory has the same rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runner.sequences import SequenceTable
from tests.scheduler.kit import Harness


@settings(max_examples=20, deadline=None)
@given(
    num_blocks=st.integers(20, 60),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    n=st.integers(1, 3),
    lost=st.sets(st.integers(0, 40), max_size=3),
)
def test_a_devices_copy_has_what_the_host_has(num_blocks: int, prompts: list[int], n: int, lost: set[int]) -> None:
    engine = Harness(num_blocks=num_blocks)
    for prompt in prompts:
        engine.add(prompt, n=n)
    # As on a GPU: tensors with memory of their own.
    sequences = SequenceTable(num_groups=1, max_rows=8, max_blocks=60, mirrored=True)
    step = 0
    while plan := engine.scheduler.schedule():
        step += 1
        if step in lost:
            engine.scheduler.abandon_step()
            continue
        rows = sequences.apply(plan)
        for row, seq in zip(rows.tolist(), engine.scheduler.planned, strict=True):
            known = sequences.tables[0][row, : len(engine.kv.tables(seq)[0])]
            assert known.tolist() == list(engine.kv.tables(seq)[0])
        assert np.array_equal(sequences.device_tables[0].numpy(), sequences.tables[0])
        assert len(sequences) <= 8
        engine.finish_step(plan, draw=lambda seq: seq.index)
