"""Estimate a machine's step times from the bandwidth and matrix rate on its data sheet.

    T = launches + max(weights / bandwidth, 2 · parameters · rows / rate)      products
      + bytes of keys and values / bandwidth                                  attention of streams
      + 4 · heads · head_dim · layers · Σ query · context / rate              attention of chunks
      + 2 · layers all-reduces, where several devices share the model
      + bytes of blocks swapped, stored or loaded / bandwidth to the host

Of a mixture of experts, the weights are those of the experts that at least one row is expected to use, and the
parameters those that one row uses. `StepTimes` takes all layers to attend to the
whole context; `WindowedLayers` is what sliding windows save.

The share of a data sheet's figure that kernels reach is an assumption (`BANDWIDTH_REACHED`, `RATE_REACHED`), so results
are labelled as estimates wherever they are shown. `octavo calibrate-speed` measures instead.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from octavo.kvcache.spec import KVCacheSpec
from octavo.option import nearest
from octavo.planner.calculator import weight_bytes
from octavo.planner.model_shape import ModelShape
from octavo.scheduler.step_time import StepLoad

BANDWIDTH_REACHED = 0.8
RATE_REACHED = 0.6


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times from fixed coefficients, all in seconds: estimated here, or fitted to recorded steps.

    Attributes:
        base: time of an empty step.
        products: (rows, seconds) points of the matrix products, by ascending rows; interpolated linearly, and
            extrapolated beyond the last.
        per_context_token: time to read one token's keys and values in all layers.
        per_chunk_work: time per unit of `StepLoad.chunk_work`.
        per_seq: time per sequence.
        per_moved_block: time per block copied or swapped.
        per_arrival: time that a step takes longer for each request that comes in meanwhile.
    """

    base: float
    products: tuple[tuple[float, float], ...]
    per_context_token: float = 0.0
    per_chunk_work: float = 0.0
    per_seq: float = 0.0
    per_moved_block: float = 0.0
    per_arrival: float = 0.0

    def predict(self, load: StepLoad, num_moved: int = 0, num_arrived: int = 0) -> float:
        """Return the time of a step with this load, in seconds.

        Args:
            num_moved: blocks copied, stored or loaded before it.
            num_arrived: requests that come in while it is computed.
        """
        return (
            self.base
            + self.product_seconds(load.rows)
            + self.per_context_token * load.context
            + self.per_chunk_work * load.chunk_work
            + self.per_seq * load.num_seqs
            + self.per_moved_block * num_moved
            + self.per_arrival * num_arrived
        )

    def product_seconds(self, rows: float) -> float:
        """Return the time of the matrix products of `rows` rows, without `base`."""
        points = self.products
        if len(points) < 2:
            return points[0][1] if points else 0.0
        above = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
        (low, at_low), (high, at_high) = points[above - 1], points[above]
        return max(0.0, at_low + (at_high - at_low) * (rows - low) / (high - low))

    def slowed(self, factor: float) -> StepTimes:
        """Return the times of steps that each take `factor` times as long."""
        scaled = {entry.name: factor * getattr(self, entry.name) for entry in fields(self) if entry.name != "products"}
        return StepTimes(**scaled, products=tuple((rows, factor * seconds) for rows, seconds in self.products))

    def with_kv_bytes(self, ratio: float) -> StepTimes:
        """Return the times for keys and values that take `ratio` times the bytes."""
        return replace(
            self,
            per_context_token=self.per_context_token * ratio,
            per_moved_block=self.per_moved_block * ratio,
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """One device, by its data sheet.

    Attributes:
        gb_s: memory bandwidth, 1e9 bytes per second.
        tflop_s: dense bf16 matrix products with fp32 accumulation, 1e12 operations per second, without sparsity.
        memory: bytes.
        launch_us: host work and kernel launches per layer and step, in microseconds; assumed to be 5 with CUDA graphs.
        link_gb_s: bandwidth to the other devices of a group, one direction, 1e9 bytes per second.
        host_gb_s: bandwidth to the host's memory, one direction, 1e9 bytes per second: that of PCI Express; 0 if the
            device's memory is the host's.
        source: where the figures come from.
    """

    name: str
    gb_s: float
    tflop_s: float
    memory: int
    source: str
    launch_us: float = 5.0
    link_gb_s: float = 0.0
    host_gb_s: float = 0.0
    on_cpu: bool = False


# bandwidth, GB/s | rate, Tflop/s | memory, GB | source, and for GPUs: | link, GB/s | host, GB/s
_GPUS: tuple[tuple[str, float, float, int, str, float, float], ...] = (
    ("a100-40gb", 1555, 312, 40, "A100 Tensor Core GPU data sheet (2021), SXM4 40GB, PCIe Gen4 x16", 300, 32),
    ("a100-80gb", 2039, 312, 80, "A100 Tensor Core GPU data sheet (2021), SXM4 80GB, PCIe Gen4 x16", 300, 32),
    ("h100", 3350, 989, 80, "H100 Tensor Core GPU data sheet (2023), SXM5, PCIe Gen5 x16", 450, 64),
    ("h200", 4800, 989, 141, "H200 Tensor Core GPU data sheet (2023), SXM, PCIe Gen5 x16", 450, 64),
    ("l4", 300, 121, 24, "L4 Tensor Core GPU data sheet (2023), PCIe Gen4 x16; half of the rate with sparsity", 0, 32),
)
# The rate is cores × bf16 operations a cycle × clock, the bandwidth that of the channels of DDR5.
_CPUS: tuple[tuple[str, float, float, int, str], ...] = (
    ("xeon-8480+", 307.2, 114.7, 512, "Intel ARK, Xeon Platinum 8480+: 8 × DDR5-4800; 56 × 1024 (AMX) × 2.0 GHz"),
    ("epyc-9654", 460.8, 14.7, 768, "AMD, EPYC 9654: 12 × DDR5-4800; 96 × 64 × 2.4 GHz"),
    ("graviton4", 537.6, 17.2, 768, "AWS, Graviton4: 12 × DDR5-5600; 96 Neoverse V2 cores × 64 (bfdot) × 2.8 GHz"),
    ("desktop-ddr5", 89.6, 2.05, 64, "2 × DDR5-5600; 8 Zen 4 cores × 64 × an assumed 4 GHz"),
)
_GB = 10**9

MACHINES: Mapping[str, Machine] = {
    name: Machine(name, gb_s, tflop_s, memory * _GB, f"NVIDIA {source}", link_gb_s=link, host_gb_s=host)
    for name, gb_s, tflop_s, memory, source, link, host in _GPUS
} | {
    name: Machine(name, gb_s, tflop_s, memory * _GB, source, launch_us=20.0, on_cpu=True)
    for name, gb_s, tflop_s, memory, source in _CPUS
}


def find_machine(name: str) -> Machine:
    """Return the machine called `name`.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if (machine := MACHINES.get(name.lower())) is None:
        raise ConfigError(f"no machine is called {name!r}{nearest(name.lower(), MACHINES)}")
    return machine


def roofline(
    shape: ModelShape, spec: KVCacheSpec, machine: Machine, weights: int | None = None, num_devices: int = 1
) -> StepTimes:
    """Estimate the step times of `num_devices` together; `shape` and `spec` describe one device's part of the model.

    Args:
        weights: bytes of one device's weights; None: as in bfloat16.

    Raises:
        ConfigError: several devices whose link is not known.
    """
    if weights is None:
        weights = weight_bytes(shape, "bfloat16", tied_head_copied=False)
    byte_s = 1 / (machine.gb_s * 1e9 * BANDWIDTH_REACHED)
    flop_s = 1 / (machine.tflop_s * 1e12 * RATE_REACHED)
    base, per_row_beyond = shape.config.num_layers * machine.launch_us * 1e-6, 0.0
    if num_devices > 1:
        if not machine.link_gb_s:
            raise ConfigError(f"the bandwidth between several {machine.name} is not known: use one device")
        # A ring sends 2 (n - 1) / n of the bytes; each of its steps waits some microseconds.
        base += 2 * shape.config.num_layers * 10e-6
        sent = 2 * (num_devices - 1) / num_devices * shape.config.hidden_size * 2
        per_row_beyond = 2 * shape.config.num_layers * sent / (machine.link_gb_s * 1e9)
    # On a GPU, blocks go to the host and back; on a CPU they are read here and written there. A GPU's own copies are
    # faster, but a step's load does not distinguish them.
    host_s = 1 / (machine.host_gb_s * 1e9 * BANDWIDTH_REACHED) if machine.host_gb_s else 2 * byte_s
    attended = sum(2 * shape.num_heads * (layer.key_dim + layer.value_dim) for layer in spec.layers)
    return StepTimes(
        base=base,
        products=_products(shape, weights * byte_s, flop_s, per_row_beyond),
        per_context_token=spec.bytes_per_token * byte_s,
        per_chunk_work=attended * flop_s,
        # Sampling reads the logits a few times in fp32.
        per_seq=5 * 4 * shape.config.vocab_size * byte_s,
        per_moved_block=spec.block_bytes * host_s,
    )


def _products(
    shape: ModelShape, weights: float, flop_s: float, per_row_beyond: float
) -> tuple[tuple[float, float], ...]:
    """Return the seconds of a step's matrix products, by rows, from the seconds that reading all weights takes."""
    per_row = 2 * shape.active_parameters * flop_s
    hidden_rows = weights / per_row
    rows, experts = [0.0, hidden_rows, 2 * hidden_rows], shape.experts
    if experts is None:
        return tuple((count, max(weights, count * per_row) + count * per_row_beyond) for count in rows)
    # With few rows only some of the experts are read, with some dozens of rows nearly all.
    routed = weights * experts.parameters / shape.parameters.total
    powers = itertools.takewhile(lambda power: power < hidden_rows, (2.0**exponent for exponent in itertools.count()))
    return tuple(
        (count, max(weights - routed * experts.share_unused(count), count * per_row) + count * per_row_beyond)
        for count in sorted({*rows, *powers})
    )


def without_overlap(shape: ModelShape, spec: KVCacheSpec, dtype: str, gb_s: float, gflop_s: float) -> StepTimes:
    """Estimate step times as the sum of all terms; hardware overlaps some, so this is up to twice too slow.

    The terms are reading all weights, two operations per parameter that a token uses, and reading each byte of context
    once. The arithmetic of attention is left out. Moving a block costs as much as reading its bytes.

    Raises:
        ConfigError: a speed is not positive.
    """
    if not gb_s > 0 or not gflop_s > 0:
        raise ConfigError(f"speeds must be above 0, got {gb_s:g} GB/s and {gflop_s:g} GFLOP/s")
    byte_s = 1 / gb_s / 1e9
    return StepTimes(
        base=weight_bytes(shape, dtype, tied_head_copied=False) * byte_s,
        products=((0.0, 0.0), (1.0, 2 * shape.active_parameters / gflop_s / 1e9)),
        per_context_token=spec.bytes_per_token * byte_s,
        per_moved_block=spec.block_bytes * byte_s,
    )


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers with windows of one size, which do not attend to tokens before the window.

                     window
                ┌──────────────┐
        tokens  0 1 2 3 4 5 6 7 8
                └ saved ┘       └ query

    Attributes:
        size: tokens that a query attends to, itself included.
        per_context_token: seconds to read one token's keys and values in these layers.
        per_chunk_work: seconds per pair of a query of a chunk and a token, in these layers.
        decodes_only: whether prompts attend to all tokens.
    """

    size: int
    per_context_token: float
    per_chunk_work: float
    decodes_only: bool = False

    def saved(self, starts: Sequence[int], lengths: Sequence[int]) -> float:
        """Return how many seconds shorter a step is; `starts` and `lengths` are those of its plan."""
        size, tokens, work = self.size, 0, 0.0
        for start, length in zip(starts, lengths, strict=True):
            if self.decodes_only and length > 1:
                continue
            # The first query reaches back furthest, to `start + 1 - size`.
            if start >= size:
                tokens += start + 1 - size
                work += (length - 1) * (start + 0.5 * length - size)
            elif length > 1 and (beyond := start + length - size) > 0:
                work += 0.5 * beyond * (beyond - 1)
        return self.per_context_token * tokens + self.per_chunk_work * work


def windows_of(times: StepTimes, spec: KVCacheSpec, max_model_len: int) -> tuple[WindowedLayers, ...]:
    """Return the layers with windows that contexts of up to `max_model_len` tokens exceed; `times` know no windows."""
    sizes = {layer.sliding_window for layer in spec.layers if layer.sliding_window is not None}
    return tuple(
        _windowed(times, spec, size, [layer.sliding_window == size for layer in spec.layers])
        for size in sorted(sizes)
        if size < max_model_len
    )


def read_under(budget: KVBudget, times: StepTimes, spec: KVCacheSpec) -> WindowedLayers:
    """Return the layers that read no more than a budget; `times` know no budget."""
    if budget.slides:
        return _windowed(times, spec, budget.tokens, [layer.sliding_window is None for layer in spec.layers])
    few = [layer.sliding_window is None if budget.evicts else layer.bounded for layer in spec.layers]
    return replace(_windowed(times, spec, budget.tokens, few), decodes_only=True)


def _windowed(times: StepTimes, spec: KVCacheSpec, size: int, chosen: Sequence[bool]) -> WindowedLayers:
    """Return the chosen layers, whose share of a step's attention is that of their keys and values."""
    layers = [(layer, format) for layer, format, own in zip(spec.layers, spec.formats, chosen, strict=True) if own]
    bytes_share = sum(layer.token_bytes(format) for layer, format in layers) / spec.bytes_per_token
    attended = sum(layer.key_dim + layer.value_dim for layer in spec.layers)
    work_share = sum(layer.key_dim + layer.value_dim for layer, _ in layers) / attended
    return WindowedLayers(size, times.per_context_token * bytes_share, times.per_chunk_work * work_share)
