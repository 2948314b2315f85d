"""Blocks in Redis or Valkey, which several servers of one model share.

    octavo:NAMESPACE:KEY  ->  | header, 128 B | payload | with a secret: BLAKE3 keyed with it, 32 B |

The namespace is the fingerprint or, with a secret, the fingerprint hashed with the secret as key. So servers of other
models, or with another secret, neither find nor overwrite each other's blocks. Anybody who can write to Redis could
still plant values, so they are verified like those on disk and, with a secret, must carry a valid signature.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import redis
from blake3 import blake3
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from octavo.errors import ConfigError, shown
from octavo.kvcache.hashing import Label
from octavo.tiers.base import Medium, Reason
from octavo.tiers.header import HEADER_BYTES, make_header, prove, read_header

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1.0
"""Timeout of connecting and of each answer, unless the URL has `?socket_timeout=…&socket_connect_timeout=…`."""

SIGNATURE_BYTES = 32

_LONGEST_TTL = 10 * 365 * 86400


def _encoded(argument: bytes | memoryview | str | int) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


# The client's packer in Python sends a large value as it is. The one in C, its default with hiredis, copies it first,
# which took 0.6 of the 0.9 ms of writing a block of 368,640 bytes.
_PACKER = PythonRespSerializer(6000, _encoded)


class RemoteMedium(Medium):
    """One model's blocks in Redis.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, or `unix://path`; with `?ttl=SECONDS`, a
            block is kept for that long after its last use, instead of until Redis evicts it.
        fingerprint: 16 bytes that identify the weights, dtype, codec and block size.
        block_bytes: size of a block.
        secret: key that signs every value; without it, any client that can write to Redis can plant blocks.

    Raises:
        ConfigError: the URL is invalid, or Redis refuses the user. A server that does not answer is only logged.
    """

    name = "remote"
    must_ask = True

    def __init__(self, url: str, fingerprint: bytes, block_bytes: int, *, secret: str | None = None) -> None:
        self._fingerprint = fingerprint
        url, self._ttl = _split_ttl(url)
        self._key = None if secret is None else signing_key(secret)
        self._prefix = name_prefix(fingerprint, self._key)
        self._value_bytes = HEADER_BYTES + block_bytes + (SIGNATURE_BYTES if self._key else 0)
        try:
            # Without retries, because a second attempt would double the time that a slow server costs.
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_SECONDS,
                socket_connect_timeout=TIMEOUT_SECONDS,
                retry=Retry(NoBackoff(), 0),
                command_packer=_PACKER,
            )
            self._redis.ping()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if isinstance(error, redis.AuthenticationError):
                raise ConfigError(
                    f"kv_remote: {without_password(url)} rejects the password, or requires one: {error}"
                ) from error
            logger.warning("remote: %s does not answer (%s): trying again later", without_password(url), error)
        except (redis.RedisError, ValueError, TypeError, AttributeError) as error:  # the last: of answers not Redis's
            raise ConfigError(f"kv_remote: cannot use {without_password(url)}: {error}") from error

    def contains(self, key: bytes) -> None:
        """Return None, because Redis must be asked."""

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        """Return which blocks are there, in one round trip, or two if the first is there.

        Most prompts are new, and asking for all their blocks at once would cost ten times as much.
        """
        found = self._ask(labels[:1])
        if found == [None]:
            return found + self._ask(labels[1:])
        return found * len(labels)

    def _ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        if not labels:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for label in labels:
            pipeline.strlen(self._name(label.key))
        found: list[Reason | None] = []
        for length in pipeline.execute(raise_on_error=False):
            if isinstance(length, Exception):
                # A value that is not a block counts as found: `read` reports what is wrong with it, and removes it.
                reason = _reason_of(length)
                found.append(None if reason is Reason.LAYOUT else reason)
            else:
                found.append(None if length else Reason.ABSENT)
        return found

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        pipeline = self._redis.pipeline(transaction=False)
        for label in labels:
            # Reading one byte more than a valid value has detects longer ones without transferring all of them.
            pipeline.getrange(self._name(label.key), 0, self._value_bytes)
        values = pipeline.execute(raise_on_error=False)
        outcomes = [self._take(*each) for each in zip(labels, buffers, values, strict=True)]
        self._clean_up(labels, values, outcomes)
        return outcomes

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        name = self._name(label.key)
        there = self._redis.exists(name) if self._ttl is None else self._redis.expire(name, self._ttl)
        if there:
            return None
        # Without the tenant, so that a reader of that Redis does not learn whose blocks are whose.
        try:
            self._redis.set(name, b"".join(signed(self._fingerprint, self._key, label, payload)), ex=self._ttl)
        except redis.OutOfMemoryError:
            return Reason.NO_SPACE
        return None

    def give_up(self) -> None:
        """Make the calls that other threads wait for fail."""
        self._redis.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._redis.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _take(self, label: Label, buffer: memoryview, value: bytes | Exception) -> Reason | None:
        if isinstance(value, Exception):
            return _reason_of(value)
        if not value:
            return Reason.ABSENT
        view = memoryview(value)
        header, payload = view[:HEADER_BYTES], view[HEADER_BYTES : HEADER_BYTES + buffer.nbytes]
        unsigned = HEADER_BYTES + buffer.nbytes
        if self._key is not None and len(value) == unsigned:
            return Reason.FORGED
        if len(value) != unsigned + (SIGNATURE_BYTES if self._key else 0):
            return Reason.TRUNCATED
        if (reason := prove(bytes(header), self._fingerprint, label, payload)) is not None:
            return reason
        if self._key is not None and not hmac.compare_digest(_sign(self._key, header, payload), view[unsigned:]):
            return Reason.FORGED
        buffer[:] = payload
        return None

    def _clean_up(
        self, labels: Sequence[Label], values: Sequence[bytes | Exception], outcomes: Sequence[Reason | None]
    ) -> None:
        """Renew the TTL of blocks that were used, and remove invalid ones, so that valid ones can be stored."""
        pipeline = self._redis.pipeline(transaction=False)
        for label, value, reason in zip(labels, values, outcomes, strict=True):
            if reason is None:
                if self._ttl is not None:
                    pipeline.expire(self._name(label.key), self._ttl)
            elif reason not in (Reason.ABSENT, Reason.IO_ERROR) and not _is_filed_right(label, value, reason):
                pipeline.unlink(self._name(label.key))
        if not len(pipeline):
            return
        try:
            pipeline.execute(raise_on_error=False)
        except redis.RedisError as error:  # the blocks that were read are valid regardless
            logger.warning("remote: blocks could not be renewed or removed: %s", error)


def signing_key(secret: str) -> bytes:
    """Return the key of 32 bytes that signs with a secret."""
    return blake3(secret.encode(), derive_key_context="octavo kv_remote_secret signature").digest()


def name_prefix(fingerprint: bytes, key: bytes | None) -> bytes:
    """Return the prefix of the names of a model's blocks; it cannot be guessed without the signing key."""
    if key is not None:
        fingerprint = blake2b(fingerprint, key=key, digest_size=16, person=b"octavo-kv-name").digest()
    return b"octavo:" + fingerprint.hex().encode() + b":"


