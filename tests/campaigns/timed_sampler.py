"""Measure the time that drawing tokens takes, whichever path the sampler takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.sampling.sampler import Sampler


class SamplerTime:
    """Adds up the seconds of a sampler's calls from now on. A second one for the same sampler replaces the first."""

    def __init__(self, sampler: Sampler, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._depth = 0
        for name in ("sample", "draw", "score"):
            setattr(sampler, name, self._timed(getattr(type(sampler), name).__get__(sampler)))

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, way: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self._depth += 1
            began = self._clock()
            try:
                found = way(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:  # one method may call another
                    self._seconds += self._clock() - began
            if way.__name__ == "draw":
                token_ids, collect = found
                return token_ids, self._timed(collect)
            return found

        return run
