"""The layout of the directory and the slab files that hold blocks on disk, and the lock of their only writer.

    DIR/LOCK                          held by the one process that writes here
    DIR/FINGERPRINT/model.json        the model that the blocks belong to, for people
    DIR/FINGERPRINT/tenants.jsonl     names of the tenants that blocks are accounted to, whose headers hold digests:
                                      a JSON string a line, in the order in which they first stored a block
    DIR/FINGERPRINT/slab-00000.kv     | preamble, 4 KiB | headers, 128 B a slot | slot 0 | slot 1 | … |

The preamble holds the number of slots in the slab and the size of a block. Slots begin at multiples of 4 KiB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import struct
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.tiers.base import LAYOUT_VERSION, Reason
from octavo.tiers.header import HEADER_BYTES, Header, read_header, tenant_digest

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
SLAB_BYTES = 256 << 20
LEAST_SLAB_SHARE = 16
"""Slabs after the first have at least this part of the usual size, however little room the file system has."""

INDEX_BYTES = 560
"""Memory that `DiskMedium` takes at most for each slot that holds a block, apart from the eviction policy: its records,
its header and an entry in a dictionary, measured at its least favourable size and checked by a test."""

_NAMES_FILE = "tenants.jsonl"
_MAGIC = b"OCTAVOSL"
_PREAMBLE = struct.Struct("<8sIIQQ")  # magic, layout version, reserved, bytes of a block, slots
PREAMBLE_BYTES = _PREAMBLE.size


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The positions of the headers and slots of a slab, in bytes from its start."""

    block_bytes: int
    num_slots: int

    @classmethod
    def within(cls, size: int, block_bytes: int) -> SlabLayout:
        """Return the layout with the most slots, possibly 0, of a slab of at most `size` bytes."""
        count = max(0, size - ALIGNMENT) // (_aligned(block_bytes) + HEADER_BYTES)
        while count and cls(block_bytes, count).slab_bytes > size:
            count -= 1
        return cls(block_bytes, count)

    @classmethod
    def unpack(cls, preamble: bytes, size: int) -> SlabLayout | Reason:
        """Read the layout from the preamble of a slab of `size` bytes, or return why the slab cannot be used."""
        if len(preamble) < PREAMBLE_BYTES:
            return Reason.TRUNCATED
        magic, version, _, block_bytes, num_slots = _PREAMBLE.unpack(preamble)
        if magic != _MAGIC or version != LAYOUT_VERSION:
            return Reason.LAYOUT
        layout = cls(block_bytes, num_slots)
        return layout if layout.slab_bytes == size else Reason.TRUNCATED

    def pack(self) -> bytes:
        """Return the preamble of a slab."""
        return _PREAMBLE.pack(_MAGIC, LAYOUT_VERSION, 0, self.block_bytes, self.num_slots)

    @property
    def slot_bytes(self) -> int:
        return _aligned(self.block_bytes)

    @property
    def table_bytes(self) -> int:
        """Size of all headers, which begin at `header_at(0)`."""
        return self.num_slots * HEADER_BYTES

    @property
    def slab_bytes(self) -> int:
        return self.payload_at(self.num_slots)

    def header_at(self, index: int) -> int:
        return ALIGNMENT + index * HEADER_BYTES

    def payload_at(self, index: int) -> int:
        return ALIGNMENT + _aligned(self.table_bytes) + index * self.slot_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def most_slots(size: int, block_bytes: int, slab_bytes: int = SLAB_BYTES) -> int:
    """Return how many blocks fit in a directory of `size` bytes."""
    layout = SlabLayout.within(min(slab_bytes, size), block_bytes)
    return size // layout.slab_bytes * layout.num_slots


def slab_path(folder: Path, number: int) -> Path:
    """Return the path of one slab in a model's folder."""
    return folder / f"slab-{number:05}.kv"


def slab_paths(folder: Path) -> list[Path]:
    """Return the slabs in a model's folder, in order."""
    return sorted(folder.glob("slab-*.kv"))


def slab_bytes_in(directory: Path) -> int:
    """Return the total size of all models' slabs in bytes."""
    return sum(path.stat().st_size for path in directory.glob("*/slab-*.kv"))


