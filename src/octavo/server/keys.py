"""API keys and the tenants they belong to: from the command line, the environment, or a file that can be reread.

    [tenants.ada]
    keys = ["sk-ada-1", "sha256:9f86d081…"]     # in plain text, or the SHA-256 of the key in hexadecimal
    cache_group = "lab"                          # shares cached prefixes with the tenants of this group

    [tenants.operations]
    keys = ["sk-ops"]
    admin = true                                 # may use /debug and reset the prefix cache

Without `cache_group` a tenant shares no cached prefixes. `priority = [0, 10]` is the range of priorities that
its requests may give; `requests_per_minute`, `tokens_per_minute`, `max_concurrency`, `max_waiting_requests` and
`max_waiting_tokens` limit all its keys together; `kv_floor` and `kv_cap` bound its share of the KV cache. `Client`
declares all fields.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from octavo.errors import ConfigError, FieldError, shown
from octavo.option import nearest, option, options_of
from octavo.request import RequestContext
from octavo.text_file import read_toml
from octavo.units import Unit

logger = logging.getLogger("octavo.server")

MAX_FILE_BYTES = 4 * 2**20
MAX_KEY_LENGTH = 1024
# Tenants' names appear as labels of metrics and in log lines.
_NAME = re.compile(r"[A-Za-z0-9._@:-]{1,64}")
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")

Digest = bytes
"""SHA-256 of a key."""


def tenant_of(api_key: str) -> str:
    """Derive a short tenant name from a key; it is stable across restarts and does not reveal the key."""
    return hashlib.blake2b(api_key.encode(), digest_size=8, person=b"octavo-tenant").hexdigest()


def _check_group(group: str, name: str) -> None:
    if not _NAME.fullmatch(group):
        raise ConfigError(f"{name} must be 1 to 64 letters, digits or ._@:-, got {shown(group)}")


def _read_kv_amount(amount: float | str) -> float:
    if isinstance(amount, str) and (match := _PERCENT.fullmatch(amount)) and 0 < float(match[1]) <= 100:
        return float(match[1]) / 100
    if not isinstance(amount, int) or amount <= 0:
        raise ConfigError(f"kv_floor and kv_cap must be {_KV.words}, got {shown(amount)}")
    return amount


_KV = Unit("TOKENS", 'a positive number of tokens, or a part of the cache such as "10%"', _read_kv_amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The sender of a request, and what its tenant may do: options, which a keys file gives for each tenant.

    `kv_floor` and `kv_cap` are tokens (int) or a share of the cache (float, 0 to 1).
    """

    tenant: str = option("", "whom the work is accounted to; empty if no API key is required", internal=True)
    cache_group: str | None = option(
        None, "tenants of the same group share cached prefixes; none: this one shares nothing", check=_check_group
    )
    weight: float = option(1.0, 'share of service relative to other tenants, if scheduling_policy is "vtc"', above=0)
    requests_per_minute: float | None = option(None, "rate limit of all keys together", above=0)
    tokens_per_minute: float | None = option(None, "rate limit of prompt and output tokens of all keys", above=0)
    max_concurrency: int | None = option(None, "requests being served at once, including waiting ones", least=1)
    max_waiting_requests: int | None = option(
        None, "requests that wait for their first step; none: as the engine's tenant_share allows", least=1
    )
    max_waiting_tokens: int | None = option(None, "the same for their prompt tokens together", least=1)
    min_priority: int | None = option(
        0, "least priority a request may give, lower is served first; none: the server's own limit", internal=True
    )
    max_priority: int | None = option(None, "and the largest", internal=True)
    kv_floor: int | float | None = option(None, "KV cache that is always available to running requests", unit=_KV)
    kv_cap: int | float | None = option(None, "the most of it that they may hold", unit=_KV)
    admin: bool = option(False, "whether the client may use /debug and reset the prefix cache")

    def context(self, request_id: str, priority: int | None, cache_salt: str | None) -> RequestContext:
        """Return the engine's context for a request of this client; raise `RequestError` for a priority out of range.

        If no priority is given, the request gets the value in the client's range that is nearest to 0.
        """
        low = -inf if self.min_priority is None else self.min_priority
        high = inf if self.max_priority is None else self.max_priority
        if priority is None:
            priority = int(min(max(0, low), high))
        elif not low <= priority <= high:
            allowed = f"at least {low}" if high == inf else f"between {low} and {high}"
            raise FieldError("priority", f"must be {allowed} for this API key, got {shown(priority)}")
        return RequestContext(
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt or "",
            tenant=self.tenant,
            cache_group=self.cache_group,
            weight=self.weight,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
        )

    def check_prompts(self, num_prompts: int) -> None:
        """Raise `RequestError` if a body has more prompts than may wait at once, so that it could never be admitted."""
        if self.max_waiting_requests is not None and num_prompts > self.max_waiting_requests:
            most = self.max_waiting_requests
            problem = f"has {num_prompts} prompts, but at most {most} requests of this API key's tenant may wait"
            raise FieldError("prompt", problem)


ANYBODY = Client(min_priority=None)
"""The client of every request if no API key is required."""


