"""The memory of the KV cache: one allocation, cut into blocks, and a view of it for each layer.

    arena   [num_blocks][block_bytes]
    block   | layer a: K | layer a: V | layer b: K | layer b: V | … | padding |

`pair` elements are stored side by side (2 for 16-bit types, as `vdpbf16ps`, AMX and Arm `bfdot` expect; else 1):

    K   [kv_heads][key_dim / pair][block_size][pair]        tokens adjacent: no horizontal sums in Q·K
    V   [kv_heads][block_size / pair][value_dim][pair]      dimensions adjacent: none in P·V
    B   [kv_heads][largest, smallest][key_dim]              bounds of the block's keys, if the layer is bounded

Latents (`LatentKV`) have no V: values are the last dimensions of keys.

This is the layout for the CPU's kernels. Those of a GPU read whole heads, token by token (`BlockLayout.TOKENS`):

    K   [kv_heads][block_size][key_dim]
    V   [kv_heads][block_size][value_dim]

These layouts are for floats; `storage/codec/__init__.py` shows those of coded layers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS, KVFormat
from octavo.kvcache.spec import KVCacheSpec
from octavo.storage.codec import codecs_of
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV, SideArguments
from octavo.storage.recent_kv import RecentKV, without_copies
from octavo.units import format_bytes


class BlockLayout(Enum):
    """The layout of keys and values inside a block; see the module docstring."""

    PAIRS = "pairs"
    TOKENS = "tokens"


@dataclass(frozen=True)
class FloatKV(LayerKV):
    """One layer's part of every block, in floats, as strided views into the arena.

    Attributes:
        key: [num_blocks, kv_heads, key_dim // pair, block_size, pair]
        value: [num_blocks, kv_heads, block_size // pair, value_dim, pair]
        bounds: [num_blocks, kv_heads, 2, key_dim], what the kernels know of a block's keys; None unless bounded
        bounds_index: number of layers with bounds before this one
    """

    key: torch.Tensor
    value: torch.Tensor
    group: int
    sliding_window: int | None
    bounds: torch.Tensor | None = None
    bounds_index: int = 0

    @property
    def for_kernels(self) -> tuple[SideArguments, SideArguments]:
        return self.key, self.value

    @property
    def block_size(self) -> int:
        return self.key.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def pair(self) -> int:
        return self.key.shape[4]

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """See `LayerKV.write`."""
        self.write_keys(key, slots)
        blocks, offsets = slots // self.block_size, slots % self.block_size
        # Advanced indices separated by slices put the token dimension first on the left-hand side.
        self.value[blocks, :, offsets // self.pair, :, offsets % self.pair] = value.to(self.value.dtype)

    def write_keys(self, key: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys as `write` does."""
        num_tokens, heads, key_dim = key.shape
        units = key.to(self.key.dtype).view(num_tokens, heads, key_dim // self.pair, self.pair)
        self.key[slots // self.block_size, :, :, slots % self.block_size] = units

    def gather_heads(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV.gather_heads`. Blocks have the same order of dimensions, so one strided copy is enough."""
        # [kv_heads, blocks, size / pair, pair, value_dim]
        value = self.value.index_select(0, block_table).permute(1, 0, 2, 4, 3)
        value = value.reshape(value.shape[0], -1, value.shape[4])
        return self.gather_keys(block_table, num_tokens), value[:, :num_tokens]

    def gather_keys(self, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the keys that `gather_heads` returns."""
        # [kv_heads, key_dim / pair, pair, blocks, size]
        key = self.key.index_select(0, block_table).permute(1, 2, 4, 0, 3)
        return key.reshape(key.shape[0], key.shape[1] * key.shape[2], -1)[:, :, :num_tokens]


class LatentKV(FloatKV):
    """A layer whose values are the last dimensions of its keys, and are stored as those alone.

    Attributes:
        value: [num_blocks, kv_heads, value_dim // pair, block_size, pair], the part of `key` that holds them
    """

    @property
    def value_dim(self) -> int:
        return self.value.shape[2] * self.pair

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """See `LayerKV.write`; the value is part of the key."""
        self.write_keys(key, slots)

    def gather_heads(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKV.gather_heads`."""
        key = self.gather_keys(block_table, num_tokens)
        return key, key[:, -self.value_dim :].transpose(1, 2)


class KVArena:
    """The memory of all blocks of one engine on one device; which sequence holds which block is decided elsewhere.

    Args:
        layout: the layout that the attention backend expects.

    Attributes:
        layers: one view for each of `spec.layers`, in the same order.

    Raises:
        ConfigError: there are fewer than 2 blocks; block 0 is the null block, which no sequence owns.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        layout: BlockLayout = BlockLayout.PAIRS,
    ) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a KV cache needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.spec = spec
        self.num_blocks = num_blocks
        self.layout = layout
        # Zeroed, because the unwritten rest of a block is multiplied by weights of zero and must not be NaN.
        if torch.device(device).type == "cpu":
            self._bytes = zero_pages(self.nbytes, "the KV cache").view(num_blocks, -1)
        else:
            self._bytes = torch.zeros(num_blocks, spec.block_bytes, dtype=torch.uint8, device=device)
        self.layers = self._layer_views()

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.spec.block_bytes

    @property
    def memory(self) -> torch.Tensor:
        """All blocks, uint8 [num_blocks, block_bytes]."""
        return self._bytes

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) pairs; sources are read before any destination is written."""
        if not copies:
            return
        if not independent(copies):
            sources, destinations = zip(*copies, strict=True)
            self.write_blocks(destinations, self.read_blocks(sources))
        else:
            self._copy(self._bytes, self._bytes, copies)

    def rows(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of whole blocks, uint8 [block_bytes] each."""
        return [self._bytes[block_id] for block_id in ids]

    def read_blocks(self, ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of whole blocks, as rows uint8 [n, block_bytes] on the arena's device."""
        if not self._bytes.is_cuda:
            return self._bytes.index_select(0, torch.tensor(ids, dtype=torch.int64))
        rows = self._bytes.new_empty(len(ids), self.spec.block_bytes)
        self._copy(self._bytes, rows, [(block_id, row) for row, block_id in enumerate(ids)])
        return rows

    def write_blocks(self, ids: Sequence[int], rows: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Overwrite the blocks `ids`, which must be distinct, with rows uint8 [block_bytes]: a tensor [n, block_bytes]
        from any device, or separate ones on a CPU."""
        if len(ids) != len(rows):
            raise ValueError(f"{len(rows)} rows for {len(ids)} blocks")
        source = rows.to(self._bytes.device) if isinstance(rows, torch.Tensor) else rows
        self._copy(source, self._bytes, list(enumerate(ids)))

    def _copy(
        self, source: torch.Tensor | Sequence[torch.Tensor], target: torch.Tensor, copies: Sequence[tuple[int, int]]
    ) -> None:
        """Copy rows of `source` to rows of `target`; in the same tensor, no row may be both read and written."""
        if isinstance(source, torch.Tensor) and source.is_cuda and importlib.util.find_spec("triton") is not None:
            from octavo.storage.block_copy import copy_blocks

            copy_blocks(source, target, copies)
            return
        # Row by row, because `rows[ids] = …` copies byte by byte, which is 16 times as slow.
        for place, destination in copies:
            target[destination] = source[place]

    @property
    def float_layers(self) -> list[FloatKV]:
        """The layers that hold floats."""
        return [layer for layer in self.layers if isinstance(layer, FloatKV)]

    @property
    def coded_layers(self) -> list[CodedKV]:
        """The layers that hold codes; those with copies in int8 without these."""
        return [layer for layer in map(without_copies, self.layers) if isinstance(layer, CodedKV)]

    @property
    def calibrated_layers(self) -> dict[int, CodedKV]:
        """The layers whose scales are chosen before anything is stored, by index."""
        return {
            index: layer
            for index, layer in enumerate(map(without_copies, self.layers))
            if isinstance(layer, CodedKV) and self.spec.formats[index].calibrated
        }

    def _layer_views(self) -> list[LayerKV]:
        spec = self.spec
        views: dict[int, LayerKV] = {}
        for group_index, group in enumerate(spec.groups):
            offset = 0
            for index in group.layer_indices:
                if group.in_int8:
                    copies, own = self._coded_view(index, KV_FORMATS["int8"], group_index, offset), views[index]
                    assert isinstance(own, CodedKV)
                    assert spec.int8_copies is not None
                    views[index] = RecentKV(own, copies, spec.int8_copies)
                    offset += spec.copy_bytes(index)
                    continue
                format = spec.formats[index]
                if format.plain:
                    views[index] = self._float_view(index, group_index, offset)
                else:
                    views[index] = self._coded_view(index, format, group_index, offset)
                offset += spec.layer_bytes(index)
        return [views[index] for index in range(len(spec.layers))]

    def _coded_view(self, index: int, format: KVFormat, group: int, offset: int) -> CodedKV:
        return CodedKV.view(
            self._bytes, offset, self.spec.layers[index], codecs_of(format), self.spec.block_size, group,
            by_tokens=self.layout is BlockLayout.TOKENS,
        )  # fmt: skip

    def _float_view(self, index: int, group: int, offset: int) -> FloatKV:
        spec, layer = self.spec, self.spec.layers[index]
        dtype: torch.dtype = getattr(torch, spec.formats[index].name)
        element = dtype.itemsize
        typed = self._bytes.view(-1).view(dtype)
        block_stride, first = spec.block_bytes // element, offset // element
        heads, size = layer.num_kv_heads, spec.block_size
        if self.layout is BlockLayout.TOKENS:
            pair, key_strides = 1, (1, layer.key_dim, 1)
        else:
            pair = pair_width(size, layer.key_dim, element)
            key_strides = (size * pair, pair, 1)
        key = typed.as_strided(
            (self.num_blocks, heads, layer.key_dim // pair, size, pair),
            (block_stride, layer.key_dim * size, *key_strides),
            first,
        )
        after_keys = first + heads * layer.key_dim * size
        bounds = None
        if layer.bounded:
            shape, strides = (self.num_blocks, heads, 2, layer.key_dim), (2 * layer.key_dim, layer.key_dim, 1)
            after = after_keys + (0 if layer.latent else heads * layer.value_dim * size)
            bounds = typed.as_strided(shape, (block_stride, *strides), after)
        before = sum(other.bounded for other in spec.layers[:index])
        if layer.latent:
            value = key[:, :, -(layer.value_dim // pair) :]
            return LatentKV(key, value, group, layer.sliding_window, bounds, before)
        value = typed.as_strided(
            (self.num_blocks, heads, size // pair, layer.value_dim, pair),
            (block_stride, layer.value_dim * size, layer.value_dim * pair, pair, 1),
            after_keys,
        )
        return FloatKV(key, value, group, layer.sliding_window, bounds, before)


def pair_width(block_size: int, key_dim: int, element_bytes: int) -> int:
    """Return the number of elements stored side by side: 2 for 16-bit types with even sizes, else 1."""
    return 2 if element_bytes == 2 and block_size % 2 == 0 and key_dim % 2 == 0 else 1


def independent(copies: Sequence[tuple[int, int]]) -> bool:
    """Whether no copy writes a block that another reads, so that their order does not matter."""
    return {source for source, _ in copies}.isdisjoint(destination for _, destination in copies)


def zero_pages(nbytes: int, purpose: str) -> torch.Tensor:
    """Return private pages, uint8 [nbytes], which the system zeroes and allocates on first write: unused ones cost
    nothing.

    Raises:
        ConfigError: the system refuses so much memory, for instance because of `ulimit -v` or strict overcommit.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, nbytes, **flags)
    except OSError as error:
        raise ConfigError(f"cannot reserve {format_bytes(nbytes)} of memory for {purpose}: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Accesses to blocks are scattered over the pool, so 2 MiB pages avoid most TLB misses. A kernel without huge
        # pages refuses the advice, and small pages work too.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
