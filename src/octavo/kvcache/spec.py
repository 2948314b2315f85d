"""The size of blocks and the grouping of layers: arithmetic shared by the allocator and the calculator.

Layers that keep the same tokens (full attention, or one sliding window) form a group and share block tables.
All groups have the same number of bytes per block, so that one pool serves them all: the number of layers in the least
frequent kind limits the size of all groups.

    26 layers, 22 sliding + 4 full      ->  group 0: 4 full | groups 1..6: 4, 4, 4, 4, 4, 2 sliding
    32 layers, one kind                 ->  group 0: all 32

A budget with entropies of attention divides the layers without a window into groups of like entropy, two to four unless
windows allow only smaller ones. Each group chooses its blocks and their number.

    30 layers, with entropies           ->  groups 0, 1, 2: 10 each, by ascending entropy

Copies in int8 of the first blocks and the most recent ones (`Int8Copies`) are further groups, of as many layers as fit
into a block. They slide, except for the first blocks:

    30 layers in int4, with copies      ->  group 0: all 30 | groups 1, 2: copies of 15 each, sliding
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.formats import (
    ALIGNMENT,
    KV_FORMATS,
    Int8Copies,
    KVFormat,
    int8_copies,
    layer_formats,
    needs_copies,
)

# Measured at several numbers of blocks, and checked by a test.
BOOKKEEPING_BYTES = 112
TOKEN_ID_BYTES = 4
# Ranked policies: two arrays, and numbers in a heap of which an eighth may be out of date.
_RANKED_BYTES = 72
# The first layers attend broadly: no few blocks hold most of their attention (Tang et al. 2024, section 4.1).
_DENSE_LAYERS = 2
MEASURES_NO_COPIES = "needs a cache without copies in int8, which are of blocks in certain positions"
_EVICTION_BYTES = {"lru": 8, "adaptive": 101}


def eviction_bytes(policy: str) -> int:
    """Return the host memory that an eviction policy takes per block, beyond `bookkeeping_bytes`."""
    return _EVICTION_BYTES.get(policy, _RANKED_BYTES)


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """The storage of one attention layer per token: `num_kv_heads * (key_dim + value_dim)` elements.

    Attributes:
        latent: whether values are the last `value_dim` dimensions of keys, which floats are stored as once; codes of
            keys and values are stored both.
        bounded: whether each block also has the bounds of its keys, `2 * num_kv_heads * key_dim` elements, by which a
            budget's sparse reads choose blocks.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None
    bounded: bool = False
    latent: bool = False

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def token_bytes(self, format: KVFormat) -> int:
        """Return the bytes of one token, including scales, without padding."""
        values = 0 if self.latent and format.plain else format.values.vector_bytes(self.value_dim)
        return self.num_kv_heads * (format.keys.vector_bytes(self.key_dim) + values)

    def bounds_bytes(self, format: KVFormat) -> int:
        """Return the bytes of the bounds of a block's keys."""
        return 2 * self.num_kv_heads * format.keys.vector_bytes(self.key_dim) if self.bounded else 0

    def block_bytes(self, format: KVFormat, block_size: int) -> int:
        """Return the bytes of this layer's part of a block; a coded part is padded."""
        num_bytes = block_size * self.token_bytes(format) + self.bounds_bytes(format)
        return num_bytes if format.plain else -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Window(NamedTuple):
    """Keeps the blocks of a group with the last `tokens` tokens, and the first `sink_blocks` (`holdings.Retention`)."""

    tokens: int
    sink_blocks: int = 0

    @property
    def leaves_out(self) -> bool:
        return False

    def passed(self, num_computed: int, block_size: int) -> int:
        """Return the index of the first block that the next token still sees, apart from the first `sink_blocks`."""
        return max(0, num_computed - self.tokens + 1) // block_size

    def most_blocks(self, block_size: int, max_step: int = 1) -> int:
        """Return the most blocks that it keeps, with the tokens of a step: a block at either end may be partial."""
        return -(-(self.tokens - 1 + max_step) // block_size) + 1 + self.sink_blocks

    def let_go(self, table: Sequence[int], num_computed: int, block_size: int) -> Sequence[int]:
        first = end = min(self.passed(num_computed, block_size), len(table))
        while first > self.sink_blocks and table[first - 1]:  # those before it are null blocks already
            first -= 1
        return range(first, end)

    def due_at(self, num_computed: int, block_size: int) -> int:
        return (self.passed(num_computed, block_size) + 1) * block_size + self.tokens - 1

    def add(self, mass: object) -> None:
        pass

    def copy(self) -> Window:
        return self


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers (by index in the model) that share block tables.

    Attributes:
        sink_blocks: first blocks that stay when the window has slid past them.
        in_int8: whether these are copies in int8 of layers that another group stores.
        entropy: mean entropy of attention in the layers, if a budget is divided by it.
    """

    layer_indices: tuple[int, ...]
    sliding_window: int | None
    sink_blocks: int = 0
    in_int8: bool = False
    entropy: float | None = None

    @property
    def window(self) -> Window | None:
        return None if self.sliding_window is None else Window(self.sliding_window, self.sink_blocks)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of a cache: plain numbers, from which arena, manager and calculator are built.

    Attributes:
        dtype: the codec of keys and values, for all layers or for each; see `kvcache/formats.py` for the syntax.
        block_bytes: bytes of one block, with keys and values of all layers of one group; a multiple of `ALIGNMENT`.
    """

    layers: tuple[LayerKVSpec, ...]
    groups: tuple[GroupSpec, ...]
    block_size: int
    dtype: str
    block_bytes: int

    @classmethod
    def build(
        cls, layers: Sequence[LayerKVSpec], block_size: int, dtype: str, budget: KVBudget | None = None
    ) -> KVCacheSpec:
        """Group `layers` and size the blocks.

        Args:
            budget: what sequences keep or read by default.

        Raises:
            ConfigError: there are no layers, the block size is below 1, the dtype is unknown or for another number of
                layers, or the budget does not go with the dtype.
        """
        if not layers:
            raise ConfigError("a KV cache needs at least one attention layer")
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        if budget is not None and not budget.evicts:
            if not all(format.plain for format in layer_formats(dtype, len(layers))):
                raise ConfigError(
                    f"kv_budget of mode {budget.mode} needs a cache of floats, got kv_cache_dtype {dtype}"
                )
            layers = [
                replace(layer, bounded=layer.sliding_window is None and index >= _DENSE_LAYERS)
                for index, layer in enumerate(layers)
            ]
            count = sum(layer.bounded for layer in layers)
            if budget.layers and len(budget.layers) != count:
                raise ConfigError(
                    f"kv_budget.layers has {len(budget.layers)} entropies, but {count} layers read sparsely: those "
                    f"after the first {_DENSE_LAYERS} without a sliding window"
                )
        entropies: Sequence[float] = ()
        if budget is not None and budget.measures:
            if int8_copies(dtype) is not None:
                raise ConfigError(f"kv_budget of mode {budget.mode} {MEASURES_NO_COPIES}, got kv_cache_dtype {dtype}")
            entropies, count = budget.layers, sum(layer.sliding_window is None for layer in layers)
            if entropies and (len(entropies) != count or count < 2):
                raise ConfigError(
                    f"kv_budget.layers has {len(entropies)} entropies, but {count} layers have no sliding window; "
                    "groups of like entropy need an entropy for each, and at least 2"
                )
        groups = _group_layers(layers, entropies)
        unsized = cls(tuple(layers), groups, block_size, dtype, 0)
        used = max(sum(map(unsized.layer_bytes, group.layer_indices)) for group in groups)
        spec = replace(unsized, block_bytes=-(-used // ALIGNMENT) * ALIGNMENT)
        return spec if (copies := int8_copies(dtype)) is None else spec._with_copies(copies)

    @property
    def formats(self) -> tuple[KVFormat, ...]:
        """The format of each layer's keys and values."""
        return layer_formats(self.dtype, len(self.layers))

    @property
    def int8_copies(self) -> Int8Copies | None:
        """The tokens that are kept in int8 as well."""
        return int8_copies(self.dtype)

    def copy_bytes(self, index: int) -> int:
        """Return the bytes of a layer's part of a block of copies in int8."""
        return self.layers[index].block_bytes(KV_FORMATS["int8"], self.block_size)

    @property
    def plain(self) -> bool:
        """Whether all layers are stored as floats."""
        return all(format.plain for format in self.formats)

    def layer_bytes(self, index: int) -> int:
        """Return the bytes of a layer's part of a block."""
        num_bytes = self.layers[index].block_bytes(self.formats[index], self.block_size)
        # Layers of floats need no padding, unless coded layers follow, whose parts start on cache lines.
        return num_bytes if self.plain else -(-num_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def bookkeeping_bytes(self) -> int:
        """The host memory for the bookkeeping of one block: its tokens, keys, owner, and places in the indices."""
        return BOOKKEEPING_BYTES + TOKEN_ID_BYTES * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token's keys and values in all layers, including scales, without padding."""
        return sum(layer.token_bytes(format) for layer, format in zip(self.layers, self.formats, strict=True))

    def blocks_for_tokens(self, num_tokens: int) -> int:
        """Return the number of blocks in a full-attention table of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def windows(self, budget: KVBudget | None = None) -> tuple[Window | None, ...]:
        """Return each group's window; None if it keeps everything, or attention decides (`attended.py`).

        A budget that slides is a window over the groups with full attention, with one block of sinks.
        """
        kept = None if budget is None or not budget.slides else Window(budget.tokens - self.block_size, 1)
        return tuple(group.window or kept for group in self.groups)

    def blocks_kept(self, budget: KVBudget) -> list[int]:
        """Return the most blocks that each group without a window keeps of a sequence that exceeds its budget."""
        entropies = [group.entropy for group in self.groups if group.entropy is not None]
        divided = iter(budget.divided(entropies, self.block_size) if entropies else ())
        mean = budget.tokens // self.block_size
        return [mean if group.entropy is None else next(divided) for group in self.groups]

    def most_blocks(self, budget: KVBudget | None = None, num_prompt_tokens: int = 0, max_step: int = 1) -> list[int]:
        """Return the most blocks that each group keeps of a sequence, with the tokens of the step in flight.

        A budget that measures attention keeps the whole prompt until it is computed.
        """
        kept = [sys.maxsize] * len(self.groups)
        if budget is not None and budget.measures:
            first = self.blocks_for_tokens(budget.first_eviction(num_prompt_tokens))
            kept = [max(first, most) for most in self.blocks_kept(budget)]
        return [
            most if window is None else window.most_blocks(self.block_size, max_step)
            for window, most in zip(self.windows(budget), kept, strict=True)
        ]

    def peak_blocks(
        self, num_tokens: int, max_step: int, budget: KVBudget | None = None, num_prompt_tokens: int = 0
    ) -> int:
        """Return the maximum number of blocks, in all groups, that one sequence of `num_tokens` tokens holds at a time.

        Args:
            max_step: maximum number of tokens in a step.
        """
        blocks = self.blocks_for_tokens(num_tokens)
        return sum(min(blocks, most) for most in self.most_blocks(budget, num_prompt_tokens, max_step))

    def _with_copies(self, copies: Int8Copies) -> KVCacheSpec:
        """Add the groups of copies, of as many layers each as fit into a block, which grows for a layer too large."""
        added: list[GroupSpec] = []
        # A query in the first slot of a block sees `recent_blocks` - 1 whole blocks before it.
        tokens = (copies.recent_blocks - 1) * self.block_size + 1
        by_window: dict[int | None, list[int]] = {}
        for index, (layer, format) in enumerate(zip(self.layers, self.formats, strict=True)):
            if needs_copies(format):
                by_window.setdefault(layer.sliding_window, []).append(index)
        block_bytes = self.block_bytes
        for window, indices in by_window.items():
            largest = max(map(self.copy_bytes, indices))
            block_bytes = max(block_bytes, largest)
            count = -(-len(indices) // (block_bytes // largest))
            each = -(-len(indices) // count)
            seen = tokens if window is None else min(tokens, window)
            added += [
                GroupSpec(tuple(indices[start : start + each]), seen, copies.sink_blocks, in_int8=True)
                for start in range(0, len(indices), each)
            ]
        return replace(self, groups=(*self.groups, *added), block_bytes=block_bytes)


def _group_layers(layers: Sequence[LayerKVSpec], entropies: Sequence[float] = ()) -> tuple[GroupSpec, ...]:
    """Group layers; with entropies of those without a window, each group of these has layers of like entropy."""
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        by_window.setdefault(layer.sliding_window, []).append(index)
    size = min(len(indices) for indices in by_window.values())
    entropy_of = dict(zip(by_window.get(None, ()), entropies, strict=True)) if entropies else {}
    if entropies:
        by_window[None].sort(key=lambda index: (entropy_of[index], index))
        # The number of groups that leaves least of their blocks empty.
        count = min((4, 3, 2), key=lambda count: (-len(entropies) % count, -count))
        size = min(size, -(-len(entropies) // count))
    # Full attention first, because its hits bound those of the windows.
    windows = sorted(by_window, key=lambda window: (window is not None, window or 0))
    groups = []
    for window in windows:
        for start in range(0, len(by_window[window]), size):
            indices = by_window[window][start : start + size]
            mean = (
                math.fsum(entropy_of[index] for index in indices) / len(indices)
                if window is None and entropies
                else None
            )
            groups.append(GroupSpec(tuple(sorted(indices)), window, entropy=mean))
    return tuple(groups)
