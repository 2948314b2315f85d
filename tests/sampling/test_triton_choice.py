"""The Triton kernel that draws makes the decisions of the torch sampler, given the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import LogitsError
from octavo.sampling.choice import Choice, DrawMasks
from octavo.sampling.sampler import Sampler
from tests.attention.triton_device import DEVICE, needs_triton
from tests.sampling.draws import batch_of, make_sequence

pytestmark = needs_triton

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 0.9, "top_k": 40},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 30, "min_p": 0.02},
]


def on_device() -> Choice:
    from octavo.sampling.triton_choice import TritonChoice

    return TritonChoice()


def rows_of(num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Normal, flat and coarse logits, the last with many equal values, some of them forbidden, and both zeros."""
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1::3] *= 0.01
    logits[2::3] = logits[2::3].round()
    logits[::4, 5:50] = -torch.inf
    logits[2, :9] = -0.0
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [37, 1500])
def test_every_filter_draws_what_torch_draws(vocab: int) -> None:
    count = 2 * len(FILTERS)
    logits = rows_of(count, vocab, vocab)
    sequences = [make_sequence(seed=i, **FILTERS[i % len(FILTERS)]) for i in range(count)]
    expected = Sampler().sample(logits, batch_of(sequences)).token_ids
    assert Sampler(on_device()).sample(logits.to(DEVICE), batch_of(sequences)).token_ids == expected


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_distribution_are_tokens_with_mass(uniform: float) -> None:
    from octavo.sampling.triton_choice import draw_rows

    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 90, 211]] = torch.tensor([1.0, 2.0, 1.0])
    table = torch.tensor([[uniform, 1.0, -torch.inf, 1.0, 0.0, 0.0]], dtype=torch.float64)
    token_ids, valid = draw_rows(logits.to(DEVICE), table.to(DEVICE))
    assert (token_ids.tolist(), valid.tolist()) == ([7 if uniform == 0.0 else 211], [1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}], ids=str)
def test_logits_that_make_no_distribution_are_refused(bad: float, params: dict[str, Any]) -> None:
    logits = torch.zeros(2, 40)
    logits[1, slice(None) if bad == -torch.inf else slice(3, 4)] = bad
    sequences = [make_sequence(request_id=name, **params) for name in ("good", "bad")]
    with pytest.raises(LogitsError) as refused:
        Sampler(on_device()).sample(logits.to(DEVICE), batch_of(sequences))
    assert refused.value.request_ids == ["bad"]


@pytest.mark.slow
def test_a_mask_leaves_only_what_it_allows() -> None:
    count, vocab = len(FILTERS), 70
    logits = rows_of(count + 1, vocab, 3)
    batch = batch_of([make_sequence(seed=i, **params) for i, params in enumerate([{}, *FILTERS])])
    allowed = torch.rand(count, vocab, generator=torch.Generator().manual_seed(1)) < 0.3
    bits = np.zeros((count, 96), dtype=np.uint8)
    bits[:, :vocab] = allowed.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    draws, masks = np.arange(1, count + 1), DrawMasks(words, np.arange(-1, count))
    token_ids, valid = on_device().choose(logits.to(DEVICE), batch, masks)
    expected, _ = Choice().choose(logits, batch, masks)
    assert valid.all()
    assert token_ids.tolist() == expected.tolist()
    again = batch.select(draws), DrawMasks(words, np.arange(count)), draws
    token_ids, valid = on_device().choose(logits.to(DEVICE), *again, again=True)
    expected, _ = Choice().choose(logits, *again, again=True)
    assert valid.all()
    assert token_ids.tolist() == expected.tolist()


def test_tokens_are_scored_as_torch_does_with_equals_by_rising_id() -> None:
    logits, drawn = rows_of(9, 300, 5), torch.arange(9) * 7
    rows, num_top = np.array([0, 1, 2, 5, 8]), [0, 5, 20, 1, 20]
    scored = on_device().score(logits.to(DEVICE), rows, drawn.to(DEVICE), num_top)
    expected = Choice().score(logits, rows, drawn, num_top)
    for ours, theirs in zip(scored, expected, strict=True):
        assert ours.rank == theirs.rank
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


@pytest.mark.parametrize("vocab_size", [32, 33])
def test_the_kernel_for_masks_is_compiled_by_a_draw_of_the_only_token_allowed(vocab_size: int) -> None:
    from octavo.sampling.triton_choice import draw_masked_row

    assert draw_masked_row(vocab_size, torch.device(DEVICE)) == vocab_size - 1
