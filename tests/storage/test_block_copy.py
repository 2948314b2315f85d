"""Copies of blocks by the Triton kernel."""

from __future__ import annotations

import pytest
import torch

from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import BlockLayout, KVArena
from tests.attention.triton_device import DEVICE, ON_GPU, needs_triton

pytestmark = needs_triton


def test_whole_blocks_are_copied_and_no_others() -> None:
    from octavo.storage.block_copy import copy_blocks

    blocks = torch.randint(0, 256, (6, 3 * 16384 + 64), dtype=torch.uint8, device=DEVICE)
    expected = blocks.clone()
    expected[[4, 1]] = blocks[[2, 5]]
    copy_blocks(blocks, blocks, [(2, 4), (5, 1)])
    assert torch.equal(blocks, expected)


def test_blocks_leave_the_arena_and_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.storage import block_copy

    spec = KVCacheSpec.build([LayerKVSpec(2, 16, 16)], 16, "float16")
    arena = KVArena(spec, 6, DEVICE, BlockLayout.TOKENS)
    if not ON_GPU:  # there the arena does so by itself
        monkeypatch.setattr(arena, "_copy", block_copy.copy_blocks)
    given = torch.randint(0, 256, (3, spec.block_bytes), dtype=torch.uint8)
    arena.write_blocks([5, 2, 3], given)
    assert torch.equal(arena.read_blocks([2, 5]).cpu(), given[[1, 0]])
    arena.copy_blocks([(2, 3), (3, 4)])  # one is read and written
    assert torch.equal(arena.read_blocks([3, 4, 5]).cpu(), given[[1, 2, 0]])
    assert not arena.read_blocks([0, 1]).any()
