"""Recordings of executed plans and their durations, for the simulator and for fitting step-time models.

They hold numbers only: what was computed and how long it took, but no token ids. A recording is gzipped lines of JSON:

    {"octavo plans": 3, "block_size": 16, …}                                       facts about the engine
    [step, at, seconds, num_moved, [sequence ids], [starts], [lengths], [draws]]   one line per step, as `RecordedStep`

It is written in pieces of whole lines, each a gzip member of about 64 KiB uncompressed. A truncated file is read as far
as it goes.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from octavo.errors import ConfigError
from octavo.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

VERSION = 3
DEFAULT_MAX_BYTES = 1 << 30

_NAME = "octavo plans"
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One executed plan. `starts`, `lengths` and `draws` have an entry for each of `seq_ids`.

    Attributes:
        at: start time by `time.perf_counter`, which on Linux is one clock for all processes, including clients.
        seconds: time from submitting the plan to having its result.
        num_moved: blocks copied, stored or loaded before it.
    """

    step: int
    at: float
    seconds: float
    seq_ids: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    draws: tuple[int, ...]
    num_moved: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class PlanLog:
    """Writes a recording, buffered and bounded in size.

    Args:
        facts: JSON-serialisable facts about the engine.
        max_bytes: size of the file at which the recording ends with a warning.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path, facts: Mapping[str, Any], max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._path, self._max_bytes = Path(path), max_bytes
        self._lines: list[str] = []
        self._num_pending = 0  # characters in them
        # The last columns and their JSON: steps of streams differ in little but their starts.
        self._columns: list[tuple[int, ...]] = [()] * 4
        self._encoded = ["[]"] * 4
        head = gzip.compress(json.dumps({_NAME: VERSION, **facts}).encode() + b"\n", mtime=0)
        self._num_bytes = len(head)
        try:
            # The facts can be read before the first step is computed.
            self._path.write_bytes(head)
            self._file: BinaryIO | None = self._path.open("ab")
        except OSError as error:
            raise ConfigError(f"record_plans: cannot write {str(path)!r}: {error.strerror}") from error

    def record(self, plan: StepPlan, began: float, seconds: float) -> None:
        """Append a plan whose execution started at `began` (`time.perf_counter`), unless the file is full."""
        if self._file is None:
            return
        num_moved = len(plan.copies) + len(plan.stores) + len(plan.loads)
        columns = [plan.seq_ids, plan.starts, plan.lengths, plan.draws]
        for number, values in enumerate(columns):
            if values != self._columns[number]:
                self._columns[number], self._encoded[number] = values, json.dumps(values, separators=(",", ":"))
        numbers = json.dumps([plan.step, began, seconds, num_moved], separators=(",", ":"))
        self._lines.append(f"{numbers[:-1]},{','.join(self._encoded)}]\n")
        self._num_pending += len(self._lines[-1])
        if self._num_pending >= _PIECE_BYTES:
            self._flush(self._file)

    def close(self) -> None:
        """Write what is buffered and close the file. May be called again."""
        if self._file is not None and self._lines:
            self._flush(self._file)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self, file: BinaryIO) -> None:
        piece = gzip.compress("".join(self._lines).encode(), 1, mtime=0)
        self._lines, self._num_pending = [], 0
        self._num_bytes += len(piece)
        try:
            if self._num_bytes <= self._max_bytes:
                file.write(piece)
                file.flush()
                return
            logger.warning("%s has reached %d bytes: no more plans are recorded", self._path, self._max_bytes)
            file.close()
        except OSError as error:
            # A full disk ends the recording, not the service.
            logger.warning("%s: no more plans are recorded: %s", self._path, error)
        self._file = None


def read_facts(path: str | Path) -> dict[str, Any]:
    """Return the facts about the engine from a recording.

    Raises:
        ConfigError: the file cannot be read, or is not a recording of this version.
    """
    with _opened(path) as (_, facts):
        return facts


def read_plans(path: str | Path) -> Iterator[RecordedStep]:
    """Yield the steps of a recording in order.

    Raises:
        ConfigError: the file cannot be read, is not a recording of this version, or is damaged.
    """
    with _opened(path) as (file, _):
        for line in file:
            step, at, seconds, num_moved, *columns = json.loads(line)
            seq_ids, starts, lengths, draws = map(tuple, columns)
            yield RecordedStep(step, at, seconds, seq_ids, starts, lengths, draws, num_moved)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[TextIO, dict[str, Any]]]:
    """Open a recording and read its facts; turns what may go wrong in reading it into `ConfigError`s."""
    facts = None
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            facts = json.loads(file.readline() or "null")
            if not isinstance(facts, dict) or facts.pop(_NAME, None) != VERSION:
                raise ConfigError(f"{str(path)!r} is not a recording of plans of version {VERSION}")
            yield file, facts
    except EOFError:
        if facts is None:
            raise ConfigError(f"{str(path)!r} is a recording of plans whose first line is incomplete") from None
    except (ValueError, TypeError, zlib.error, gzip.BadGzipFile) as error:
        what = "is not a recording of plans of version" if facts is None else "is a damaged recording of plans, version"
        raise ConfigError(f"{str(path)!r} {what} {VERSION}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