class KeyRing:
    """The accepted keys and their owners.

    Keys are looked up by a digest keyed with a secret of this process, so that the time of a lookup reveals nothing
    about any key, however many guesses are made. The keys themselves are not kept.
    """

    def __init__(self, clients: Mapping[Digest, Client]) -> None:
        self._secret = secrets.token_bytes(32)
        self._clients: dict[bytes, tuple[Digest, Client]] = {}
        self.replace(clients)

    def __len__(self) -> int:
        return len(self._clients)

    def replace(self, clients: Mapping[Digest, Client]) -> None:
        """Replace the keys; requests already admitted continue."""
        self._clients = {self._sealed(digest): (digest, client) for digest, client in clients.items()}

    def find(self, key: str) -> Client | None:
        """Return the owner of a key, or None if the key is unknown."""
        digest = digest_of(key)
        known, client = self._clients.get(self._sealed(digest), (b"", None))
        return client if hmac.compare_digest(known, digest) else None

    @property
    def clients(self) -> list[Client]:
        """The clients, one per key."""
        return [client for _, client in self._clients.values()]

    def _sealed(self, digest: Digest) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


def digest_of(key: str) -> Digest:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def clients_of_keys(keys: Iterable[str], *, admin: bool = False) -> dict[Digest, Client]:
    """Return clients for individually given keys; each is a tenant of its own, named after a hash of the key."""
    return {digest_of(key): Client(tenant=tenant_of(key), admin=admin) for key in keys}


def sharing_all(clients: Mapping[Digest, Client]) -> dict[Digest, Client]:
    """Return the same clients, all sharing cached prefixes regardless of their groups."""
    return {digest: replace(client, cache_group="") for digest, client in clients.items()}


def read_keys_file(path: str) -> dict[Digest, Client]:
    """Read the clients from a keys file.

    Raises:
        ConfigError: the file cannot be read, has an unknown field or an invalid value, or holds no key. Messages never
            contain a key.
    """
    file = read_toml(path, "the keys file", MAX_FILE_BYTES)
    if file.exposed:
        logger.warning("other users of this machine can read the keys file %s: chmod 600 it", path)
    try:
        return _clients(file.parsed)
    except ConfigError as error:
        raise ConfigError(f"keys file {path}: {error}") from None


def _clients(parsed: dict[str, Any]) -> dict[Digest, Client]:
    tenants = parsed.pop("tenants", {})
    if parsed:
        raise ConfigError(f"unknown table {next(iter(parsed))!r}; tenants are written as [tenants.NAME]")
    if not isinstance(tenants, dict) or not all(isinstance(entry, dict) for entry in tenants.values()):
        raise ConfigError("tenants are written as [tenants.NAME]")
    clients: dict[Digest, Client] = {}
    for name, entry in tenants.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a tenant's name must be 1 to 64 letters, digits or ._@:-, got {name[:80]!r}")
        keys = entry.pop("keys", None)
        if not isinstance(keys, list) or not keys:
            raise ConfigError(f"tenants.{name} needs keys, a list of at least one")
        try:
            client = _client(name, entry)
        except ConfigError as error:
            raise ConfigError(f"tenants.{name}: {error}") from None
        for number, key in enumerate(keys):
            digest = _file_digest(key, f"tenants.{name}.keys[{number}]")
            if digest in clients:
                raise ConfigError(f"tenants.{name}.keys[{number}] is a key of tenant {clients[digest].tenant} too")
            clients[digest] = client
    if not clients:
        raise ConfigError("there is no key in it")
    return clients


def _file_digest(key: object, where: str) -> Digest:
    if isinstance(key, str) and (match := _HASH.fullmatch(key)):
        return bytes.fromhex(match[1])
    if isinstance(key, str) and key.startswith("sha256:"):
        raise ConfigError(f"{where} must have 64 hexadecimal digits after sha256:")
    check_key(key, where)
    assert isinstance(key, str)
    return digest_of(key)


def check_key(key: object, where: str) -> None:
    """Raise `ConfigError` if no client could send the key in a header; the message does not repeat the key."""
    if not isinstance(key, str) or not key:
        raise ConfigError(f"{where} must not be empty")
    if len(key) > MAX_KEY_LENGTH or not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{where} must be at most {MAX_KEY_LENGTH} printable ASCII characters without spaces")


def _client(name: str, entry: Mapping[str, Any]) -> Client:
    """Return the client of a tenant with these fields, apart from its keys; raise `ConfigError` for an invalid one."""
    options, fields = options_of(Client), dict[str, Any]()
    for field, value in entry.items():
        if field == "priority":
            if not isinstance(value, list) or [type(bound) for bound in value] != [int, int] or value[0] > value[1]:
                raise ConfigError(
                    f"priority must be a range such as [0, 10], the lower number first, got {shown(value)}"
                )
            fields |= {"min_priority": value[0], "max_priority": value[1]}
        elif (option := options.get(field)) is not None and not option.internal:
            fields[field] = option.checked(value)
        else:
            known = ("keys", "priority", *(each.name for each in options.values() if not each.internal))
            raise ConfigError(f"unknown field {shown(field)}{nearest(field, known)}")
    return Client(tenant=name, **fields)
