"""Who used the processors: this process, other programs, or the host's other guests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.workloads import processor_time
from octavo.workloads.processor_time import ProcessorTime, ProcessorWatch, TakenSpan, disturbed


class Proc:
    """A made-up /proc with clock ticks of 10 ms."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(processor_time, "_PROC", folder)
        monkeypatch.setattr(os, "sysconf", lambda name: 100)

    def totals(self, user: int, nice: int, system: int, idle: int, stolen: int) -> None:
        written = self.folder / "stat.new"  # whole at once: a watch reads it meanwhile
        written.write_text(f"cpu  {user} {nice} {system} {idle} 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n")
        written.replace(self.folder / "stat")

    def process(self, pid: int, user: int, ended: int = 0, children: str = "") -> None:
        """A process with its own ticks, those of its children that have ended, and living children of its thread."""
        (task := self.folder / str(pid) / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        blanks = " ".join(["0"] * 10)
        (task.parent.parent / "stat").write_text(f"{pid} (a name) b) S {blanks} {user} 0 {ended} 0 20 0")
        (task / "children").write_text(children)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    return Proc(tmp_path, monkeypatch)


def test_what_neither_this_process_nor_its_descendants_used_others_did(proc: Proc) -> None:
    me = os.getpid()
    proc.totals(1000, 0, 0, 5000, 0)
    proc.process(me, 10)
    measured = ProcessorTime()
    proc.process(me, 100, ended=110, children="2 3 ")
    proc.process(2, 150, children="4 ")
    proc.process(4, 150)
    proc.totals(1400, 100, 100, 5300, 100)
    shares = measured.shares()
    assert shares is not None
    assert shares.others == pytest.approx(0.1), "1 of 10 seconds: 6 were busy, 5 with ourselves; child 3 has gone"
    assert shares.stolen == pytest.approx(0.1)
    assert shares.taken == pytest.approx(0.2)


def test_where_the_system_does_not_tell_nothing_is_claimed(proc: Proc) -> None:
    assert ProcessorTime().shares() is None
    with ProcessorWatch() as watch:
        pass
    assert watch.spans == []


def test_a_watch_covers_its_whole_context(proc: Proc) -> None:
    proc.totals(0, 0, 0, 0, 0)
    proc.process(os.getpid(), 0)
    with ProcessorWatch() as watch:
        proc.totals(50, 0, 0, 50, 0)
    assert watch.spans, "the last span ends with the context, however short"
    assert all(span.began <= span.ended for span in watch.spans)


def test_spans_in_which_others_computed_are_left_out_unless_that_is_most_of_the_time() -> None:
    quiet, busy = [TakenSpan(i, i + 1, 0.01) for i in range(4)], [TakenSpan(4, 6, 0.3)]
    assert disturbed([*quiet, *busy], most=0.05) == busy
    assert disturbed([*quiet[:1], *busy], most=0.05) == []
    assert disturbed([], most=0.05) == []
