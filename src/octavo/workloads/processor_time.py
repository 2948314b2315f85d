"""Processor time of other programs during a measurement."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_PROC = Path("/proc")
_SPAN_S = 0.5  # a clock tick of the kernel's accounting, 10 ms, is one of a hundred on two processors


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all processors' time, from 0 to 1.

    Attributes:
        others: used by processes that are neither this one nor its descendants.
        stolen: given to other virtual machines by the host.
    """

    others: float
    stolen: float

    @property
    def taken(self) -> float:
        return self.others + self.stolen


class TakenSpan(NamedTuple):
    """A part of a measurement, by `time.perf_counter`, and the share of CPU time that others had in it."""

    began: float
    ended: float
    taken: float


class ProcessorTime:
    """The processor time since its creation."""

    def __init__(self) -> None:
        self._before = _times()

    def shares(self) -> Shares | None:
        """Return the shares since the creation; None where the system does not tell, which only Linux does."""
        after = _times()
        if self._before is None or after is None:
            return None
        total, busy, stolen, own = (late - early for early, late in zip(self._before, after, strict=True))
        if total <= 0:
            return Shares(0.0, 0.0)
        return Shares(min(1.0, max(0.0, (busy - own) / total)), stolen / total)


class ProcessorWatch:
    """Within its context, notes every half second how much of the processors' time others used."""

    def __init__(self) -> None:
        self.spans: list[TakenSpan] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="processor-watch", daemon=True)

    def __enter__(self) -> ProcessorWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:
            began, processors = time.perf_counter(), ProcessorTime()
            ended = self._stop.wait(_SPAN_S)
            if (shares := processors.shares()) is not None:
                self.spans.append(TakenSpan(began, time.perf_counter(), shares.taken))


def disturbed(spans: Sequence[TakenSpan], most: float, most_left_out: float = 0.5) -> list[TakenSpan]:
    """Return the spans in which others took more than `most`.

    None, if they last longer than the share `most_left_out` of all: what is left would be too little to measure with.
    """
    found = [span for span in spans if span.taken > most]
    return found if _seconds(found) <= most_left_out * _seconds(spans) else []


def _seconds(spans: Sequence[TakenSpan]) -> float:
    return sum(span.ended - span.began for span in spans)


def _times() -> tuple[float, float, float, float] | None:
    """Return seconds of all processors, of them busy and stolen, and of this process and its descendants."""
    if not (stat := _PROC / "stat").exists():
        return None
    user, nice, system, idle, wait, irq, soft, stolen = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    busy, tick = user + nice + system + irq + soft, os.sysconf("SC_CLK_TCK")
    return (busy + idle + wait + stolen) / tick, busy / tick, stolen / tick, _ticks_of_tree(os.getpid()) / tick


def _ticks_of_tree(pid: int) -> int:
    """Return the clock ticks of a process, of its children that have ended, and of its living descendants."""
    ticks, waiting = 0, [pid]
    while waiting:
        folder = _PROC / str(waiting.pop())
        # After the name, which may hold blanks and brackets, come fields 3 and following of proc_pid_stat(5).
        ticks += sum(map(int, _read(folder / "stat").rpartition(")")[2].split()[11:15]))
        for children in folder.glob("task/*/children"):
            waiting += map(int, _read(children).split())
    return ticks


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process or the thread has just ended
        return ""
