"""Prefix caches, which find computed blocks by the tokens before them."""

from __future__ import annotations

from typing import Any

from octavo.errors import ConfigError
from octavo.kvcache.eviction import EvictionPolicy, LeafFirstEviction, make_eviction_policy
from octavo.kvcache.prefix.base import NullPrefixCache, PrefixCache
from octavo.kvcache.prefix.hashed import HashedPrefixCache
from octavo.kvcache.prefix.radix import RadixPrefixCache
from octavo.kvcache.spec import KVCacheSpec

__all__ = ["HashedPrefixCache", "NullPrefixCache", "PrefixCache", "RadixPrefixCache", "make_prefix_cache"]


def make_prefix_cache(
    name: str | None,
    eviction: str,
    *,
    spec: KVCacheSpec,
    identity: tuple[str, ...] = (),
) -> tuple[PrefixCache[Any], EvictionPolicy]:
    """Return the prefix cache with the given name (None for no caching), and an eviction policy for it.

    Args:
        identity: what keys and values depend on besides the tokens: model fingerprint, dtype, codec, …

    Raises:
        ConfigError: a name is unknown; the message lists the known ones.
    """
    policy = make_eviction_policy(eviction)
    if name is None:
        return NullPrefixCache(), policy
    if name == "hashed":
        return HashedPrefixCache(identity, spec.block_size), policy
    if name == "radix":
        radix = RadixPrefixCache(spec.block_size, [group.sliding_window for group in spec.groups], identity)
        return radix, LeafFirstEviction(policy, radix)
    raise ConfigError(f"prefix_cache must be one of hashed, radix, got {name!r}")
