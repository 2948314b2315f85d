"""A GPU's blocks leave while the step computes, and nobody can tell: not the next writer, not who comes back, not a
failure. A CPU's leave before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from octavo.kvcache.block import BlockCopy, BlockId, BlockTransfer, HostBlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.runner import swapping
from octavo.runner.swapping import BlockMover, HostLink
from octavo.scheduler.plan import StepPlan
from octavo.storage.arena import KVArena
from octavo.storage.host import HostTier
from tests.kvcache.caches import FULL

SPEC = KVCacheSpec.build((FULL,), 4, "float32")


class SlowTier(HostTier):
    """Stores only when it may, or after a while; may fail instead."""

    def __init__(self) -> None:
        super().__init__(8, SPEC.block_bytes)
        self.may_store = threading.Event()
        self.fails = False
        self.threads: list[int] = []
        self.stored: list[torch.Tensor] = []

    def write(self, ids: Sequence[int], rows: torch.Tensor | Sequence[torch.Tensor]) -> None:
        self.threads.append(threading.get_ident())
        self.stored += rows
        self.may_store.wait(0.05)
        if self.fails:
            raise OSError("no memory")
        super().write(ids, rows)


class CountingLink(HostLink):
    """Memory apart, as a GPU's is: what may be read, and who brought it over."""

    is_apart = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()

    def ready(self, rows: torch.Tensor) -> Any:
        self.events.append("ready")
        return len(rows)

    def to_host(self, rows: torch.Tensor, ready: Any) -> torch.Tensor:
        assert ready == len(rows)
        self.events.append("to host")
        self.threads.add(threading.get_ident())
        return rows.clone()

    def to_device(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        self.events.append("to device")
        return torch.stack(list(rows))


@pytest.fixture
def arena() -> KVArena:
    """Block i holds the number i."""
    arena = KVArena(SPEC, 8)
    arena.write_blocks(range(8), torch.arange(8, dtype=torch.uint8).view(8, 1).expand(8, SPEC.block_bytes))
    return arena


def swaps(*pairs: tuple[int, int]) -> list[BlockTransfer]:
    return [BlockTransfer(BlockId(device), HostBlockId(host)) for device, host in pairs]


def numbers(place: KVArena | HostTier, ids: Sequence[int]) -> list[int]:
    rows = torch.stack(list(place.rows(ids)))
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


def test_a_block_may_be_written_again_while_it_is_still_being_stored(arena: KVArena) -> None:
    tier = SlowTier()
    mover = BlockMover(arena, tier, CountingLink())
    with torch.inference_mode():
        mover.begin(StepPlan(stores=swaps((1, 5), (2, 6)), copies=[BlockCopy(BlockId(7), BlockId(1))]))  # type: ignore[arg-type]
        assert numbers(arena, [1, 2]) == [7, 2], "the step goes on before anything is stored"
        arena.write_blocks([2], torch.full((1, SPEC.block_bytes), 99, dtype=torch.uint8))
        tier.may_store.set()
        mover.finish()
    assert numbers(tier, [5, 6]) == [1, 2]
    assert tier.threads != [threading.get_ident()]


def test_what_comes_back_in_the_same_step_waits_until_it_is_stored(arena: KVArena) -> None:
    tier = SlowTier()
    mover = BlockMover(arena, tier, CountingLink())
    mover.begin(StepPlan(stores=swaps((1, 5)), loads=swaps((3, 5))))  # type: ignore[arg-type]
    assert numbers(arena, [3]) == [1]
    mover.finish()


def test_pieces_arrive_each_in_its_place(arena: KVArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "_PIECE_BYTES", 2 * SPEC.block_bytes)
    tier = SlowTier()
    tier.may_store.set()
    mover = BlockMover(arena, tier, CountingLink())
    mover.begin(StepPlan(stores=swaps(*((i, 7 - i) for i in range(1, 8)))))  # type: ignore[arg-type]
    mover.finish()
    assert numbers(tier, range(7)) == [7, 6, 5, 4, 3, 2, 1]
    assert len(tier.threads) == 4


def test_a_failure_to_store_is_raised_when_the_step_ends_and_once(arena: KVArena) -> None:
    tier = SlowTier()
    tier.fails = True
    mover = BlockMover(arena, tier, CountingLink())
    mover.begin(StepPlan(stores=swaps((1, 5))))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no memory"):
        mover.finish()
    mover.finish()


def test_on_a_cpu_blocks_are_stored_in_their_turn_and_copied_once(arena: KVArena) -> None:
    """A copy aside and a thread would take their time from the computation, which uses every core."""
    tier = SlowTier()
    tier.may_store.set()
    mover = BlockMover(arena, tier)
    mover.begin(StepPlan(stores=swaps((1, 5), (3, 0)), copies=[BlockCopy(BlockId(7), BlockId(1))]))  # type: ignore[arg-type]
    assert numbers(tier, [5, 0]) == [1, 3], "before the step's own copies"
    assert tier.threads == [threading.get_ident()]
    assert tier.stored[0].data_ptr() == arena.rows([1])[0].data_ptr()
    assert mover.store_seconds > 0
    mover.begin(StepPlan(loads=swaps((2, 0), (4, 5))))  # type: ignore[arg-type]
    assert numbers(arena, [2, 4]) == [3, 1]
    assert (mover.store_seconds, mover.load_seconds > 0) == (0.0, True), "of this step alone"


@pytest.mark.parametrize("piece", [1, 2])
def test_blocks_cross_to_another_memory_while_the_step_computes_and_back_before_it(
    arena: KVArena, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(swapping, "_PIECE_BYTES", piece * SPEC.block_bytes)
    tier, link = HostTier(8, SPEC.block_bytes), CountingLink()
    mover = BlockMover(arena, tier, link)
    mover.begin(StepPlan(stores=tuple(swaps((2, 0), (3, 1)))))
    mover.finish()
    assert sorted(link.events) == ["ready"] * (2 // piece) + ["to host"] * (2 // piece)
    assert threading.get_ident() not in link.threads
    link.events.clear()
    mover.begin(StepPlan(loads=tuple(swaps((5, 1), (6, 0)))))
    assert link.events == ["to device"] * (2 // piece)
    assert numbers(arena, [5, 6]) == [3, 2]
    mover.finish()
