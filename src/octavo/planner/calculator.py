"""The memory arithmetic shared by the engine's allocation and `octavo plan`.

available  | weights | activations | KV cache: the null block, then blocks for sequences | swap space | unused |

With a GPU, the swap space is not part of this memory: it is in the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.config import DEFAULT_EVICTION_POLICY, EngineConfig
from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.formats import KV_FORMATS, needs_copies
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec, eviction_bytes
from octavo.kvcache.splits import SPLIT, max_splits, partial_bytes
from octavo.planner.model_shape import ModelShape
from octavo.units import format_bytes

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one weight or activation. Cache sizes are in `kvcache/formats.py`."""


def counted_dtype(option: str) -> str:
    """Return the type in which weights and activations are counted for a `dtype` option; bfloat16 for auto."""
    return option if option in DTYPE_BYTES else "bfloat16"


WEIGHT_BITS: Mapping[str, float] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8": 8,
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k_m": 5.70,
    "q4_k_m": 4.89,
    "q4_1": 5,
    "iq4_nl": 4.68,
    "q4_0": 4.5,
    "iq4_xs": 4.46,
    "mxfp4": 4.25,
    "int4": 4.25,
}
"""Bits of a weight by kind, scales included: ggml's blocks; for mixtures of blocks (…_m, iq4_…) what Llama 3.1 8B
takes; `int4` with a scale of 16 bits for each group of 64, `fp8` with a scale for each block of 128 × 128 or more."""

# A block of "max" is rounded up to whole tiles of the kernels.
MAX_BLOCK_MULTIPLE = 16

# Most host memory that swapped blocks take by default.
DEFAULT_SWAP_SPACE = 1 << 30

# More threads than for the disk, because they mostly wait for answers.
REMOTE_THREADS = 4
# Blocks that each of these has in memory of its own at most: those of one read, and two in the client library.
REMOTE_BLOCKS = 18

# Logits that prompt logprobs are computed from at a time, and how many times as much is alive at once with them.
SCORED_BYTES = 16 << 20
SCORING_COPIES = 4
# Float32 rows of the vocabulary alive at once in the sampler: logits, adjusted, scaled, probabilities, a mask.
SAMPLER_COPIES = 5


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool of `num_blocks` blocks (the null block included) and the bytes it takes."""

    num_blocks: int
    num_bytes: int

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The division of a device's memory, in bytes.

    Attributes:
        available: what weights, activations and cache may take together.
        cache_share: share of the memory left by the weights that the cache takes at most by default: below 1 on a
            CPU, whose memory is used by other processes too.
        swap: explicitly requested swap space, reserved first; default swap space comes last instead.
    """

    available: int
    weights: int
    activations: int
    cache_share: float = 1.0
    swap: int = 0

    @property
    def left(self) -> int:
        """Bytes left by weights, activations and swap; negative if these do not fit."""
        return self.available - self.weights - self.activations - self.swap

    @property
    def for_cache(self) -> int:
        return max(0, min(int((self.available - self.weights) * self.cache_share), self.left))


def prefix_slots(spec: KVCacheSpec, host_memory: int, eviction_policy: str = DEFAULT_EVICTION_POLICY) -> int:
    """Return how many blocks of prefixes fit in `--kv-host-memory`, their bookkeeping included.

    Raises:
        ConfigError: not one fits.
    """
    if not host_memory:
        return 0
    # Imported here: it needs numpy, which most plans do without.
    from octavo.kvcache.host_memory import HostMemory

    each = spec.block_bytes + HostMemory.bookkeeping_bytes(spec.block_size) + eviction_bytes(eviction_policy)
    if host_memory < each:
        raise ConfigError(
            f"kv_host_memory is {format_bytes(host_memory)}, but a block and its bookkeeping take {format_bytes(each)}"
        )
    return host_memory // each


