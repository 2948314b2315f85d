"""Blocks on disk: preallocated files of fixed slots, whose headers say what lies there.

    DIR/LOCK                          held by the one process that writes here
    DIR/FINGERPRINT/model.json        which model these blocks are of, for people
    DIR/FINGERPRINT/slab-00000.kv     | sizes, 4 KiB | headers, 112 B a slot | slot 0 | slot 1 | … |

Slots begin at multiples of 4 KiB. A block is written before its header, and nothing is synced: whatever a crash leaves,
the checksum over header and payload tells it from a block. A start reads the headers alone; a payload is proven each
time it is loaded. A slot is given up for another block, never moved.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.errors import ConfigError
from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.recency import LruEviction
from octavo.kvcache.label import Label
from octavo.tiers.base import LAYOUT_VERSION, Reason
from octavo.tiers.header import HEADER_BYTES, Header, make_header, read_header

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
SLAB_BYTES = 256 << 20
GROW_AGAIN_SECONDS = 30.0
"""Where the file system has no room for a slab, another is tried after so long."""

_SLAB_MAGIC = b"OCTAVOSL"
_SIZES = struct.Struct("<8sIIQQ")  # magic, layout version, reserved, bytes of a block, slots


class DiskMedium:
    """One model's slots under a directory.

    Args:
        folder: DIR; made where it is not there.
        size: bytes that all models' slabs in it may take.
        fingerprint: 16 bytes: of the weights, dtype, codec and block size.
        block_bytes: of a block.
        describe: written beside the slabs, for `octavo cache info`.
        eviction: order in which slots are given up; least recently used by default.

    Raises:
        ConfigError: another process writes there, the folder cannot be made, or the size does not hold a block.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        size: int,
        fingerprint: bytes,
        block_bytes: int,
        *,
        describe: dict[str, str] | None = None,
        eviction: EvictionPolicy | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._slot_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        slots = slots_within(min(slab_bytes, size), self._slot_bytes)
        if slots < 1:
            raise ConfigError(
                f"kv_disk_size is {size} bytes, but a block on disk takes {slab_layout(self._slot_bytes, 1)[1]}"
            )
        self._root, self._size = folder, size
        self._fingerprint, self._block_bytes = fingerprint, block_bytes
        self._slots_per_slab = slots
        self._payloads_at, self._slab_bytes = slab_layout(self._slot_bytes, slots)
        self._lock = threading.Lock()
        self._eviction = LruEviction() if eviction is None else eviction
        self._slots: dict[bytes, int] = {}
        self._headers: dict[int, bytes] = {}
        self._readers: dict[int, int] = {}
        self._free: list[int] = []
        self._files: list[int] = []
        self._number = 0
        self._may_grow_at = 0.0
        self.num_evicted = 0
        try:
            self._lock_file = _lock(folder)
            self._folder = folder / fingerprint.hex()
            self._folder.mkdir(exist_ok=True)
            (self._folder / "model.json").write_text(json.dumps(describe or {}) + "\n")
            os.utime(self._folder)
        except OSError as error:
            raise ConfigError(f"kv_disk: cannot write to {folder}: {error}") from error
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        return len(self._slots)

    def contains(self, key: bytes) -> bool:
        return key in self._slots

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        self._read_ahead(labels)
        return [self._read(label, buffer) for label, buffer in zip(labels, buffers, strict=True)]

    def write(self, label: Label, payload: memoryview) -> Reason | None:
        with self._lock:
            if label.key in self._slots:
                return None
            slot = self._take_slot()
            if slot is None:
                return Reason.NO_SPACE
            self._number += 1
            number = self._number
        header = make_header(self._fingerprint, label, payload, number)
        try:
            # The payload first: until its header follows, the old one proves nothing of what lies here.
            _write_all(self._file(slot), payload, self._payload_at(slot))
            _write_all(self._file(slot), memoryview(header), self._header_at(slot))
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        with self._lock:
            if label.key in self._slots:
                self._free.append(slot)
            else:
                self._note(slot, label.key, header)
        return None

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
        self._slots = {}
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _read_ahead(self, labels: Sequence[Label]) -> None:
        """Have the system begin to read all of them: the disk is busy while one block is copied and proven."""
        if len(labels) < 2 or not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            slots = [slot for label in labels if (slot := self._slots.get(label.key)) is not None]
        for slot in slots:
            os.posix_fadvise(self._file(slot), self._payload_at(slot), self._block_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, label: Label, buffer: memoryview) -> Reason | None:
        with self._lock:
            slot = self._slots.get(label.key)
            if slot is None:
                return Reason.ABSENT
            raw = self._headers[slot]
            readers = self._readers.get(slot, 0)
            if not readers:
                self._eviction.remove(BlockId(slot + 1))
            self._readers[slot] = readers + 1
        reason: Reason | None = Reason.IO_ERROR
        try:
            reason = self._read_slot(slot, raw, label, buffer)
        finally:
            with self._lock:
                self._readers[slot] -= 1
                last = not self._readers[slot]
                if last:
                    del self._readers[slot]
                    self._eviction.hit([BlockId(slot + 1)], 0)
                    self._eviction.add(BlockId(slot + 1))
                    if reason in (Reason.CHECKSUM, Reason.TRUNCATED) and self._slots.get(label.key) == slot:
                        self._drop(label.key, slot)
        return reason

    def _read_slot(self, slot: int, raw: bytes, label: Label, buffer: memoryview) -> Reason | None:
        header = read_header(raw)
        if isinstance(header, Reason):
            return header
        if (reason := header.matches(self._fingerprint, label, buffer.nbytes)) is not None:
            return reason
        done = 0
        while done < buffer.nbytes:
            count = os.preadv(self._file(slot), [buffer[done:]], self._payload_at(slot) + done)
            if not count:
                return Reason.TRUNCATED
            done += count
        return None if header.proves(buffer) else Reason.CHECKSUM

    def _take_slot(self) -> int | None:
        """A slot that nobody reads, and of which nobody will find what lies in it."""
        if not self._free and not self._grow():
            if not len(self._eviction):
                return None
            slot = self._eviction.evict() - 1
            header = read_header(self._headers.pop(slot))
            assert isinstance(header, Header)
            del self._slots[header.key]
            self.num_evicted += 1
            return slot
        return self._free.pop()

    def _drop(self, key: bytes, slot: int) -> None:
        self._eviction.remove(BlockId(slot + 1))
        del self._slots[key], self._headers[slot]
        self._free.append(slot)

    def _note(self, slot: int, key: bytes, header: bytes) -> None:
        self._slots[key] = slot
        self._headers[slot] = header
        self._eviction.publish(BlockId(slot + 1), 0, 0, key)
        self._eviction.add(BlockId(slot + 1))

    def _grow(self) -> bool:
        """Another slab, within the size that all may take; other models' oldest go for it."""
        if time.monotonic() < self._may_grow_at:
            return False
        while _slab_bytes_in(self._root) + self._slab_bytes > self._size:
            others = [folder for folder in model_folders(self._root) if folder != self._folder]
            if not others:
                return False
            oldest = min(others, key=lambda f: f.stat().st_mtime)
            logger.info("disk: the blocks of %s go for those of this model", oldest.name)
            shutil.rmtree(oldest)
        path = self._folder / f"slab-{len(self._files):05}.kv"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, self._slab_bytes)
            sizes = _SIZES.pack(_SLAB_MAGIC, LAYOUT_VERSION, 0, self._block_bytes, self._slots_per_slab)
            _write_all(file, memoryview(sizes), 0)
        except OSError as error:
            os.close(file)
            path.unlink(missing_ok=True)
            logger.warning("disk: no further %d bytes for slots: %s", self._slab_bytes, error)
            self._may_grow_at = time.monotonic() + GROW_AGAIN_SECONDS
            return False
        self._add(file)
        return True

    def _add(self, file: int) -> None:
        first = len(self._files) * self._slots_per_slab
        self._files.append(file)
        self._free.extend(range(first + self._slots_per_slab - 1, first - 1, -1))

    def _open_all(self) -> None:
        """Read the headers of what an earlier process left."""
        found: list[tuple[int, int, Header, bytes]] = []
        for path in sorted(self._folder.glob("slab-*.kv")):
            expected = self._folder / f"slab-{len(self._files):05}.kv"
            file = os.open(path, os.O_RDWR)
            sizes = os.pread(file, _SIZES.size, 0)
            wanted = _SIZES.pack(_SLAB_MAGIC, LAYOUT_VERSION, 0, self._block_bytes, self._slots_per_slab)
            too_many = (len(self._files) + 1) * self._slab_bytes > self._size
            if sizes != wanted or os.fstat(file).st_size != self._slab_bytes or too_many:
                logger.warning("disk: %s is of another layout or size, or cut short: it is removed", path)
                os.close(file)
                path.unlink()
                continue
            if path != expected:
                path.rename(expected)  # one before it was given up
            first = len(self._files) * self._slots_per_slab
            self._add(file)
            table = os.pread(file, self._slots_per_slab * HEADER_BYTES, ALIGNMENT)
            for index in range(self._slots_per_slab):
                raw = table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
                header = read_header(raw)
                if isinstance(header, Header) and header.fingerprint == self._fingerprint:
                    found.append((header.number, first + index, header, raw))
        found.sort(key=lambda entry: entry[0])
        taken: set[int] = set()
        for number, slot, header, raw in found:
            self._number = max(self._number, number)
            if header.length != self._block_bytes:
                continue
            if (old := self._slots.get(header.key)) is not None:
                self._drop(header.key, old)
                self._free.pop()
                taken.discard(old)
            self._note(slot, header.key, raw)
            taken.add(slot)
        self._free = [slot for slot in self._free if slot not in taken]

    def _file(self, slot: int) -> int:
        return self._files[slot // self._slots_per_slab]

    def _header_at(self, slot: int) -> int:
        return ALIGNMENT + slot % self._slots_per_slab * HEADER_BYTES

    def _payload_at(self, slot: int) -> int:
        return self._payloads_at + slot % self._slots_per_slab * self._slot_bytes


def slab_layout(slot_bytes: int, num_slots: int) -> tuple[int, int]:
    """Where the slots begin in a slab, and its size."""
    payloads_at = ALIGNMENT + -(-num_slots * HEADER_BYTES // ALIGNMENT) * ALIGNMENT
    return payloads_at, payloads_at + num_slots * slot_bytes


def slots_within(size: int, slot_bytes: int) -> int:
    """The most slots of a slab of at most so many bytes."""
    count = max(0, size - ALIGNMENT) // (slot_bytes + HEADER_BYTES)
    while count and slab_layout(slot_bytes, count)[1] > size:
        count -= 1
    return count


def model_folders(root: Path) -> list[Path]:
    """The models' folders in a directory of slabs; whatever else lies there is none of ours."""
    named = (path for path in root.iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name))
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def stored_blocks(folder: Path, *, prove: bool = True) -> Iterator[tuple[Header | Reason, bool]]:
    """Every header in one model's folder, and whether header and payload prove each other; for `octavo cache`.

    Slots that were never written are skipped.

    Args:
        prove: read the payloads; else every one is taken to be whole.
    """
    for path in sorted(folder.glob("slab-*.kv")):
        with path.open("rb") as file:
            sizes = file.read(_SIZES.size)
            if len(sizes) < _SIZES.size:
                yield Reason.TRUNCATED, False
                continue
            magic, version, _, block_bytes, num_slots = _SIZES.unpack(sizes)
            if magic != _SLAB_MAGIC or version != LAYOUT_VERSION:
                yield Reason.LAYOUT, False
                continue
            slot_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
            payloads_at, _ = slab_layout(slot_bytes, num_slots)
            file.seek(ALIGNMENT)
            table = file.read(num_slots * HEADER_BYTES)
            for index in range(num_slots):
                header = read_header(table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES])
                if header is Reason.ABSENT:
                    continue
                if isinstance(header, Reason):
                    yield header, False
                    continue
                if not prove:
                    yield header, True
                    continue
                file.seek(payloads_at + index * slot_bytes)
                payload = file.read(block_bytes)
                yield header, len(payload) == header.length and header.proves(memoryview(payload))


def lock_holder(folder: Path) -> str | None:
    """Who writes to a directory, as its lock file says; None where nobody does."""
    path = folder / "LOCK"
    if not path.exists():
        return None
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return path.read_text().strip() or "another process"
    finally:
        os.close(file)
    return None


def _lock(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        holder = (folder / "LOCK").read_text().strip() or "another process"
        raise ConfigError(
            f"kv_disk: {holder} writes to {folder}, and only one may; give this server another directory"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} of {os.uname().nodename}\n".encode(), 0)
    return file


def _slab_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/slab-*.kv"))


def _write_all(file: int, payload: memoryview, at: int) -> None:
    done = 0
    while done < payload.nbytes:
        done += os.pwrite(file, payload[done:], at + done)
