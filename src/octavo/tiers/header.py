"""The header of a stored block, and the checks that verify the block.

0   magic 8 | layout version 4 | reserved 4
16  fingerprint 16      weights, dtype, codec, block size
32  key 16 | parent 16
64  digest of the token ids 16
80  length of the payload 8 | number of the write 8
96  xxh3-128 over the 96 bytes above and the payload
112 end
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

import xxhash

from octavo.kvcache.label import Label
from octavo.tiers.base import LAYOUT_VERSION, Reason

MAGIC = b"OCTAVOKV"
HEADER_BYTES = 112
_FIELDS = struct.Struct("<8sII16s16s16s16sQQ")


class Header(NamedTuple):
    """The fields of a header, as read. `checksum` covers them and the payload."""

    fingerprint: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    length: int
    number: int
    checksum: bytes

    def matches(self, fingerprint: bytes, label: Label, length: int) -> Reason | None:
        """Return why this cannot be the label's block; None if only the checksum is left to verify."""
        if self.fingerprint != fingerprint:
            return Reason.FINGERPRINT
        if (self.key, self.parent, self.tokens) != (label.key, label.parent, token_digest(label.tokens)):
            return Reason.LABEL
        return None if self.length == length else Reason.TRUNCATED

    def proves(self, payload: memoryview) -> bool:
        """Return whether the checksum matches the fields and this payload."""
        return self.checksum == _checksum(self.packed(), payload)

    def packed(self) -> bytes:
        """Return the fields as the bytes that the checksum covers, before the payload."""
        return _FIELDS.pack(
            MAGIC, LAYOUT_VERSION, 0, self.fingerprint, self.key, self.parent, self.tokens, self.length, self.number
        )


def make_header(fingerprint: bytes, label: Label, payload: memoryview, number: int = 0) -> bytes:
    """Return the header of a block."""
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
    )
    return fields + _checksum(fields, payload)


def read_header(raw: bytes) -> Header | Reason:
    """Read the fields of a header, or return why the bytes are not a header."""
    if len(raw) < HEADER_BYTES:
        return Reason.TRUNCATED
    magic, version, reserved, fingerprint, key, parent, tokens, length, number = _FIELDS.unpack(raw[: _FIELDS.size])
    if magic != MAGIC:
        return Reason.ABSENT if not any(raw[: _FIELDS.size]) else Reason.CHECKSUM
    if version != LAYOUT_VERSION or reserved:
        return Reason.LAYOUT
    return Header(fingerprint, key, parent, tokens, length, number, raw[_FIELDS.size : HEADER_BYTES])


def prove(raw: bytes, fingerprint: bytes, label: Label, payload: memoryview) -> Reason | None:
    """Return why a header and a payload do not match a label; None if they do."""
    header = read_header(raw)
    if isinstance(header, Reason):
        return header
    reason = header.matches(fingerprint, label, payload.nbytes)
    if reason is None and not header.proves(payload):
        reason = Reason.CHECKSUM
    return reason


def token_digest(tokens: bytes) -> bytes:
    """Return the digest of packed token ids."""
    return blake2b(tokens, digest_size=16).digest()


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(payload)
    return digest.digest()
