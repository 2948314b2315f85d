"""What a load is expected to take, and whether it is worth that."""

from __future__ import annotations

import random

import pytest

from octavo.tiers.lower import _TRY_EVERY
from octavo.tiers.speed import LoadSpeed
from tests.tiers.stores import label
from tests.tiers.test_lower import AskedShelf, Setup, Shelf

MIB = 1 << 20


def learned(*loads: tuple[float, int], speed: LoadSpeed | None = None) -> LoadSpeed:
    speed = LoadSpeed() if speed is None else speed
    for seconds, num_bytes in loads:
        speed.measure(seconds, num_bytes)
    return speed


def test_nothing_is_expected_before_the_first_load() -> None:
    assert LoadSpeed().expected(MIB) is None


def test_after_one_load_every_size_is_expected_to_take_as_long() -> None:
    speed = learned((0.5, MIB))
    assert (speed.expected(1), speed.expected(10 * MIB)) == (0.5, 0.5)


def test_loads_of_several_sizes_tell_the_latency_from_the_time_of_a_byte() -> None:
    def seconds(num_bytes: int) -> float:
        return 0.002 + num_bytes * 1e-9

    rng = random.Random(0)
    sizes = [rng.choice([MIB // 4, MIB, 16 * MIB, 64 * MIB]) for _ in range(60)]
    speed = learned(*((seconds(size), size) for size in sizes))
    for size in (MIB, 16 * MIB, 64 * MIB):
        assert speed.expected(size) == pytest.approx(seconds(size), rel=0.01)


def test_one_load_that_stood_still_counts_as_a_slow_one_and_no_more() -> None:
    speed = learned(*[(0.01, MIB)] * 10)
    learned((30.0, MIB), speed=speed)
    assert speed.expected(MIB) == pytest.approx(0.01, rel=0.15)


@pytest.mark.parametrize("loads", [[(0.02, MIB), (0.01, 8 * MIB)], [(0.001, MIB), (0.1, 8 * MIB)]])
def test_noise_makes_neither_part_negative(loads: list[tuple[float, int]]) -> None:
    speed = learned(*loads)
    assert speed.per_load is not None
    assert speed.per_byte is not None
    assert min(speed.per_load, speed.per_byte) >= 0.0


def test_a_store_that_becomes_slow_or_quick_is_followed() -> None:
    speed = learned(*[(0.01, MIB)] * 10, *[(1.0, MIB)] * 200)
    assert speed.expected(MIB) == pytest.approx(1.0, rel=0.1)
    learned(*[(0.01, MIB)] * 80, speed=speed)
    assert speed.expected(MIB) == pytest.approx(0.01, rel=0.1)


@pytest.fixture(params=[Shelf, AskedShelf])
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.param(), num_slots=20)


def is_loaded(setup: Setup, first: int, seconds_to_compute: float | None) -> bool:
    """Whether five blocks are loaded that would take this long each to compute."""
    fetch = setup.tiers.prefetch(map(label, range(first, first + 5)), "", seconds_to_compute)
    if fetch is None:
        return False
    setup.fetches.append(fetch)
    setup.arrive(fetch)
    found = len(fetch.held) == 5
    setup.tiers.release(fetch)
    return found


def test_a_load_is_made_where_it_is_expected_to_take_less_than_computing_or_nothing_is_known(setup: Setup) -> None:
    assert is_loaded(setup, 0, 1e-9), "no load was measured yet"
    setup.store.speed = learned((1.0, 8))
    assert is_loaded(setup, 10, None), "nothing was computed yet"
    setup.store.speed = learned((1.0, 8))
    assert is_loaded(setup, 20, 0.21)
    setup.store.speed = learned((1.0, 8))
    assert not is_loaded(setup, 30, 0.19)
    assert setup.tiers.num_not_worth == 1
    setup.close()


def test_a_store_that_seems_too_slow_is_tried_again_after_a_while(setup: Setup) -> None:
    setup.store.speed = learned((1.0, 8))
    tried = [is_loaded(setup, 100 + 5 * n, 0.01) for n in range(_TRY_EVERY - 1)]
    assert not any(tried)
    assert setup.tiers.prefetch(map(label, range(5)), "", 0.01) is not None
    assert setup.store.speed.expected(8) == 1.0
    setup.tiers.close()