def signed(fingerprint: bytes, key: bytes | None, label: Label, payload: memoryview) -> tuple[bytes, memoryview, bytes]:
    """Return header, payload and signature of a value; without a key, the signature is empty."""
    header = make_header(fingerprint, label, payload)
    return header, payload, b"" if key is None else _sign(key, header, payload)


def _split_ttl(url: str) -> tuple[str, int | None]:
    """Return a URL without `ttl=SECONDS`, and those seconds."""
    if (given := re.search(r"(?<=[?&])ttl=([^&]*)&?", url)) is None:
        return url, None
    if not given[1].isdecimal() or not 1 <= int(given[1][:10]) <= _LONGEST_TTL:
        raise ConfigError(f"kv_remote: ttl must be 1 to {_LONGEST_TTL} seconds, got {shown(given[1])}")
    return url[: given.start()] + url[given.end() :], int(given[1])


def without_password(url: str) -> str:
    """Return a URL with its password masked, for messages."""
    shown = re.sub(r"(?<=//).*@", "***@", url)
    return re.sub(r"(?<=[?&])[^=&]*password=[^&]*", "password=***", shown)


def _is_filed_right(label: Label, value: bytes | Exception, reason: Reason) -> bool:
    """Return whether a block with a mismatched label is stored under its own key, so that the block itself is valid."""
    if reason is not Reason.LABEL or isinstance(value, Exception):
        return False
    header = read_header(value[:HEADER_BYTES])
    return not isinstance(header, Reason) and header.key == label.key


def _sign(key: bytes, header: bytes | memoryview, payload: memoryview) -> bytes:
    # A cryptographic hash, because collisions of the header's xxh3 can be computed. Of a block of 368,640 bytes BLAKE3
    # takes 0.05 ms, BLAKE2b 0.5.
    digest = blake3(header, key=key)
    digest.update(payload)
    return digest.digest(SIGNATURE_BYTES)


def _reason_of(error: Exception) -> Reason:
    """Return the reason of a failed command: the key does not hold a string, or Redis is not available."""
    return Reason.LAYOUT if "WRONGTYPE" in str(error) else Reason.IO_ERROR
