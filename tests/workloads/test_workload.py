from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.workloads.workload import (
    BenchRequest,
    Lengths,
    arrival_times,
    clip,
    named_workload,
    random_workload,
)


def fingerprint(requests: list[BenchRequest]) -> str:
    plain = [{"prompt_token_ids": r.prompt_token_ids, "max_tokens": r.max_tokens} for r in requests]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("single", "60334903c790f555"),
        ("uniform64", "935b1b3fe73d6ab1"),
        ("mixed64", "932d36dedaabcef2"),
        ("shared64", "4332ce168e52a5f0"),
    ],
)
def test_named_workloads_are_the_ones_other_engines_were_measured_on(name: str, digest: str) -> None:
    assert fingerprint(named_workload(name)) == digest


def test_mixed64_has_the_published_number_of_tokens() -> None:
    requests = named_workload("mixed64")
    assert sum(len(r.prompt_token_ids) for r in requests) == 12_416
    assert sum(r.max_tokens for r in requests) == 6_027


def test_a_prefill_is_one_long_prompt_and_one_token() -> None:
    [request] = named_workload("prefill2048")
    assert (len(request.prompt_token_ids), request.max_tokens) == (2048, 1)


def test_shared_workloads_share_512_tokens_and_no_more() -> None:
    first, second = named_workload("shared2")
    assert first.prompt_token_ids[:512] == second.prompt_token_ids[:512]
    assert first.prompt_token_ids[512] != second.prompt_token_ids[512]


@pytest.mark.parametrize("name", ["", "uniform", "uniform0", "single2", "mixed-1", "other64"])
def test_an_unknown_workload_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="uniformN"):
        named_workload(name)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), ("uniform:16-20", 16, 20), ("lognormal:148,0.8", 1, 100_000)]
)
def test_lengths_are_drawn_from_what_was_written(text: str, low: int, high: int) -> None:
    rng = random.Random(0)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(500)]
    assert low <= min(drawn) <= max(drawn) <= high
    if text.startswith("lognormal"):
        assert statistics.median(drawn) == pytest.approx(148, rel=0.2)


@pytest.mark.parametrize("text", ["", "0", "-3", "uniform:5-2", "uniform:0-2", "lognormal:0,1", "normal:3,4", "1e3"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="uniform:16-512"):
        Lengths.parse(text)


def test_lengths_are_drawn_from_a_file(tmp_path: Path) -> None:
    (path := tmp_path / "lengths").write_text("7 7\n31\n")
    lens, rng = Lengths.parse(f"file:{path}"), random.Random(1)
    drawn = [lens.draw(rng) for _ in range(300)]
    assert set(drawn) == {7, 31}
    assert 160 < drawn.count(7) < 240


@pytest.mark.parametrize("text", ["", "7 0", "7 x", "7 99999999999999999999"])
def test_a_file_that_holds_no_lengths_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "lengths").write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        Lengths.parse(f"file:{path}")
    with pytest.raises(ConfigError, match="No such file"):
        Lengths.parse(f"file:{path}.gone")


def test_random_workloads_depend_on_the_seed_alone() -> None:
    lens = Lengths.parse("uniform:1-9")
    assert random_workload(5, lens, lens, seed=3) == random_workload(5, lens, lens, seed=3)
    assert random_workload(5, lens, lens, seed=3) != random_workload(5, lens, lens, seed=4)


lengths = st.integers(1, 60)


@given(st.lists(st.tuples(lengths, lengths), max_size=5), st.integers(2, 40))
def test_clipped_requests_fit_the_model_and_keep_their_heads(sizes: list[tuple[int, int]], limit: int) -> None:
    requests = [BenchRequest(list(range(n)), out) for n, out in sizes]
    clipped, num_cut = clip(requests, max_model_len=limit)
    assert num_cut == sum(before != after for before, after in zip(requests, clipped, strict=True))
    for before, after in zip(requests, clipped, strict=True):
        assert min(len(after.prompt_token_ids), after.max_tokens) >= 1
        assert len(after.prompt_token_ids) + after.max_tokens <= limit
        assert after.prompt_token_ids == before.prompt_token_ids[: len(after.prompt_token_ids)]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_burstiness(burstiness: float) -> None:
    times = list(arrival_times(20_000, 10.0, burstiness))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert list(arrival_times(3, math.inf)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
def test_rates_must_be_positive(rate: float, burstiness: int) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        arrival_times(3, rate, burstiness)
    with pytest.raises(ConfigError, match="burstiness must be finite"):
        arrival_times(3, 1.0, math.inf)


@pytest.mark.parametrize(("name", "prompt_mean", "output_mean"), [("sharegpt4000", 161, 338), ("alpaca4000", 19, 58)])
def test_dialogues_have_the_mean_lengths_of_their_dataset(name: str, prompt_mean: int, output_mean: int) -> None:
    requests = named_workload(name)
    assert statistics.fmean(len(r.prompt_token_ids) for r in requests) == pytest.approx(prompt_mean, rel=0.1)
    assert statistics.fmean(r.max_tokens for r in requests) == pytest.approx(output_mean, rel=0.1)


@pytest.mark.slow
def test_ids_that_a_vocabulary_lacks_wrap_around_and_shared_prefixes_stay_shared() -> None:
    requests = [BenchRequest([5, 400, 320, 7], 3), BenchRequest([5, 400, 12], 3), BenchRequest([1, 2], 1)]
    clipped, num_cut = clip(requests, vocab_size=320)
    assert [request.prompt_token_ids for request in clipped] == [[5, 80, 0, 7], [5, 80, 12], [1, 2]]
    assert num_cut == 0
