"""Blocks on disk: slots of preallocated files (`slabs.py`), whose headers describe their contents.

Slots are blocks of a `BlockPool`: referenced while they are written or read, else cached or free. A payload is written
before its header, and nothing is synced: the checksum over both distinguishes a valid block from what a crash leaves
behind. Only the headers are read at start-up; a payload is verified each time it is loaded. A block is never moved; its
slot is reused once it is evicted.
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
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.kvcache.block import BlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.eviction import EvictionPolicy, LruEviction
from octavo.kvcache.hashing import Label
from octavo.kvcache.key_index import KeyIndex
from octavo.kvcache.pool import BlockPool
from octavo.tiers.base import Medium, Reason
from octavo.tiers.header import HEADER_BYTES, Header, make_header, prove, read_header
from octavo.tiers.slabs import (
    LEAST_SLAB_SHARE,
    PREAMBLE_BYTES,
    SLAB_BYTES,
    SlabLayout,
    TenantNames,
    lock_directory,
    model_folders,
    read_headers,
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
        num_ids = size // (self._layout.slot_bytes + HEADER_BYTES) + 1
        self._records = BlockRecords(num_ids, in_tree=False)
        self._headers: dict[BlockId, bytes] = {}  # of blocks; that of an evicted one stays until its slot is taken
        policy = LruEviction() if eviction is None else eviction
        self._pool = BlockPool(self._records, policy, (self._records.forget,), grows=True)
        self._pool.count_owners(())  # by the tenant's digest in hexadecimal
        self._slabs: list[_Slab] = []
        self._number = 0
        self._is_full = False  # no slab will be added any more
        self._may_grow_at = 0.0
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
                "disk: %s is on a read-only file system: blocks are read from it, but none are written", folder
            )
        else:
            self._note_use(describe or {})
        try:
            self._names = TenantNames(self._folder)
            self._open_all()
            if not self._is_read_only:
                self._names.keep({_noted(raw).tenant for raw in self._headers.values()})
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"kv_disk: cannot use the files in {self._folder}: {error}; give them to the user that runs this "
                    "server, or delete them with octavo cache purge"
                ) from error
            raise

    @property
    def num_blocks(self) -> int:
        return len(self._records.keys)

    def bytes_by_tenant(self) -> dict[str, int]:
        with self._lock:
            counts = self._pool.by_tenant()
        return {self._names.name(bytes.fromhex(digest)): n * self._layout.block_bytes for digest, n in counts.items()}

    def contains(self, key: bytes) -> bool:
        return self._records.keys.get(key) is not None

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        self._read_ahead(labels)
        return [self._read(label, buffer) for label, buffer in zip(labels, buffers, strict=True)]

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        if self._is_read_only:
            return Reason.READ_ONLY
        digest = self._names.digest(tenant)
        with self._lock:
            if self._records.keys.get(label.key) is not None:
                return None
            if not self._pool.num_free and not self._grow() and not self._pool.num_available:
                return Reason.NO_SPACE
            (slot,) = self._pool.allocate(1, digest.hex())
            evicted = self._headers.pop(slot, None)
            self._number += 1
            number = self._number
        # If the write fails, an evicted block comes back; if that was damaged, its checksum will tell.
        header, stays = make_header(self._fingerprint, label, payload, number, digest), evicted
        try:
            # The payload first: until its own header follows, the old one does not match it.
            file, payload_at, header_at = self._place(slot)
            _write_all(file, payload, payload_at)
            _write_all(file, memoryview(header), header_at)
            stays = header
        finally:
            with self._lock:
                if stays is not None:
                    self._enter(slot, stays)
                self._pool.release([slot])
        return None

    def close(self) -> None:
        for slab in self._slabs:
            os.close(slab.file)
        self._slabs = []
        self._records.keys = KeyIndex(0)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _note_use(self, described: dict[str, str]) -> None:
        """Record that the model is served: for readers, and for the order in which models' blocks are evicted."""
        try:
            (self._folder / "model.json").write_text(json.dumps(described) + "\n")
            os.utime(self._folder)
        except OSError as error:  # of a full disk, whose blocks can still be read
            logger.warning("disk: cannot write %s: %s", self._folder / "model.json", error)

    def _read_ahead(self, labels: Sequence[Label]) -> None:
        """Start reading all blocks, so that the disk is busy while one is copied and verified."""
        if len(labels) < 2 or not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            slots = [slot for label in labels if (slot := self._records.keys.get(label.key)) is not None]
        for slot in slots:
            file, payload_at, _ = self._place(slot)
            os.posix_fadvise(file, payload_at, self._layout.block_bytes, os.POSIX_FADV_WILLNEED)

    def _read(self, label: Label, buffer: memoryview) -> Reason | None:
        with self._lock:
            found = self._records.keys.get(label.key)
            if found is None:
                return Reason.ABSENT
            slot = BlockId(found)
            raw = self._headers[slot]
            self._pool.acquire([slot], hit_by=0)
        reason: Reason | None = Reason.IO_ERROR
        try:
            reason = prove(raw, self._fingerprint, label, buffer) if self._fill(slot, buffer) else Reason.TRUNCATED
        finally:
            with self._lock:
                if reason in (Reason.CHECKSUM, Reason.TRUNCATED) and self._records.is_published(slot):
                    self._drop(slot)
                self._pool.release([slot])
        return reason

    def _fill(self, slot: int, buffer: memoryview) -> bool:
        """Read a slot's payload, and return whether it was all there."""
        done, (file, payload_at, _) = 0, self._place(slot)
        while done < buffer.nbytes and (count := os.preadv(file, [buffer[done:]], payload_at + done)):
            done += count
        return done == buffer.nbytes

    def _enter(self, slot: BlockId, raw: bytes) -> None:
        """Enter the block in a slot that is referenced, unless its key is known."""
        header = _noted(raw)
        if self._records.keys.put(header.key, slot):
            self._headers[slot] = raw
            self._records.groups[slot] = 0
            self._pool.note_published(slot, 0, header.key)
            self._pool.move_to(slot, header.tenant.hex())

    def _drop(self, slot: BlockId) -> None:
        """Forget the block in a slot that is referenced, so that it will be free."""
        self._records.forget([slot])
        del self._headers[slot]

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
            self._pool.grow(reversed(self._add(*self._new_slab())))
        except OSError as error:
            logger.warning("disk: cannot allocate %d more bytes: %s", self._layout.slab_bytes, error)
            self._may_grow_at = time.monotonic() + GROW_AGAIN_SECONDS
            return False
        return True

    def _has_room(self) -> bool:
        """Whether the total size allows one more slab; other models' are removed for it, the oldest first."""
        while slab_bytes_in(self._root) + self._layout.slab_bytes > self._size:
            others = [folder for folder in model_folders(self._root) if folder != self._folder]
            if not others:
                return False
            oldest = min(others, key=lambda f: f.stat().st_mtime)
            logger.info("disk: deleting the blocks of %s to make room for those of this model", oldest.name)
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

    def _add(self, file: int, layout: SlabLayout) -> range:
        """Add an open slab, and return its slots."""
        first = self._slabs[-1].first + self._slabs[-1].layout.num_slots if self._slabs else 1
        self._slabs.append(_Slab(file, layout, first))
        return range(first, first + layout.num_slots)

    def _open_all(self) -> None:
        """Open the slabs of an earlier process and read their headers."""
        found: list[tuple[int, BlockId, bytes]] = []
        for path in slab_paths(self._folder):
            found += self._open_slab(path)
        found.sort()
        taken = [slot for _, slot, _ in found]
        num_slots = self._slabs[-1].first + self._slabs[-1].layout.num_slots if self._slabs else 1
        free = set(range(1, num_slots)).difference(taken)
        self._pool.grow([*sorted(free, reverse=True), *reversed(taken)])
        self._pool.allocate(len(taken))
        for number, slot, raw in found:
            self._number = number
            if (old := self._records.keys.get(_noted(raw).key)) is not None:
                self._drop(BlockId(old))
            self._enter(slot, raw)
        self._pool.release(taken[::-1])
        if self.open_misses:
            reasons = ", ".join(f"{count} {reason.value}" for reason, count in sorted(self.open_misses.items()))
            logger.warning("disk: found %d blocks, and dropped damaged ones: %s", self.num_blocks, reasons)

    def _open_slab(self, path: Path) -> Iterator[tuple[int, BlockId, bytes]]:
        """Open a slab and yield its blocks as (number of the write, slot, header); a useless slab is removed."""
        expected = slab_path(self._folder, len(self._slabs))
        file = os.open(path, os.O_RDONLY if self._is_read_only else os.O_RDWR)
        layout = SlabLayout.unpack(os.pread(file, PREAMBLE_BYTES, 0), os.fstat(file).st_size)
        if not isinstance(layout, Reason) and layout.block_bytes != self._layout.block_bytes:
            layout = Reason.LAYOUT
        used = sum(slab.layout.slab_bytes for slab in self._slabs)
        if isinstance(layout, Reason) or used + layout.slab_bytes > self._size:
            logger.warning("disk: ignoring %s, which has another layout or size or is truncated", path)
            if isinstance(layout, Reason):
                self.open_misses[layout] += 1
            os.close(file)
            if not self._is_read_only:
                path.unlink()
            return
        if path != expected and not self._is_read_only:
            path.rename(expected)  # a slab before it was removed
        slots = self._add(file, layout)
        for index, raw, header in read_headers(file, layout, self._fingerprint.hex()):
            if isinstance(header, Header):
                yield header.number, BlockId(slots[index]), raw
            else:
                self.open_misses[header] += 1

    def _place(self, slot: int) -> tuple[int, int, int]:
        """Return the file that has a slot, and where its payload and its header begin there."""
        slab = self._slabs[bisect_right(self._slabs, slot, key=attrgetter("first")) - 1]
        index = slot - slab.first
        return slab.file, slab.layout.payload_at(index), slab.layout.header_at(index)


def _noted(raw: bytes) -> Header:
    """Return the fields of a header that was valid when it was noted."""
    header = read_header(raw)
    assert isinstance(header, Header)
    return header


def _reserve(file: int, size: int) -> None:
    """Set a file's size, and preallocate it where the file system can."""
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
