"""Recordings of executed plans and their durations, for the simulator and for fitting step-time models.

They hold numbers only: what was computed and how long it took, but no token ids.

    "OCTAVOPLANS 1\\n"
    one line of JSON: facts about the engine (block_size, bytes_per_token, …)
    chunks            [u32 length][length bytes of zlib] …    whole records, together at most ~64 KiB uncompressed

    record, little-endian, without padding
        u64 step      f64 at: `time.perf_counter` when the step began      f64 seconds: duration
        u32 rows, blocks copied, stored or loaded
        i64 × rows    sequence ids
        i32 × rows    starts           tokens computed before the step
        i32 × rows    lengths          tokens computed in it
        i32 × rows    draws            tokens drawn from the row's last logits

A truncated file is read up to its last complete chunk.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from octavo.errors import ConfigError
from octavo.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

VERSION = 2
DEFAULT_MAX_BYTES = 1 << 30

_MAGIC = b"OCTAVOPLANS %d\n" % VERSION
_HEAD = struct.Struct("<Qdd2I")
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16


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

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens in the cache after the step, summed over its rows."""
        return sum(self.starts) + sum(self.lengths)


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
        self._buffer = bytearray()
        head = _MAGIC + json.dumps(dict(facts)).encode() + b"\n"
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
        self._buffer += _HEAD.pack(plan.step, began, seconds, len(plan.seq_ids), num_moved)
        for kind, column in (("q", plan.seq_ids), ("i", plan.starts), ("i", plan.lengths), ("i", plan.draws)):
            self._buffer += _little_endian(array(kind, column)).tobytes()
        if len(self._buffer) >= _CHUNK_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is buffered and close the file. May be called again."""
        if self._file is not None and self._buffer:
            self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        assert self._file is not None
        packed, self._buffer = zlib.compress(self._buffer, 1), bytearray()
        self._num_bytes += _LENGTH.size + len(packed)
        if self._num_bytes > self._max_bytes:
            logger.warning("%s has reached %d bytes: no more plans are recorded", self._path, self._max_bytes)
            self._file.close()
            self._file = None
            return
        try:
            self._file.write(_LENGTH.pack(len(packed)) + packed)
            self._file.flush()
        except OSError as error:
            # A full disk ends the recording, not the service.
            logger.warning("%s: no more plans are recorded: %s", self._path, error)
            self._file = None


def read_facts(path: str | Path) -> dict[str, Any]:
    """Return the facts about the engine from a recording.

    Raises:
        ConfigError: the file cannot be read, or is not a recording of this version.
    """
    with _opened(path) as file:
        return _read_head(file, path)


def read_plans(path: str | Path) -> Iterator[RecordedStep]:
    """Yield the steps of a recording in order.

    Raises:
        ConfigError: the file cannot be read, is not a recording of this version, or is damaged.
    """
    with _opened(path) as file:
        _read_head(file, path)
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            packed = file.read(length)
            if len(packed) < length:
                return
            chunk = zlib.decompress(packed)
            offset = 0
            while offset < len(chunk):
                step, offset = _read_step(chunk, offset)
                yield step


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a recording, and turn what may go wrong in reading it into `ConfigError`s."""
    try:
        with Path(path).open("rb") as file:
            yield file
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, zlib.error) as error:
        raise ConfigError(f"{str(path)!r} is a damaged recording of plans: {error}") from error


def _read_head(file: BinaryIO, path: str | Path) -> dict[str, Any]:
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ConfigError(f"{str(path)!r} is not a recording of plans of version {VERSION}: it begins with {magic!r}")
    line = file.readline()
    facts = json.loads(line) if line else None
    if not isinstance(facts, dict):
        raise ConfigError(f"{str(path)!r} is a damaged recording of plans: its second line has no facts")
    return facts


def _read_step(chunk: bytes, offset: int) -> tuple[RecordedStep, int]:
    step, at, seconds, rows, num_moved = _HEAD.unpack_from(chunk, offset)
    offset += _HEAD.size
    columns: list[tuple[int, ...]] = []
    for kind in "qiii":
        column = array(kind)
        end = offset + rows * column.itemsize
        column.frombytes(chunk[offset:end])
        columns.append(tuple(_little_endian(column)))
        offset = end
    seq_ids, starts, lengths, draws = columns
    return RecordedStep(step, at, seconds, seq_ids, starts, lengths, draws, num_moved), offset


def _little_endian(column: array[int]) -> array[int]:
    if sys.byteorder == "big":
        column.byteswap()
    return column
