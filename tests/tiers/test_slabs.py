"""Slabs as files: their layout, and what `octavo cache` reads of them without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.tiers.base import Reason
from octavo.tiers.header import Header, make_header
from octavo.tiers.slabs import ALIGNMENT, SlabLayout, stored_blocks
from tests.tiers.stores import FINGERPRINT, fill, label, overwrite, payload, payload_at, slab


def test_a_slab_has_as_many_slots_as_its_size_holds_with_their_headers() -> None:
    layout = SlabLayout.within(128 << 10, 5000)
    assert (layout.num_slots, layout.slot_bytes) == (15, 8192)
    assert layout.slab_bytes <= 128 << 10 < SlabLayout(5000, 16).slab_bytes


@pytest.mark.parametrize("at", [16, 24])
def test_a_slab_whose_sizes_are_not_the_files_is_told_and_not_believed(tmp_path: Path, at: int) -> None:
    fill(tmp_path, 0)
    overwrite(slab(tmp_path), at, b"\xff" * 8)
    assert list(stored_blocks(tmp_path / FINGERPRINT.hex())) == [(Reason.TRUNCATED, False)]


def test_what_lies_there_can_be_listed_and_proven_without_the_model(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1, 2)
    overwrite(slab(tmp_path), payload_at(tmp_path, 1), b"torn")
    found = list(stored_blocks(tmp_path / FINGERPRINT.hex()))
    assert [whole for _, whole in found].count(True) == 2
    assert all(isinstance(header, Header) for header, _ in found)


def test_a_block_of_another_model_or_size_is_told_under_its_reason(tmp_path: Path) -> None:
    fill(tmp_path, 0, 1)
    other = make_header(b"g" * 16, label(0), memoryview(payload(0)))
    short = make_header(FINGERPRINT, label(1), memoryview(payload(1))[:-1])
    overwrite(slab(tmp_path), ALIGNMENT, other + short)
    found = stored_blocks(tmp_path / FINGERPRINT.hex())
    assert list(found) == [(Reason.FINGERPRINT, False), (Reason.TRUNCATED, False)]
