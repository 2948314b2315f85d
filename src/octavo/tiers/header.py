"""The header of a stored block, and the checks that verify the block.

0   magic 8 | layout version 4 | reserved 4
16  fingerprint 16      weights, dtype, codec, block size
32  key 16 | parent 16
64  digest of the token ids 16
80  length of the payload 8 | number of the write 8
96  digest of the name of the tenant that it is accounted to 16, or zeros: not part of what a block is
112 xxh3-128 over the 112 bytes above and the payload
128 end
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

import xxhash

from octavo.kvcache.hashing import Label
from octavo.tiers.base import LAYOUT_VERSION, Reason

MAGIC = b"OCTAVOKV"
HEADER_BYTES = 128
_FIELDS = struct.Struct("<8sII16s16s16s16sQQ16s")
_NO_TENANT = bytes(16)


class Header(NamedTuple):
    """The fields of a header, as read. `checksum` covers them and the payload."""

    fingerprint: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    length: int
    number: int
    tenant: bytes
    checksum: bytes

    def belongs(self, fingerprint: bytes, length: int) -> Reason | None:
        """Return why this is not a block of the model; None if it may be one."""
        if self.fingerprint != fingerprint:
            return Reason.FINGERPRINT
        return None if self.length == length else Reason.TRUNCATED

    def proves(self, payload: memoryview) -> bool:
        """Return whether the checksum matches the fields and this payload."""
        return self.checksum == _checksum(_FIELDS.pack(MAGIC, LAYOUT_VERSION, 0, *self[:-1]), payload)


def make_header(
    fingerprint: bytes, label: Label, payload: memoryview, number: int = 0, tenant: bytes = _NO_TENANT
) -> bytes:
    """Return the header of a block; `tenant` is a `tenant_digest`."""
    fields = _FIELDS.pack(
        MAGIC,
        LAYOUT_VERSION,
        0,
        fingerprint,
        label.key,
        label.parent,
        token_digest(label.tokens),
        payload.nbytes,
        number,
        tenant,
    )
    return fields + _checksum(fields, payload)


def read_header(raw: bytes) -> Header | Reason:
    """Read the fields of a header, or return why the bytes are not a header."""
    if len(raw) < HEADER_BYTES:
        return Reason.TRUNCATED
    magic, version, reserved, *fields = _FIELDS.unpack(raw[: _FIELDS.size])
    if magic != MAGIC:
        return Reason.ABSENT if not any(raw[: _FIELDS.size]) else Reason.CHECKSUM
    if version != LAYOUT_VERSION or reserved:
        return Reason.LAYOUT
    return Header._make((*fields, raw[_FIELDS.size : HEADER_BYTES]))


def prove(raw: bytes, fingerprint: bytes, label: Label, payload: memoryview) -> Reason | None:
    """Return why a header and a payload do not match a label; None if they do."""
    header = read_header(raw)
    if isinstance(header, Reason):
        return header
    if header.fingerprint == fingerprint and header[1:4] != (label.key, label.parent, token_digest(label.tokens)):
        return Reason.LABEL
    reason = header.belongs(fingerprint, payload.nbytes)
    return Reason.CHECKSUM if reason is None and not header.proves(payload) else reason


def token_digest(tokens: bytes) -> bytes:
    """Return the digest of packed token ids."""
    return blake2b(tokens, digest_size=16).digest()


def tenant_digest(tenant: str) -> bytes:
    """Return the tenant's digest stored in headers."""
    return blake2b(tenant.encode(), digest_size=16, person=b"octavo-kv-tenant").digest()


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(payload)
    return digest.digest()
