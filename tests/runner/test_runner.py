"""The runner carries a plan out: copies, then the model, then the samples, each where the scheduler looks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ExecutorError, LogitsError
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.base import CausalLM, LaterRows
from octavo.planner import calculator
from octavo.request import FinishReason
from octavo.runner.runner import ModelRunner
from octavo.scheduler.plan import DRAWN, StepPlan, StepResult
from octavo.storage.arena import KVArena
from octavo.storage.layer_kv import LayerKV
from tests.kvcache.caches import FULL
from tests.scheduler.kit import Harness

VOCAB = 50


class MarkedModel(CausalLM):
    """Stores each token's own id as its keys and values; the most likely next token is the id plus one.

    `reads` collects, before anything is written, the ids that the step's blocks hold for the tokens already computed.
    """

    architecture = "Marked"
    vocab_size = VOCAB
    max_position_embeddings = 200
    kv_layers = (FULL,)
    eos_token_ids = frozenset()
    dtype = torch.float32
    device = torch.device("cpu")
    weight_bytes = 0

    def __init__(self) -> None:
        self.reads: list[list[int]] = []
        self.nan_after: int | None = None
        self.fails = False

    def logits(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        if self.fails:
            raise RuntimeError("out of order")
        (layer,) = kv
        starts = batch.positions[batch.query_start[:-1].long()].tolist()
        for table, start in zip(batch.groups[0].block_tables[batch.table_rows], starts, strict=True):
            keys, _ = layer.gather(table.long(), start)
            self.reads.append(keys[..., 0, 0].flatten().long().tolist() if start else [])
        marks = token_ids.float().view(-1, 1, 1).expand(-1, 1, 8).contiguous()
        attention.write(layer, marks, marks, batch)
        logits = torch.nn.functional.one_hot((token_ids[logits_indices] + 1) % VOCAB, VOCAB).float() * 10
        if self.nan_after is not None:
            logits[token_ids[logits_indices] == self.nan_after] = float("nan")
        return logits

    def forward_in_part(self, *step: Any) -> tuple[torch.Tensor, LaterRows]:
        *computed, num_now = step
        logits = self.logits(*computed)
        later = lambda first, last: logits[first:last]  # noqa: E731
        return logits[:num_now], LaterRows(logits=later, hidden=later)


class Rig:
    """A scheduler and a runner over one arena."""

    def __init__(self, num_blocks: int = 60, **limits: Any) -> None:
        self.engine = Harness(num_blocks, **limits)
        self.model = MarkedModel()
        arena = KVArena(KVCacheSpec.build((FULL,), 4, "float32"), num_blocks)
        self.runner = ModelRunner(self.model, arena, ReferenceAttention(), max_num_seqs=8, max_model_len=200)

    def step(self) -> tuple[StepPlan, StepResult]:
        plan = self.engine.scheduler.schedule()
        self.model.reads.clear()
        result = self.runner.execute(plan)
        # What a step reads is what was computed before it, copies included.
        for seq, start, read in zip(self.engine.scheduler.planned, plan.starts, self.model.reads, strict=True):
            assert read == seq.token_ids[:start]
        return plan, result

    def run(self) -> None:
        while self.engine.scheduler.has_work:
            self.engine.scheduler.update(*self.step())
        self.engine.kv.audit()


def test_each_sequence_gets_the_token_of_its_own_logits() -> None:
    rig = Rig(max_num_batched_tokens=7)
    requests = [rig.engine.add([first, first + 1, first + 2], temperature=0.0) for first in (1, 11, 21, 31)]
    rig.run()
    assert [r.sequences[0].output_token_ids for r in requests] == [
        list(range(first + 3, first + 13)) for first in (1, 11, 21, 31)
    ]


def test_a_plan_without_samples_gives_none() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.engine.add(list(range(10)))
    _, result = rig.step()
    assert result == StepResult()


def test_parallel_samples_draw_from_the_one_row_of_their_prompt() -> None:
    rig = Rig()
    rig.engine.add([5, 6], n=3, temperature=0.0)
    _, result = rig.step()
    assert result.token_ids == (7, 7, 7)


def test_copies_are_done_before_anything_is_written() -> None:
    rig = Rig()
    request = rig.engine.add(list(range(1, 7)), n=3, temperature=4.0)
    rig.engine.scheduler.update(*rig.step())
    plan, result = rig.step()  # checks that every sample reads the prompt's tail in its own block
    assert len(plan.copies) == 2
    rig.engine.scheduler.update(plan, result)
    rig.run()
    assert all(s.finish_reason is FinishReason.LENGTH for s in request.sequences)


def test_preempted_and_cached_sequences_read_what_they_once_computed() -> None:
    rig = Rig(num_blocks=10)
    requests = [rig.engine.add([first, first + 1, first + 2] * 3, n=2, temperature=3.0) for first in (1, 11, 21)]
    rig.run()
    assert rig.engine.scheduler.counters.num_preemptions > 0
    assert all(s.num_output_tokens == 10 for r in requests for s in r.sequences)


def test_prompt_tokens_are_scored_by_the_logits_before_them() -> None:
    rig = Rig(max_num_batched_tokens=3)
    rig.engine.add([5, 6, 9, 10, 11], prompt_logprobs=1, max_tokens=1)
    plan, result = rig.step()
    assert [entry.rank == 1 for entry in result.prompt_logprobs[0]] == [True, False, True]
    assert [entry.top[0][0] for entry in result.prompt_logprobs[0]] == [6, 7, 10]
    rig.engine.scheduler.update(plan, result)
    plan, result = rig.step()
    assert [entry.rank for entry in result.prompt_logprobs[0]] == [1]
    rig.engine.scheduler.update(plan, result)


def test_unusable_logits_name_their_request_and_the_step_can_be_done_again_without_it() -> None:
    rig = Rig()
    rig.model.nan_after = 6
    ailing, sound = rig.engine.add([5, 6], n=2), rig.engine.add([10, 11], n=2, temperature=0.0)
    with pytest.raises(LogitsError) as caught:
        rig.runner.execute(rig.engine.scheduler.schedule())
    assert caught.value.request_ids == [ailing.request_id]
    rig.engine.scheduler.abandon_step()
    rig.engine.scheduler.end_request(ailing.request_id, FinishReason.ERROR)
    rig.run()
    assert [s.output_token_ids for s in sound.sequences] == [list(range(12, 22))] * 2


def test_a_scored_prompts_logits_come_in_slices_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere is there a row of logits for each token of the prompt at once."""
    whole = Rig()
    whole.engine.add(list(range(40)), prompt_logprobs=2, max_tokens=1)
    _, expected = whole.step()
    rig, wanted = Rig(), []

    def forward_in_part(*arguments: Any) -> Any:
        *step, num_now = arguments
        logits = rig.model.logits(*step)

        def later(first: int, last: int) -> torch.Tensor:
            wanted.append((first, last))
            return logits[first:last]

        return logits[:num_now], LaterRows(logits=later, hidden=later)

    monkeypatch.setattr(rig.model, "forward_in_part", forward_in_part)
    monkeypatch.setattr(calculator, "SCORED_BYTES", 7 * 4 * VOCAB)
    rig.engine.add(list(range(40)), prompt_logprobs=2, max_tokens=1)
    _, result = rig.step()
    assert wanted == [(1, 8), (8, 15), (15, 22), (22, 29), (29, 36), (36, 40)]
    assert result == expected


def test_a_plan_made_ahead_goes_on_with_what_was_drawn_and_is_refused_after_a_failure() -> None:
    rig = Rig()
    scheduler = rig.engine.scheduler
    first, second = (rig.engine.add([start, start + 1], temperature=0.0, max_tokens=9) for start in (1, 11))
    scheduler.update(*rig.step())
    plan = scheduler.schedule()
    collect = rig.runner.launch(plan)
    scheduler.end_request(first.request_id)
    ahead = scheduler.schedule()
    assert ahead.token_ids == (DRAWN,)
    collect_ahead = rig.runner.launch(ahead)
    scheduler.update(plan, collect())
    scheduler.update(ahead, collect_ahead())
    assert second.sequences[0].output_token_ids == [13, 14, 15]
    rig.model.fails = True
    plan = scheduler.schedule()
    ahead = scheduler.schedule()
    with pytest.raises(RuntimeError, match="out of order"):
        rig.runner.launch(plan)
    with pytest.raises(
        ExecutorError, match=f"step {ahead.step} was planned ahead of the result of one that has failed"
    ):
        rig.runner.launch(ahead)
    rig.model.fails = False
    scheduler.abandon_step()
    rig.run()
    assert second.sequences[0].output_token_ids == list(range(13, 22))
