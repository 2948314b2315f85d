"""The memory that something made by the package takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import octavo

Made = TypeVar("Made")


def measured(make: Callable[[], Made]) -> tuple[int, Made]:
    """The bytes that were allocated for something, and the thing. What other threads of the tests take does not count.

    What is made only once, by a first call, does not count either: line coverage keeps something of each new line.
    """
    gc.collect()
    tracemalloc.start(3)
    try:
        made = make()
        gc.collect()
        ours = tracemalloc.Filter(True, f"{Path(octavo.__file__).parent}/*", all_frames=True)
        traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
        return sum(trace.size for trace in traces), made
    finally:
        tracemalloc.stop()
