"""Run `octavo serve` with steps that raise now and then, for `fuzz_bodies.py`.

    python -m tests.campaigns.faulty_server SHARE serve …

It raises before and after planning and computing a step, with probability SHARE each and sometimes twice in a row, and
when a sequence's blocks are published, with a hundredth of that. Admission reserves no blocks for running sequences, so
that they are preempted all the time.
"""

from __future__ import annotations

import random
import sys
from typing import Any

# The share of faults that are followed by another one. There are never three in a row: an engine whose probe, a request
# of its own, fails three times rightly considers itself dead.
PAIRS = 0.1


class Faults:
    """Decides when something raises."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._rng = random.Random(1)
        self._in_a_row = 0
        self._again = False

    def strike(self, place: str, share: float = 1.0) -> None:
        """Raise with the given probability."""
        if self._in_a_row == 1 and self._again:
            self._again = False
        elif self._in_a_row >= 2 or self._rng.random() >= self._share * share:
            self._in_a_row = 0
            return
        else:
            self._again = self._rng.random() < PAIRS
        self._in_a_row += 1
        raise RuntimeError(f"injected {place}")

    def around(self, owner: Any, name: str, share: float = 1.0, *, after: bool = True) -> None:
        """Raise before a method does its work, or after it."""
        original = getattr(owner, name)

        def replaced(this: Any, *args: Any, **options: Any) -> Any:
            self.strike(f"before {name}", share)
            result = original(this, *args, **options)
            if after:
                self.strike(f"after {name}", share)
            return result

        setattr(owner, name, replaced)


def main() -> int:
    from octavo import cli
    from octavo.kvcache.manager import KVCacheManager
    from octavo.runner.runner import ModelRunner
    from octavo.scheduler.admission import Admission
    from octavo.scheduler.scheduler import Scheduler

    faults = Faults(float(sys.argv[1]))
    faults.around(ModelRunner, "execute")
    faults.around(Scheduler, "schedule")
    faults.around(KVCacheManager, "commit", 0.01, after=False)
    Admission._reserve = lambda *_: 0
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
