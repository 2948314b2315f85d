"""Who used the processors: this process, other programs, or the host's other guests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.bench import processor_time
from octavo.bench.processor_time import ProcessorTime


def test_what_neither_this_process_nor_its_children_used_others_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, own = tmp_path / "stat", [0.0, 0.0]
    monkeypatch.setattr(processor_time, "_STAT", stat)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: os.times_result((own[0], 0.0, own[1], 0.0, 0.0)))
    stat.write_text("cpu  1000 0 0 5000 0 0 0 0 0 0\ncpu0 1 2 3\n")
    measured = ProcessorTime()
    own[:] = 2.0, 3.0
    stat.write_text("cpu  1400 100 100 5300 0 0 0 100 0 0\ncpu0 1 2 3\n")
    shares = measured.shares()
    assert shares is not None
    assert shares.others == pytest.approx(0.1), "1 of 10 seconds: 6 were busy, 5 with ourselves"
    assert shares.stolen == pytest.approx(0.1)


def test_where_the_system_does_not_tell_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "_STAT", tmp_path / "missing")
    assert ProcessorTime().shares() is None
