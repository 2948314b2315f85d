"""The reference backend agrees with the textbook over any cut into blocks and chunks, and reads nothing it should not.

`PagedSequences` fills what may not be read with NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import make_backend
from octavo.attention.base import AttentionBackend
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ConfigError
from octavo.kvcache.spec import LayerKVSpec
from tests.attention.batches import PagedSequences
from tests.attention.oracle import oracle_attention


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These tensors are tiny: a second thread only waits, and on a busy machine it waits long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Problem:
    """Sequences to attend over and how they are cut."""

    lengths: tuple[int, ...]
    num_heads: int
    layer: LayerKVSpec
    block_size: int = 4
    longest_chunk: int = 8
    dtype: str = "float32"
    softcap: float | None = None
    with_sinks: bool = False
    seed: int = 0


def solve(problem: Problem, backend: AttentionBackend) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What `backend` and the oracle make of each sequence, [length, num_heads, value_dim] float32."""
    layer, dtype = problem.layer, getattr(torch, problem.dtype)
    generator = torch.Generator().manual_seed(problem.seed)
    rng = random.Random(problem.seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    queries = [tensor(n, problem.num_heads, layer.key_dim) for n in problem.lengths]
    keys = [tensor(n, layer.num_kv_heads, layer.key_dim) for n in problem.lengths]
    values = [tensor(n, layer.num_kv_heads, layer.value_dim) for n in problem.lengths]
    arguments: dict[str, Any] = {
        "scale": layer.key_dim**-0.5,
        "softcap": problem.softcap,
        "sinks": tensor(problem.num_heads) if problem.with_sinks else None,
    }
    paged = PagedSequences(
        [layer],
        problem.block_size,
        len(problem.lengths),
        max(problem.lengths),
        dtype=problem.dtype,
        seed=problem.seed,
    )
    parts: list[list[torch.Tensor]] = [[] for _ in problem.lengths]
    while unfinished := [i for i, n in enumerate(problem.lengths) if paged.lengths[i] < n]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        spans = {}
        for i in chosen:
            start = paged.lengths[i]
            spans[i] = slice(start, min(start + rng.randint(1, problem.longest_chunk), problem.lengths[i]))
        batch = paged.step({i: span.stop - span.start for i, span in spans.items()})
        ragged = [torch.cat([tensors[i][span] for i, span in spans.items()]) for tensors in (queries, keys, values)]
        backend.write(paged.kv[0], ragged[1], ragged[2], batch)
        attended = backend.attend(paged.kv[0], ragged[0], batch, **arguments)
        assert attended.dtype is dtype
        for i, part in zip(chosen, attended.split([s.stop - s.start for s in spans.values()]), strict=True):
            parts[i].append(part.float())
    expected = [
        oracle_attention(q, k, v, window=layer.sliding_window, **arguments).float()
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return [torch.cat(part) for part in parts], expected


@st.composite
def problems(draw: st.DrawFn, dtype: str = "float32") -> Problem:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    key_dim = draw(st.sampled_from([32, 64, 80, 96, 128, 256]))
    return Problem(
        lengths=tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))),
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7])),
        layer=LayerKVSpec(
            kv_heads,
            key_dim,
            draw(st.sampled_from([key_dim, 32, 48])),
            draw(st.one_of(st.none(), st.integers(1, 80))),
        ),
        block_size=draw(st.sampled_from([1, 2, 7, 8, 16, 32, 128])),
        longest_chunk=draw(st.sampled_from([1, 3, 16, 80])),
        dtype=dtype,
        softcap=draw(st.sampled_from([None, 3.0])),
        with_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_it_agrees_with_the_textbook(problem: Problem) -> None:
    for ours, theirs in zip(*solve(problem, ReferenceAttention()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(problem=problems(dtype="bfloat16"))
def test_half_types_lose_only_the_rounding_of_the_result(problem: Problem) -> None:
    for ours, theirs in zip(*solve(problem, ReferenceAttention()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=2**-8)


def test_a_long_prompt_is_attended_to_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceAttention, "_MAX_SCORES", 700)
    for window in (None, 11):
        problem = Problem((90, 33), 4, LayerKVSpec(2, 32, 32, window), longest_chunk=90)
        for ours, theirs in zip(*solve(problem, ReferenceAttention()), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_sequence_gets_the_same_bits_alone_and_in_company() -> None:
    layer = LayerKVSpec(2, 64, 64)
    torch.manual_seed(0)
    query, key, value = torch.randn(40, 4, 64), torch.randn(40, 2, 64), torch.randn(40, 2, 64)
    others = [torch.randn(25, heads, 64) for heads in (4, 2, 2)]

    def attend(neighbour: bool) -> torch.Tensor:
        paged = PagedSequences([layer], 8, 2, 40, seed=int(neighbour))
        batch = paged.step({1: 25, 0: 40} if neighbour else {0: 40})
        mine = (query, key, value)
        q, k, v = (torch.cat(pair) for pair in zip(others, mine, strict=True)) if neighbour else mine
        backend = ReferenceAttention()
        backend.write(paged.kv[0], k, v, batch)
        return backend.attend(paged.kv[0], q, batch, scale=0.125)[-40:]

    assert torch.equal(attend(neighbour=False), attend(neighbour=True))


def test_scores_far_beyond_the_range_of_exp_stay_finite() -> None:
    paged = PagedSequences([LayerKVSpec(1, 32, 32)], 4, 1, 9)
    batch = paged.step({0: 9})
    query, key, value = torch.full((9, 1, 32), 100.0), torch.randn(9, 1, 32) * 100, torch.randn(9, 1, 32)
    backend = ReferenceAttention()
    backend.write(paged.kv[0], key, value, batch)
    assert backend.attend(paged.kv[0], query, batch, scale=1.0).isfinite().all()


def test_backends_are_chosen_by_name() -> None:
    assert make_backend("reference", "cpu").name == "reference"
    with pytest.raises(ConfigError, match=r"attention_backend must be one of .*'reference'.* got 'flash'"):
        make_backend("flash", "cpu")
