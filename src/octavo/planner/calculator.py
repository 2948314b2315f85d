"""How many blocks a memory budget buys: the arithmetic that the engine allocates by."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import format_bytes
from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool of `num_blocks` blocks (the null block included) and the bytes it takes."""

    num_blocks: int
    num_bytes: int

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1


def pool_for_memory(
    spec: KVCacheSpec, kv_bytes: int, *, max_num_seqs: int, max_model_len: int, max_step: int
) -> PoolSize:
    """The largest pool within `kv_bytes`, but never more than all sequences at full length could use.

    Args:
        max_step: most tokens computed in one step (bounds what a sliding window holds).

    Raises:
        ConfigError: not even the null block and one other fit.
    """
    affordable = kv_bytes // spec.block_bytes
    useful = max_num_seqs * spec.peak_blocks(max_model_len, max_step) + 1
    num_blocks = min(affordable, useful)
    if num_blocks < 2:
        raise ConfigError(
            f"{format_bytes(kv_bytes)} of KV cache memory hold {affordable} blocks of {format_bytes(spec.block_bytes)} "
            f"({spec.block_size} tokens each); at least 2 are needed: raise kv_cache_memory or lower block_size"
        )
    return PoolSize(num_blocks, num_blocks * spec.block_bytes)
