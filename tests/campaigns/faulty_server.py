"""Run `octavo serve` with steps that raise now and then, for `endurance.py`.

    python -m tests.campaigns.faulty_server LOG COUNTERS SHARE serve …

It raises before and after planning and computing a step, with probability SHARE each and sometimes twice in a row, and
when a sequence's blocks are published, with a hundredth of that. A prompt that contains `CURSE` cannot be computed at
all. Admission reserves no blocks for running sequences, so that they are preempted all the time. The log goes to LOG,
and the counters, as JSON, to COUNTERS when the server has ended.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Token ids that no other prompt of the benchmark contains.
CURSE = (250, 251, 252, 253)
# The share of faults that are followed by another one. There are never three in a row: an engine whose probe, a request
# of its own, fails three times rightly considers itself dead.
PAIRS = 0.1


class Faults:
    """Decides when something raises. Nothing does while the file `CALM` exists next to the log."""

    def __init__(self, share: float, calm: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.scheduler: Any = None
        self._share = share
        self._calm = calm
        self._rng = random.Random(1)
        self._in_a_row = 0
        self._again = False

    def strike(self, place: str, share: float = 1.0) -> None:
        """Raise with the given probability."""
        if self._in_a_row == 1 and self._again:
            self._again = False
        elif self._in_a_row >= 2 or self._rng.random() >= self._share * share or self._calm.exists():
            self._in_a_row = 0
            return
        else:
            self._again = self._rng.random() < PAIRS
        self._in_a_row += 1
        self.counts[place] += 1
        raise RuntimeError(f"injected {place}")

    def around(self, owner: Any, name: str) -> None:
        """Raise before or after a method does its work."""
        original = getattr(owner, name)

        def replaced(this: Any, *args: Any, **options: Any) -> Any:
            self.strike(f"before {name}")
            result = original(this, *args, **options)
            self.strike(f"after {name}")
            return result

        setattr(owner, name, replaced)

    def before(self, owner: Any, name: str, share: float) -> None:
        original = getattr(owner, name)

        def replaced(this: Any, *args: Any, **options: Any) -> Any:
            self.strike(f"in {name}", share)
            return original(this, *args, **options)

        setattr(owner, name, replaced)

    def curse(self, owner: Any) -> None:
        """Raise for every plan that computes `CURSE`."""
        original = owner.execute

        def replaced(this: Any, plan: Any) -> Any:
            if CURSE[0] in plan.token_ids and any(
                plan.token_ids[i : i + len(CURSE)] == CURSE
                for i, token in enumerate(plan.token_ids)
                if token == CURSE[0]
            ):
                self.counts["cursed"] += 1
                raise RuntimeError("injected: cursed")
            return original(this, plan)

        owner.execute = replaced

    def remember(self, owner: type) -> None:
        """Keep a reference to the scheduler, for its counters."""
        original: Callable[..., Any] = owner.schedule  # type: ignore[attr-defined]

        def replaced(this: Any) -> Any:
            self.scheduler = this
            return original(this)

        owner.schedule = replaced  # type: ignore[attr-defined]


def main() -> int:
    log, counters, share = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    # The line that says that it serves stays on stdout, where `running_server` looks for it.
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    from octavo import cli
    from octavo.kvcache.manager import KVCacheManager
    from octavo.runner.runner import ModelRunner
    from octavo.scheduler.admission import Admission
    from octavo.scheduler.scheduler import Scheduler

    faults = Faults(share, log.with_name("CALM"))
    faults.curse(ModelRunner)
    faults.around(ModelRunner, "execute")
    faults.remember(Scheduler)
    faults.around(Scheduler, "schedule")
    faults.before(KVCacheManager, "commit", 0.01)
    Admission._reserve = lambda *_: 0
    code = cli.main(sys.argv[4:])
    found: dict[str, Any] = {"faults": faults.counts}
    if faults.scheduler is not None:
        found["scheduler"] = asdict(faults.scheduler.counters)
        hierarchy = faults.scheduler.kv.hierarchy
        found["swap"] = asdict(hierarchy.swapped)
    counters.write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main())