def store_bytes(
    spec: KVCacheSpec, disk_size: int, *, num_remote: int, eviction_policy: str = DEFAULT_EVICTION_POLICY
) -> int:
    """Return the host memory that the stores below host memory take: the disk's index, and blocks on their way.

    Blocks from disk are read to where they stay.

    Args:
        disk_size: `--kv-disk-size`; 0 without `--kv-disk`.
        num_remote: number of stores that blocks come from over a network.
    """
    on_their_way = num_remote * REMOTE_THREADS * REMOTE_BLOCKS * spec.block_bytes
    if not disk_size:
        return on_their_way
    # Imported here: it needs xxhash, which most plans do without.
    from octavo.tiers.slabs import INDEX_BYTES, most_slots

    slots = most_slots(disk_size, spec.block_bytes)
    return slots * (INDEX_BYTES + eviction_bytes(eviction_policy)) + on_their_way


def block_tokens(block_size: int | str, max_model_len: int) -> int:
    """Return the tokens per block; "max" means one block of `max_model_len` tokens, as a contiguous allocator has."""
    if isinstance(block_size, int):
        return block_size
    return -(-max_model_len // MAX_BLOCK_MULTIPLE) * MAX_BLOCK_MULTIPLE


def smallest_pool(spec: KVCacheSpec) -> PoolSize:
    """The smallest pool that can serve a token: the null block and one block in each group."""
    num_blocks = 1 + len(spec.groups)
    return PoolSize(num_blocks, num_blocks * spec.block_bytes)


def default_swap_space(config: EngineConfig, spec: KVCacheSpec, max_model_len: int) -> int:
    """Bytes of the swap space if none is requested and the host has enough memory.

    No more than `max_num_seqs` sequences of `max_model_len` tokens take, because each slot has bookkeeping, and a
    gigabyte of a tiny model's blocks is a million slots.
    """
    useful = config.max_num_seqs * spec.peak_blocks(max_model_len, config.max_num_batched_tokens)
    return min(DEFAULT_SWAP_SPACE // spec.block_bytes, useful) * spec.block_bytes


def pool_for_memory(
    spec: KVCacheSpec, kv_bytes: int, *, max_num_seqs: int, max_model_len: int, max_step: int
) -> PoolSize:
    """The largest pool within `kv_bytes`, but never more than all sequences at full length could use.

    Args:
        max_step: maximum number of tokens computed in one step (bounds what a sliding window holds).

    Raises:
        ConfigError: not even the smallest pool fits.
    """
    affordable = kv_bytes // spec.block_bytes
    useful = max_num_seqs * spec.peak_blocks(max_model_len, max_step) + 1
    num_blocks = min(affordable, useful)
    if num_blocks < (least := smallest_pool(spec).num_blocks):
        raise ConfigError(
            f"{format_bytes(kv_bytes)} of KV cache memory hold {affordable} blocks of {format_bytes(spec.block_bytes)} "
            f"({spec.block_size} tokens each); at least {least} are needed: raise kv_cache_memory or lower block_size"
        )
    return PoolSize(num_blocks, num_blocks * spec.block_bytes)


def weight_bytes(shape: ModelShape, dtype: str, *, tied_head_copied: bool) -> int:
    """Bytes of the weights in memory.

    Args:
        tied_head_copied: whether a head tied to the embedding is stored a second time, packed for matrix products, as
            on a CPU.
    """
    count = shape.parameters
    copied = count.embedding if tied_head_copied and not count.head else 0
    return (count.total + copied) * DTYPE_BYTES[dtype]


def activation_bytes(
    shape: ModelShape, dtype: str, *, max_step: int, max_rows: int, gpu_context: int | None = None
) -> int:
    """Estimated peak bytes of one step's tensors, besides weights and cache.

    The larger of a layer and the head, for the most tokens and rows of a step:

        stream  max_step × hidden_size × (residual + 2 × dtype)
        layer   stream + max_step × max(attention_width, mlp_width) × dtype
        head    stream + max_rows × vocab_size × (dtype + SAMPLER_COPIES × 4)
        scores  stream + (max_rows + SCORING_COPIES × scored rows) × vocab_size × 4

    The residual (4 bytes on a CPU), the normalised rows and the attention's output are alive during a layer's widest
    products. Attention scores are left out, because they are computed in tiles. Prompt logprobs need the logits of
    `scored_rows` rows at a time, in addition to those that tokens are drawn from.

    Args:
        max_step: maximum number of tokens computed in one step.
        max_rows: maximum number of rows of logits, one per sequence.
        gpu_context: maximum length of a sequence, if the device is a GPU: its decodes are split and leave partial
            results, for recorded steps and for others (`kvcache/splits.py`).
    """
    size = DTYPE_BYTES[dtype]
    rows = min(max_rows, max_step)
    residual = 4 if gpu_context is None else size
    stream = max_step * shape.config.hidden_size * (residual + 2 * size)
    layer = stream + max_step * max(shape.attention_width, shape.mlp_width) * size
    head = stream + rows * shape.config.vocab_size * (size + SAMPLER_COPIES * 4)
    scored = min(max_step, scored_rows(shape.config.vocab_size))
    scores = stream + (rows + SCORING_COPIES * scored) * shape.config.vocab_size * 4
    partial = 0 if gpu_context is None else 2 * _partial_bytes(shape, rows, gpu_context)
    return max(layer, head, scores) + partial


def _partial_bytes(shape: ModelShape, max_rows: int, max_context: int) -> int:
    """Return the bytes of the partial results of one layer's split decodes."""
    if max_context <= SPLIT:
        return 0
    return max(
        partial_bytes(
            max_splits(max_rows, max_context, max_rows * max_context, layer.sliding_window, layer.num_kv_heads),
            shape.num_heads,
            layer.value_dim,
        )
        for layer in set(shape.kv_layers)
    )


def scored_rows(vocab_size: int) -> int:
    """Return how many rows of logits prompt logprobs use at a time: `SCORED_BYTES` worth, but at least one."""
    return max(1, SCORED_BYTES // (4 * vocab_size))


def without_windows(layers: Sequence[LayerKVSpec]) -> tuple[LayerKVSpec, ...]:
    """Return the same layers with full attention in place of sliding windows."""
    return tuple(replace(layer, sliding_window=None) for layer in layers)


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """The KV cache of one sequence on one device, in blocks of `spec`.

    Attributes:
        num_tokens: prompt and output tokens.
        blocks: blocks held while decoding; with sliding windows only the last ones, otherwise all.
        prefill_blocks: the most blocks held at once, in a step that computes as many of its tokens as a step may.
        needed_bytes: bytes of the keys and values that are still read.
    """

    spec: KVCacheSpec
    num_tokens: int
    blocks: int
    prefill_blocks: int
    needed_bytes: int

    @classmethod
    def of(cls, spec: KVCacheSpec, num_tokens: int, max_step: int, budget: KVBudget | None = None) -> SequenceCost:
        kept = budget.tokens if budget is not None and budget.evicts else num_tokens
        needed = sum(
            layer.token_bytes(format) * min(num_tokens, layer.sliding_window or kept)
            + layer.bounds_bytes(format) * spec.blocks_for_tokens(num_tokens)
            for layer, format in zip(spec.layers, spec.formats, strict=True)
        )
        if (copies := spec.int8_copies) is not None:
            kept = min(num_tokens, (copies.sink_blocks + copies.recent_blocks) * spec.block_size)
            needed += kept * sum(
                layer.token_bytes(KV_FORMATS["int8"])
                for layer, format in zip(spec.layers, spec.formats, strict=True)
                if needs_copies(format)
            )
        blocks = spec.peak_blocks(num_tokens, 1, budget)
        prefill_blocks = spec.peak_blocks(num_tokens, max_step, budget, num_tokens)  # all of them may be its prompt
        return cls(spec, num_tokens, blocks, prefill_blocks, needed)

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.spec.block_bytes

    @property
    def waste(self) -> float:
        """Share of the slots in the sequence's blocks that hold nothing it will read again, 0 to 1."""
        return 1.0 - self.needed_bytes / self.num_bytes

    def blocks_for(self, concurrency: int) -> int:
        """Return the blocks for `concurrency` such sequences at once, one of them in the middle of its prompt."""
        return concurrency * self.blocks + self.prefill_blocks - self.blocks

    def sequences_in(self, usable_blocks: int) -> int:
        """Return how many such sequences fit in `usable_blocks`."""
        return max(0, (usable_blocks - (self.prefill_blocks - self.blocks)) // self.blocks)
