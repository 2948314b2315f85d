"""The reference medium, with one file per block, for tests and comparison; nothing is ever evicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.kvcache.hashing import Label
from octavo.tiers.base import Reason
from octavo.tiers.header import HEADER_BYTES, make_header, prove, tenant_digest


class BlockFiles:
    """Blocks as files `KEY.kv` in one folder, each a header followed by the payload."""

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
