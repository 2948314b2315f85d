"""What drawing tokens takes, whichever way the sampler goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.sampling.sampler import Sampler


def time_sampler(sampler: Sampler, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The seconds of each call of a sampler from now on, appended as it returns. Called again, it starts a new list."""
    seconds: list[float] = []
    depth = 0

    def timed(way: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            began = clock()
            try:
                return way(*args, **options)
            finally:
                depth -= 1
                if not depth:  # one way may go on by another
                    seconds.append(clock() - began)

        return run

    for name in ("sample", "draw", "score"):
        setattr(sampler, name, timed(getattr(type(sampler), name).__get__(sampler)))
    return seconds
