"""Media of every kind over a folder, and labels to store there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import pytest

from octavo.kvcache.hashing import Label
from octavo.tiers.base import Medium, Reason
from octavo.tiers.disk import DiskMedium
from octavo.tiers.header import HEADER_BYTES, make_header, prove, tenant_digest
from octavo.tiers.store import Store

FINGERPRINT = b"f" * 16
BLOCK_BYTES = 5000
SECONDS = 60.0


class BlockFiles(Medium):
    """The shortest medium: blocks as files `KEY.kv` in one folder, each a header followed by the payload."""

    name = "files"

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        folder.mkdir(parents=True, exist_ok=True)

    def contains(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        return [self._read(label, buffer) for label, buffer in zip(labels, buffers, strict=True)]

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        path = self._path(label.key)
        partial = path.with_suffix(".partial")
        header = make_header(self._fingerprint, label, payload, tenant=tenant_digest(tenant))
        partial.write_bytes(header + payload)
        partial.replace(path)
        return None

    def close(self) -> None:
        return

    def _read(self, label: Label, buffer: memoryview) -> Reason | None:
        try:
            raw = self._path(label.key).read_bytes()
        except FileNotFoundError:
            return Reason.ABSENT
        if len(raw) != HEADER_BYTES + buffer.nbytes:
            return Reason.TRUNCATED
        buffer[:] = raw[HEADER_BYTES:]
        return prove(raw[:HEADER_BYTES], self._fingerprint, label, buffer)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"


MEDIA: dict[str, Callable[[Path], Medium]] = {
    "files": lambda folder: BlockFiles(folder, FINGERPRINT),
    "disk": lambda folder: disk(folder),
}


def disk(
    folder: Path, fingerprint: bytes = FINGERPRINT, size: int = 1 << 20, block_bytes: int = BLOCK_BYTES
) -> DiskMedium:
    return DiskMedium(folder, size, fingerprint, block_bytes, slab_bytes=128 << 10)


def remote(url: str, fingerprint: bytes = FINGERPRINT, **options: Any) -> Medium:
    from octavo.tiers.remote import RemoteMedium

    return RemoteMedium(url, fingerprint, BLOCK_BYTES, **options)


def label(number: int, parent: int = 0) -> Label:
    return Label(digest(number), digest(parent), number.to_bytes(4, "little") * 4)


def digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def payload(number: int) -> bytearray:
    return bytearray((number * 37 + i * i) % 251 for i in range(BLOCK_BYTES))


def put(store: Store, *numbers: int, tenant: str = "") -> list[Reason | None]:
    seconds = 10 * SECONDS  # each waits for those before it
    transfers = [store.put(label(number), memoryview(payload(number)), tenant, seconds) for number in numbers]
    assert all(transfer.wait(SECONDS) for transfer in transfers)
    return [outcome for transfer in transfers for outcome in transfer.outcomes]


def get(store: Store, labels: Sequence[Label], seconds: float = SECONDS) -> tuple[list[Reason | None], list[bytearray]]:
    buffers = [bytearray(BLOCK_BYTES) for _ in labels]
    transfer = store.get(labels, [memoryview(buffer) for buffer in buffers], seconds)
    assert transfer.wait(SECONDS)
    return transfer.outcomes, buffers


def fill(folder: Path, *numbers: int) -> None:
    store = Store(disk(folder))
    assert put(store, *numbers) == [None] * len(numbers)
    store.close()


def slab(folder: Path) -> Path:
    return next(folder.glob("*/slab-00000.kv"))


def overwrite(path: Path, at: int, change: bytes | bytearray) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(change)


def payload_at(folder: Path, slot: int) -> int:
    medium = disk(folder)
    _, at, _ = medium._place(slot + 1)
    medium.close()
    return at


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that would write to a read-only file system fail as it does there."""
    to_open, to_describe = os.open, os.statvfs

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        return refuse() if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT) else to_open(path, flags, mode)

    def statvfs(path: Path) -> os.statvfs_result:
        fields = list(to_describe(path))
        return os.statvfs_result([*fields[:8], fields[8] | os.ST_RDONLY, *fields[9:]])

    for name in ("pwrite", "ftruncate", "posix_fallocate", "unlink", "rename", "utime"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "statvfs", statvfs)
