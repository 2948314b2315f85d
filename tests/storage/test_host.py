"""Host memory gives back what was put there, and an arena's blocks survive the way out and back."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kvcache.block import BlockId, BlockTransfer, HostBlockId
from octavo.kvcache.spec import KVCacheSpec
from octavo.runner import swapping
from octavo.scheduler.plan import StepPlan
from octavo.storage.arena import KVArena
from octavo.storage.host import HostTier
from tests.kvcache.caches import FULL


def test_blocks_are_read_in_the_order_asked_for() -> None:
    tier = HostTier(4, 64)
    rows = torch.arange(128, dtype=torch.uint8).view(2, 64)
    tier.write([3, 1], rows)
    assert torch.equal(torch.stack(tier.rows([1, 3])), rows.flip(0))


def test_what_a_store_fills_is_what_a_step_reads() -> None:
    tier = HostTier(3, 64)
    tier.row(1)[:] = bytes([5]) * 64
    (row,) = tier.rows([1])
    assert row.tolist() == [5] * 64
    tier.write([1], torch.full((1, 64), 6, dtype=torch.uint8))
    assert bytes(tier.row(1)) == bytes([6]) * 64


def test_a_tier_without_blocks_takes_no_memory_and_less_than_none_is_refused() -> None:
    assert HostTier(0, 64).nbytes == 0
    with pytest.raises(ConfigError, match="0 or more blocks, got -1"):
        HostTier(-1, 64)


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_an_arenas_blocks_survive_the_way_out_and_back_into_others(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(swapping, "_PIECE_BYTES", piece_bytes)
    spec = KVCacheSpec.build((FULL,), 4, "float32")
    arena, tier = KVArena(spec, 8), HostTier(3, spec.block_bytes)
    arena.float_layers[0].key[1:4].normal_()
    before = arena.float_layers[0].key[1:4].clone()
    out = [BlockTransfer(BlockId(i + 1), HostBlockId(2 - i)) for i in range(3)]
    mover = swapping.BlockMover(arena, tier)
    mover.begin(StepPlan(stores=tuple(out)))
    arena.float_layers[0].key.fill_(7)
    mover.begin(StepPlan(loads=tuple(BlockTransfer(BlockId(swap.device + 3), swap.host) for swap in out)))
    assert torch.equal(arena.float_layers[0].key[4:7], before)
