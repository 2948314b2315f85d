"""The names of the tenants whose blocks lie in one model's folder; the blocks' headers hold their digests alone.

FOLDER/tenants.jsonl     a name a line, as a JSON string, in the order in which they first stored a block
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Container
from pathlib import Path

from octavo.tiers.header import tenant_digest

logger = logging.getLogger(__name__)

_FILE = "tenants.jsonl"


class TenantNames:
    """Writes each new name down once. Thread-safe.

    A name that cannot be written is known until the process ends; `name` returns the digest of others.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._names = read_tenant_names(folder)
        self._digests = {name: digest for digest, name in self._names.items()}
        self._lock = threading.Lock()

    def digest(self, tenant: str) -> bytes:
        """Return the digest of a name, which is written down if it is new."""
        if (known := self._digests.get(tenant)) is not None:
            return known
        with self._lock:
            digest = tenant_digest(tenant)
            if tenant not in self._digests:
                self._names[digest] = tenant
                self._digests[tenant] = digest
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
            self._names, self._digests = kept, {name: digest for digest, name in kept.items()}
            self._path.unlink(missing_ok=True)
            for name in self._digests:
                self._append(name)

    def _append(self, name: str) -> None:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, f"{json.dumps(name)}\n".encode())
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("disk: the name of a tenant is not written to %s: %s", self._path, error)


def read_tenant_names(folder: Path) -> dict[bytes, str]:
    """Return the names in a model's folder by digest; lines that are no names are ignored."""
    try:
        lines = (folder / _FILE).read_bytes().splitlines()
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
