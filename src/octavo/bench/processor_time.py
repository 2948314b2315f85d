"""Who else used the processors during a measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all processors' time, from 0 to 1.

    Attributes:
        others: used by processes that are neither this one nor its children.
        stolen: given to other virtual machines by the host.
    """

    others: float
    stolen: float


class ProcessorTime:
    """The processor time since its creation. Children count once they have ended and been waited for."""

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


def _times() -> tuple[float, float, float, float] | None:
    """Return seconds of all processors, of them busy and stolen, and of this process and its children."""
    if not _STAT.exists():
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, wait, irq, soft, stolen = (
        int(count) / ticks for count in _STAT.read_text().split("\n", 1)[0].split()[1:9]
    )
    busy, own = user + nice + system + irq + soft, os.times()
    mine = own.user + own.system + own.children_user + own.children_system
    return busy + idle + wait + stolen, busy, stolen, mine