def model_folders(directory: Path) -> list[Path]:
    """Return the models' folders in a directory of slabs; anything else there is ignored."""
    named = (path for path in directory.iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name))
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def read_headers(file: int, layout: SlabLayout, fingerprint: str) -> Iterator[tuple[int, bytes, Header | Reason]]:
    """Yield each slot of a slab that was ever written: its index, its header, and that in fields or why it is invalid.

    Args:
        fingerprint: that of the model, in hexadecimal.
    """
    table = os.pread(file, layout.table_bytes, layout.header_at(0))
    for index in range(layout.num_slots):
        raw = table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
        header = read_header(raw)
        if isinstance(header, Header):
            header = header.belongs(bytes.fromhex(fingerprint), layout.block_bytes) or header
        if header is not Reason.ABSENT:
            yield index, raw, header


def stored_blocks(folder: Path, *, prove: bool = True) -> Iterator[tuple[Header | Reason, bool]]:
    """Yield every header in one model's folder, and whether its payload matches it; for `octavo cache`.

    Slots that were never written are skipped.

    Args:
        prove: read and verify the payloads; otherwise all are assumed to match.
    """
    for path in slab_paths(folder):
        with path.open("rb") as file:
            layout = SlabLayout.unpack(file.read(PREAMBLE_BYTES), path.stat().st_size)
            if isinstance(layout, Reason):
                yield layout, False
                continue
            for index, _, header in read_headers(file.fileno(), layout, folder.name):
                if isinstance(header, Reason) or not prove:
                    yield header, isinstance(header, Header)
                    continue
                file.seek(layout.payload_at(index))
                yield header, header.proves(memoryview(file.read(layout.block_bytes)))


def lock_directory(directory: Path) -> int:
    """Create a directory if it does not exist, and lock it until the returned file descriptor is closed.

    Raises:
        ConfigError: another process holds the lock, or the file system has no locks.
        OSError: the directory or the lock file cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "LOCK"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS or not path.exists():
            raise
        file = os.open(path, os.O_RDONLY)
    try:
        if not _is_free(file):
            raise ConfigError(
                f"kv_disk: {_named_holder(path)} is already writing to {directory}; give this server another directory"
            )
        name = f"process {os.getpid()} of {os.uname().nodename}\n".encode()
        # In place, which needs no room on a full disk.
        with contextlib.suppress(OSError):
            os.pwrite(file, name, 0)
            os.ftruncate(file, len(name))
    except BaseException:
        os.close(file)
        raise
    return file


def lock_holder(directory: Path) -> str | None:
    """Return the process that holds a directory's lock, as its lock file names it; None if there is none.

    Raises:
        ConfigError: the file system has no locks.
        OSError: the lock file cannot be read.
    """
    path = directory / "LOCK"
    if not path.exists():
        return None
    file = os.open(path, os.O_RDONLY)
    try:
        return None if _is_free(file) else _named_holder(path)
    finally:
        os.close(file)


def _is_free(file: int) -> bool:
    """Take a lock, and return whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"kv_disk: its file system has no locks ({error.strerror}), which keep a second server from writing there: "
            "give a directory of a local disk, or mount it with locks"
        ) from error
    return True


def _named_holder(path: Path) -> str:
    return path.read_text().strip() or "another process"


class TenantNames:
    """Stores each new name once. Thread-safe.

    A name that cannot be written is known until the process ends; `name` returns the digest of others.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAMES_FILE
        self._names = read_tenant_names(folder)
        self._lock = threading.Lock()

    def digest(self, tenant: str) -> bytes:
        """Return the digest of a name, which is stored if it is new."""
        digest = tenant_digest(tenant)
        if digest not in self._names:
            with self._lock:
                if digest not in self._names:
                    self._names[digest] = tenant
                    self._append(tenant)
        return digest

    def name(self, digest: bytes) -> str:
        """Return the name with a digest, or the digest in hexadecimal."""
        return self._names.get(digest, digest.hex())

    def keep(self, digests: Container[bytes]) -> None:
        """Forget the other names, whose blocks are gone."""
        with self._lock:
            kept = {digest: name for digest, name in self._names.items() if digest in digests}
            if len(kept) == len(self._names):
                return
            self._names = kept
            self._path.unlink(missing_ok=True)
            for name in kept.values():
                self._append(name)

    def _append(self, name: str) -> None:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, f"{json.dumps(name)}\n".encode())
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("disk: cannot write a tenant's name to %s: %s", self._path, error)


def read_tenant_names(folder: Path) -> dict[bytes, str]:
    """Return the names in a model's folder by digest; lines that are not names are ignored."""
    try:
        lines = (folder / _NAMES_FILE).read_bytes().splitlines()
    except OSError:
        return {}
    names: dict[bytes, str] = {}
    for line in lines:
        try:
            name = json.loads(line)
        except ValueError:
            continue
        if isinstance(name, str):
            names[tenant_digest(name)] = name
    return names
