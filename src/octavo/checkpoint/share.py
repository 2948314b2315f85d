"""The part of a model that each rank computes and keeps: some outputs of every matrix, some heads of the cache.

    panels of 32 outputs   | 0 1 | 2 3 4 | 5 6 7 |          three ranks, each a whole number of panels
    KV heads 3 over 2      | 0 | 1 2 |                      query heads go with their KV head
    KV heads 2 over 4      | 0 | 0 | 1 | 1 |                replicated; each rank has half of its query heads

What is left over goes to the last ranks, because rank 0 plans the steps and samples too. No sum is split, and no block
of a quantised row, so the results do not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.checkpoint.model_config import ModelConfig
from octavo.errors import ConfigError

_PANEL = 32


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank.

    Raises:
        ConfigError: the model has too few heads or outputs for so many ranks, or a layer that is not split.
    """

    config: ModelConfig
    rank: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        config, experts = self.config, self.config.experts
        if self.count == 1:
            return
        prefix = f"tensor_parallel_size is {self.count}, but {config.architecture}"
        if config.latent is not None:
            raise ConfigError(f"{prefix} caches latents that all heads share and that cannot be split among ranks")
        if config.layer.qk_norm == "projection":
            raise ConfigError(f"{prefix} normalises queries and keys over all heads, which cannot be split among ranks")
        if self.count > config.num_heads:
            raise ConfigError(f"{prefix} has only {config.num_heads} heads")
        widths = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        if experts is None:
            widths["intermediate_size"] = config.intermediate_size
        else:
            widths["the experts' intermediate_size"] = experts.intermediate_size
            if experts.shared_intermediate_size:
                widths["the shared expert's intermediate_size"] = experts.shared_intermediate_size
        for name, width in widths.items():
            if -(-width // _PANEL) < self.count:
                raise ConfigError(f"{prefix} has {name} {width}, too few for at least {_PANEL} outputs in each rank")

    def outputs(self, total: int) -> slice:
        """Return the rank's share of a matrix's outputs, in whole panels."""
        panels = -(-total // _PANEL)
        first, last = (rank * panels // self.count for rank in (self.rank, self.rank + 1))
        return slice(first * _PANEL, min(total, last * _PANEL))

    def begins(self, total: int) -> list[int]:
        """Return where the `outputs` of each rank begin, and where they end."""
        return [*(replace(self, rank=rank).outputs(total).start for rank in range(self.count)), total]

    @property
    def kv_heads(self) -> slice:
        return kv_heads_of(self.config.num_kv_heads, self.rank, self.count)

    @property
    def query_heads(self) -> slice:
        return query_heads_of(self.config.num_heads, self.config.num_kv_heads, self.rank, self.count)

    @property
    def head_rows(self) -> tuple[slice, slice, slice]:
        """The rows of the projections to queries, keys and values."""
        config, kv = self.config, self.kv_heads
        return _times(self.query_heads, config.head_dim), _times(kv, config.head_dim), _times(kv, config.value_dim)

    @property
    def attended(self) -> list[int]:
        """Where the columns of each rank's heads begin, and where they end."""
        firsts = [replace(self, rank=rank).query_heads.start for rank in range(self.count)]
        return [head * self.config.value_dim for head in (*firsts, self.config.num_heads)]


def kv_heads_of(num_kv_heads: int, rank: int, count: int) -> slice:
    """Return the KV heads that a rank stores; with fewer heads than ranks, several ranks store the same one."""
    if num_kv_heads < count:
        head = rank * num_kv_heads // count
        return slice(head, head + 1)
    return slice(rank * num_kv_heads // count, (rank + 1) * num_kv_heads // count)


def query_heads_of(num_heads: int, num_kv_heads: int, rank: int, count: int) -> slice:
    """Return the query heads that a rank computes: those of its KV heads, or its part of those of a replicated one."""
    kv, group = kv_heads_of(num_kv_heads, rank, count), num_heads // num_kv_heads
    first, last = kv.start * group, kv.stop * group
    if num_kv_heads >= count:
        return slice(first, last)
    sharing = [r for r in range(count) if r * num_kv_heads // count == kv.start]
    place = rank - sharing[0]
    return slice(first + place * group // len(sharing), first + (place + 1) * group // len(sharing))


def _times(heads: slice, dim: int) -> slice:
    return slice(heads.start * dim, heads.stop * dim)
