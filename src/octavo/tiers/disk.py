"""Blocks on disk: slots of preallocated files (`slabs.py`), whose headers describe their contents.

A payload is written before its header, and nothing is synced: the checksum over both tells a valid block from whatever
a crash leaves behind. Only the headers are read at start-up; a payload is verified each time it is loaded. A block is
never moved; its slot is reused once it is evicted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import EvictionPolicy, LruEviction
from octavo.kvcache.hashing import Label
from octavo.tiers.base import Medium, Reason
from octavo.tiers.header import HEADER_BYTES, Header, make_header, read_header
from octavo.tiers.slabs import (
    LEAST_SLAB_SHARE,
    PREAMBLE_BYTES,
    SLAB_BYTES,
    SlabLayout,
    TenantNames,
    lock_directory,
    model_folders,
    slab_bytes_in,
    slab_path,
    slab_paths,
)

logger = logging.getLogger(__name__)

GROW_AGAIN_SECONDS = 30.0
"""Seconds until another slab is tried after the file system had no room for one."""


class _Slab(NamedTuple):
    """An open slab: its file, its layout, and the number of its first slot."""

    file: int
    layout: SlabLayout
    first: int


class DiskMedium(Medium):
    """One model's slots under a directory.

    Args:
        folder: the directory; created if it does not exist.
        size: maximum number of bytes of all models' slabs in the directory.
        fingerprint: 16 bytes that identify the weights, dtype, codec and block size.
        block_bytes: size of a block.
        describe: description of the model, written next to the slabs, for `octavo cache info`.
        eviction: the eviction policy; LRU by default.

    Raises:
        ConfigError: another process writes there, the directory cannot be created, or the size is too small for a
            block.

    Attributes:
        num_evicted: blocks that have made room for others.
        open_misses: see `Medium`; a slab that is cut short or of another layout counts once.
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
        self._layout = SlabLayout.within(min(slab_bytes, size), block_bytes)
        if self._layout.num_slots < 1:
            raise ConfigError(
                f"kv_disk_size is {size} bytes, but a block on disk takes {SlabLayout(block_bytes, 1).slab_bytes}"
            )
        self._root, self._size = folder, size
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._eviction = LruEviction() if eviction is None else eviction
        self._slots: dict[bytes, int] = {}
        self._headers: dict[int, bytes] = {}
        self._readers: dict[int, int] = {}
        self._num_blocks_of = Counter[bytes]()  # by digest of the tenant
        self._free: list[int] = []
        self._slabs: list[_Slab] = []
        self._firsts: list[int] = []  # first slot of each slab
        self._number = 0
        self._is_full = False  # no slab will be added any more
        self._may_grow_at = 0.0
        self.num_evicted = 0
        self.open_misses: Counter[Reason] = Counter()
        try:
            self._lock_file: int | None = lock_directory(folder)
            self._folder = folder / fingerprint.hex()
            self._folder.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"kv_disk: {folder} is a file; give a directory") from error
        except OSError as error:
            raise ConfigError(f"kv_disk: cannot write to {folder}: {error.strerror}") from error
        self._is_read_only = bool(os.statvfs(self._folder).f_flag & os.ST_RDONLY)
        if self._is_read_only:
            logger.warning(
                "disk: %s is on a read-only file system: what lies there is read, nothing is written", folder
            )
        else:
            self._note_use(describe or {})
        try:
            self._names = TenantNames(self._folder)
            self._open_all()
            if not self._is_read_only:
                self._names.keep(self._num_blocks_of)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"kv_disk: cannot use what lies in {self._folder}: {error}; give its files to the user that runs "
                    "this server, or remove them with octavo cache purge"
                ) from error
            raise

    @property
    def num_blocks(self) -> int:
        return len(self._slots)

    def bytes_by_tenant(self) -> dict[str, int]:
        with self._lock:
            counts = list(self._num_blocks_of.items())
        return {self._names.name(digest): count * self._layout.block_bytes for digest, count in counts}

    def contains(self, key: bytes) -> bool:
        return key in self._slots

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        self._read_ahead(labels)
        return [self._read(label, buffer) for label, buffer in zip(labels, buffers, strict=True)]

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        if self._is_read_only:
            return Reason.READ_ONLY
        with self._lock:
            if label.key in self._slots:
                return None
            taken = self._take_slot()
            if taken is None:
                return Reason.NO_SPACE
            slot, evicted = taken
            self._number += 1
            number = self._number
        header = make_header(self._fingerprint, label, payload, number, self._names.digest(tenant))
        try:
            # The payload first: until its own header follows, the old one does not match it.
            file, payload_at, header_at = self._place(slot)
            _write_all(file, payload, payload_at)
            _write_all(file, memoryview(header), header_at)
        except BaseException:
            with self._lock:
                self._put_back(slot, evicted)
            raise
        with self._lock:
            self.num_evicted += evicted is not None
            if label.key in self._slots:
                self._free.append(slot)
            else:
                self._note(slot, header)
        return None

    def close(self) -> None:
        for slab in self._slabs:
            os.close(slab.file)
        self._slabs, self._firsts = [], []
        self._slots = {}
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _note_use(self, described: dict[str, str]) -> None:
        """Write down, for people and for the order in which models' blocks are given up, that the model is served."""
        try:
            (self._folder / "model.json").write_text(json.dumps(described) + "\n")
            os.utime(self._folder)
        except OSError as error:  # of a full disk, whose blocks can still be read
            logger.warning("disk: %s is not written: %s", self._folder / "model.json", error)

    def _read_ahead(self, labels: Sequence[Label]) -> None:
        """Start reading all blocks, so that the disk is busy while one is copied and verified."""
        if len(labels) < 2 or not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            slots = [slot for label in labels if (slot := self._slots.get(label.key)) is not None]
        for slot in slots:
            file, payload_at, _ = self._place(slot)
            os.posix_fadvise(file, payload_at, self._layout.block_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, label: Label, buffer: memoryview) -> Reason | None:
        with self._lock:
            slot = self._slots.get(label.key)
            if slot is None:
                return Reason.ABSENT
            raw = self._headers[slot]
            readers = self._readers.get(slot, 0)
            if not readers:
                self._eviction.remove([BlockId(slot + 1)])
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
                    self._eviction.add([BlockId(slot + 1)])
                    if reason in (Reason.CHECKSUM, Reason.TRUNCATED) and self._slots.get(label.key) == slot:
                        self._drop(slot)
        return reason

    def _read_slot(self, slot: int, raw: bytes, label: Label, buffer: memoryview) -> Reason | None:
        header = read_header(raw)
        if isinstance(header, Reason):
            return header
        if (reason := header.matches(self._fingerprint, label, buffer.nbytes)) is not None:
            return reason
        done, (file, payload_at, _) = 0, self._place(slot)
        while done < buffer.nbytes:
            count = os.preadv(file, [buffer[done:]], payload_at + done)
            if not count:
                return Reason.TRUNCATED
            done += count
        return None if header.proves(buffer) else Reason.CHECKSUM

    def _take_slot(self) -> tuple[int, bytes | None] | None:
        """Take a free slot, or one whose block is not being read; None if there is neither.

        Returns:
            The slot, and the header of the block that was evicted from it, if any.
        """
        if not self._free and not self._grow():
            if not len(self._eviction):
                return None
            slot = self._eviction.evict(1)[0] - 1
            raw = self._headers[slot]
            self._forget(slot)
            return slot, raw
        return self._free.pop(), None

    def _put_back(self, slot: int, evicted: bytes | None) -> None:
        """Undo `_take_slot` after a failed write; if that has damaged the evicted block, its checksum will tell."""
        if evicted is None or _noted(evicted).key in self._slots:
            self._free.append(slot)
            return
        self._enter(slot, evicted)
        self._eviction.restore(BlockId(slot + 1))

    def _drop(self, slot: int) -> None:
        self._eviction.remove([BlockId(slot + 1)])
        self._forget(slot)
        self._free.append(slot)

    def _note(self, slot: int, raw: bytes) -> None:
        self._enter(slot, raw)
        self._eviction.publish(BlockId(slot + 1), 0, _noted(raw).key)
        self._eviction.add([BlockId(slot + 1)])

    def _enter(self, slot: int, raw: bytes) -> None:
        header = _noted(raw)
        self._slots[header.key] = slot
        self._headers[slot] = raw
        self._num_blocks_of[header.tenant] += 1

    def _forget(self, slot: int) -> None:
        header = _noted(self._headers.pop(slot))
        del self._slots[header.key]
        self._num_blocks_of[header.tenant] -= 1
        if not self._num_blocks_of[header.tenant]:
            del self._num_blocks_of[header.tenant]

    def _grow(self) -> bool:
        """Add a slab if the total size allows it, after removing other models' slabs; return whether it was added."""
        if self._is_full or time.monotonic() < self._may_grow_at:
            return False
        try:
            if not self._has_room():
                # For good: the size is fixed, and no other process writes here. Listing the files again for every block
                # took nearly half of the time of writing it.
                self._is_full = True
                return False
            self._add(*self._new_slab())
        except OSError as error:
            logger.warning("disk: no further %d bytes for slots: %s", self._layout.slab_bytes, error)
            self._may_grow_at = time.monotonic() + GROW_AGAIN_SECONDS
            return False
        return True

    def _has_room(self) -> bool:
        """Whether the total size allows one more slab, for which other models' are removed, the oldest first."""
        while slab_bytes_in(self._root) + self._layout.slab_bytes > self._size:
            others = [folder for folder in model_folders(self._root) if folder != self._folder]
            if not others:
                return False
            oldest = min(others, key=lambda f: f.stat().st_mtime)
            logger.info("disk: the blocks of %s go for those of this model", oldest.name)
            shutil.rmtree(oldest)
        return True

    def _new_slab(self) -> tuple[int, SlabLayout]:
        """Create the file of a slab, smaller than usual if the file system has no room for more.

        Raises:
            OSError: there is none for the smallest slab either: that of one block if it is the first.
        """
        layout = self._layout
        least = self._layout.slab_bytes // LEAST_SLAB_SHARE if self._slabs else 0
        while True:
            try:
                return self._create(layout), layout
            except OSError as error:
                smaller = SlabLayout.within(layout.slab_bytes // 2, layout.block_bytes)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not smaller.num_slots:
                    raise
                if smaller.slab_bytes < least:
                    raise
                layout = smaller

    def _create(self, layout: SlabLayout) -> int:
        path = slab_path(self._folder, len(self._slabs))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _reserve(file, layout.slab_bytes)
            _write_all(file, memoryview(layout.pack()), 0)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file

    def _add(self, file: int, layout: SlabLayout) -> None:
        first = self._slabs[-1].first + self._slabs[-1].layout.num_slots if self._slabs else 0
        self._slabs.append(_Slab(file, layout, first))
        self._firsts.append(first)
        self._eviction.reserve(first + layout.num_slots + 1)
        self._free.extend(range(first + layout.num_slots - 1, first - 1, -1))

    def _open_all(self) -> None:
        """Open the slabs of an earlier process and read their headers."""
        found: list[tuple[int, int, bytes]] = []
        for path in slab_paths(self._folder):
            found += self._open_slab(path)
        found.sort()
        taken: set[int] = set()
        for number, slot, raw in found:
            self._number = number
            if (old := self._slots.get(_noted(raw).key)) is not None:
                self._drop(old)
                self._free.pop()
                taken.discard(old)
            self._note(slot, raw)
            taken.add(slot)
        self._free = [slot for slot in self._free if slot not in taken]
        if self.open_misses:
            reasons = ", ".join(f"{count} {reason.value}" for reason, count in sorted(self.open_misses.items()))
            logger.warning("disk: besides %d blocks, damaged ones were found and dropped: %s", self.num_blocks, reasons)

    def _open_slab(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
        """Open a slab and yield its blocks as (number of the write, slot, header); a useless slab is removed."""
        expected = slab_path(self._folder, len(self._slabs))
        file = os.open(path, os.O_RDONLY if self._is_read_only else os.O_RDWR)
        layout = SlabLayout.unpack(os.pread(file, PREAMBLE_BYTES, 0), os.fstat(file).st_size)
        if not isinstance(layout, Reason) and layout.block_bytes != self._layout.block_bytes:
            layout = Reason.LAYOUT
        used = sum(slab.layout.slab_bytes for slab in self._slabs)
        if isinstance(layout, Reason) or used + layout.slab_bytes > self._size:
            logger.warning("disk: %s is of another layout or size, or cut short: it is given up", path)
            if isinstance(layout, Reason):
                self.open_misses[layout] += 1
            os.close(file)
            if not self._is_read_only:
                path.unlink()
            return
        if path != expected and not self._is_read_only:
            path.rename(expected)  # a slab before it was removed
        self._add(file, layout)
        first = self._firsts[-1]
        table = os.pread(file, layout.table_bytes, layout.header_at(0))
        for index in range(layout.num_slots):
            raw = table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
            header = read_header(raw)
            if isinstance(header, Header):
                reason = header.belongs(self._fingerprint.hex(), layout.block_bytes)
            else:
                reason = header
            if reason is None:
                yield _noted(raw).number, first + index, raw
            elif reason is not Reason.ABSENT:
                self.open_misses[reason] += 1

    def _place(self, slot: int) -> tuple[int, int, int]:
        """Return the file that has a slot, and where its payload and its header begin there."""
        slab = self._slabs[bisect_right(self._firsts, slot) - 1]
        index = slot - slab.first
        return slab.file, slab.layout.payload_at(index), slab.layout.header_at(index)


def _noted(raw: bytes) -> Header:
    """Return the fields of a header that was valid when it was noted."""
    header = read_header(raw)
    assert isinstance(header, Header)
    return header


def _reserve(file: int, size: int) -> None:
    """Give a file its size, and its room on the disk where the file system can."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # musl's on NFS, where glibc writes to each page
            raise
        os.ftruncate(file, size)


def _write_all(file: int, payload: memoryview, at: int) -> None:
    done = 0
    while done < payload.nbytes:
        done += os.pwrite(file, payload[done:], at + done)
