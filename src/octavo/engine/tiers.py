"""Attaches the stores below host memory to an engine, according to its options."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from hashlib import blake2b
from pathlib import Path

from octavo import kernels
from octavo.checkpoint.model_source import weight_files
from octavo.config import EngineConfig
from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.calculator import REMOTE_THREADS
from octavo.storage.host import HostTier
from octavo.tiers.base import LAYOUT_VERSION, Medium
from octavo.tiers.lower import LowerTiers
from octavo.tiers.store import MOST_WRITE_BYTES, Store
from octavo.units import format_bytes

logger = logging.getLogger(__name__)

_READ_BYTES = 8 << 20
# To be increased when results get other bits: with `--deterministic`, blocks of an older version must not be found.
_ROUNDING = 3


def tier_identity(config: EngineConfig, path: Path, layout: str) -> tuple[str, ...]:
    """Return what a block's bytes depend on that may differ between processes; empty if no block leaves this one.

    Args:
        path: path of the model's weights, which are read completely, because fine-tunes may differ anywhere in them.
        layout: layout of a block's bytes, which the attention backend determines.
    """
    if not config.has_stores:
        return ()
    isa = kernels.isa() if kernels.available() else "torch"
    exact = f"deterministic {_ROUNDING} on {isa}" if config.deterministic else ""
    # Keys and headers are little-endian everywhere, but a block's bytes are as the machine has them.
    swapped = () if sys.byteorder == "little" else (sys.byteorder,)
    return (f"layout {LAYOUT_VERSION}", layout, _digest_of_weights(path), exact, *swapped)


def join_stores(
    config: EngineConfig,
    kv: KVCacheManager,
    host: HostTier | None,
    identity: tuple[str, ...],
) -> LowerTiers | None:
    """Open the stores that the options name; None if they name none.

    Args:
        host: the runner's host memory, which the stores read and write.

    Raises:
        ConfigError: a store cannot be used; the message says why.
    """
    if not config.has_stores or host is None:
        return None
    memory = kv.hierarchy.host
    # Blocks waiting to be written are held in host memory; leave half of it for blocks that are read.
    most_write_bytes = memory.num_prefix_slots * kv.spec.block_bytes // 2
    fingerprint = _fingerprint(kv.spec, identity)
    with ExitStack() as opened:  # closed again if anything below fails
        stores = [
            opened.enter_context(closing(store))
            for store in open_stores(config, kv.spec, fingerprint, most_write_bytes)
        ]
        names = " and ".join(f"{store.name} ({_held(store)})" for store in stores)
        logger.info("prefixes are loaded from %s if that takes less time than computing them, as measured", names)
        tiers = LowerTiers(memory, stores, lambda slot: host.row(slot - 1), kv.spec.block_bytes, time.monotonic)
        opened.pop_all()
    return tiers


def _held(store: Store) -> str:
    held = store.medium.bytes_by_tenant()
    return "shared" if held is None else format_bytes(sum(held.values()))


def _fingerprint(spec: KVCacheSpec, identity: tuple[str, ...]) -> bytes:
    groups = ";".join(f"{group.layer_indices},{group.sliding_window}" for group in spec.groups)
    parts = (*identity, spec.dtype, str(spec.block_size), str(spec.block_bytes), groups)
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def open_stores(
    config: EngineConfig, spec: KVCacheSpec, fingerprint: bytes, most_write_bytes: int = MOST_WRITE_BYTES
) -> Iterator[Store]:
    """Open the stores that the options name, one after the other, in the order in which they are asked."""
    if config.kv_disk is not None:
        from octavo.tiers.disk import DiskMedium

        disk = DiskMedium(
            Path(config.kv_disk),
            config.kv_disk_size,
            fingerprint,
            spec.block_bytes,
            describe={"model": config.model, "dtype": spec.dtype, "block_size": str(spec.block_size)},
            eviction=make_eviction_policy(config.eviction_policy),
        )
        yield Store(disk, most_write_bytes=most_write_bytes)
    # A neighbour before Redis, because it is asked only for what a hint says it has.
    for medium in _open_remote(config, fingerprint, spec.block_bytes):
        yield Store(medium, num_threads=REMOTE_THREADS, most_write_bytes=most_write_bytes)


def _open_remote(config: EngineConfig, fingerprint: bytes, block_bytes: int) -> Iterator[Medium]:
    secret = config.kv_remote_secret
    if config.kv_neighbours is None and config.kv_remote is None:
        return
    from octavo.tiers.neighbours import NeighbourMedium
    from octavo.tiers.remote import RemoteMedium

    if config.kv_neighbours is not None:
        yield NeighbourMedium(fingerprint, block_bytes, secret or "", config.kv_neighbours)
    if config.kv_remote is not None:
        yield RemoteMedium(config.kv_remote, fingerprint, block_bytes, secret=secret)


def _digest_of_weights(path: Path) -> str:
    import xxhash  # imported here, because an engine without stores does not need it

    digest = xxhash.xxh3_128()
    for file in weight_files(path):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while piece := stream.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()
