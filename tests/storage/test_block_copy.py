"""Copies of blocks by the Triton kernel."""

from __future__ import annotations

import torch

from tests.attention.triton_device import DEVICE, needs_triton

pytestmark = needs_triton


def test_whole_blocks_are_copied_and_no_others() -> None:
    from octavo.storage.block_copy import copy_blocks

    blocks = torch.randint(0, 256, (6, 3 * 16384 + 64), dtype=torch.uint8, device=DEVICE)
    expected = blocks.clone()
    expected[[4, 1]] = blocks[[2, 5]]
    copy_blocks(blocks, [(2, 4), (5, 1)])
    assert torch.equal(blocks, expected)
