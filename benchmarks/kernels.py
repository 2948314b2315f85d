"""Speeds of the C++ kernels against oneDNN's and the machine's limits: matrix products, with weights from cache and
from memory, and row-wise operations.

    python -m benchmarks.kernels [--num-threads N] [--only products] [--seconds X] [--json]

For attention see `octavo bench attention`, for the limits alone `octavo bench cpu`.

Figures are medians of alternating calls. GB/s counts each byte of weights or activations once; GFLOP/s counts a
multiply-add as two. Products cycle through more weights than second-level caches hold. `limit` is how close a row comes
to the machine's limit: the least time that torch takes to read as many bytes, or to multiply as much in a matrix of
2048 x 2048, whichever is longer; limits are the best of calls made just before each shape. Quantised weights are
compared with int8 products, the machine's fastest, although AMX tiles multiply them as bf16. The limit of `from_memory`
is torch's sum of the same weights, in turn with the products.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import gguf
import torch

from octavo import kernels
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import KVArena
from octavo.workloads.machine_limits import CACHE_BYTES, read_bandwidth
from octavo.workloads.timing import Call, interleaved, paired_ratio, threads

QUANTISED: tuple[kernels.WeightFormat, ...] = ("Q4_0", "Q4_1", "Q8_0")
# The qkv, output, gate-up, down and logits products of SmolLM2-135M, and one of a wider model.
MODEL_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152), (4096, 4096))
ROWS = (1, 4, 8, 16, 64, 256, 2048)
MOST_LOGITS = 64  # rows that become logits in one step
WEIGHT_BYTES = 128 << 20
MEMORY_SHAPE, MEMORY_BYTES = (4096, 14336), 384 << 20  # far more than third-level caches hold
PRODUCT_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Work:
    """The least that one call of a kernel has to do."""

    nbytes: int
    flops: int = 0
    kind: str = "bfloat16"  # of the multiplications


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that this machine can do, per second."""

    read: float  # bytes of `WEIGHT_BYTES`
    read_cache: float  # bytes of `CACHE_BYTES`
    products: Mapping[str, float]  # operations, by kind

    @classmethod
    def measure(cls, count: int, seconds: float) -> Limits:
        read, cached = (
            read_bandwidth("read", nbytes, count, seconds=seconds).best * 1e9 for nbytes in (WEIGHT_BYTES, CACHE_BYTES)
        )
        floats = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE)
        halves, bytes_ = floats.bfloat16(), floats.mul(30).to(torch.int8)
        calls = {
            "bfloat16": [partial(torch.matmul, *halves)],
            "float32": [partial(torch.matmul, *floats)],
            "int8": [partial(torch._int_mm, *bytes_)],
        }
        timings = interleaved(calls, seconds=seconds)
        return cls(read, cached, {kind: 2 * PRODUCT_SIZE**3 / timings[kind].best for kind in calls})

    def seconds(self, work: Work) -> float:
        if not work.flops:
            return work.nbytes / self.read_cache
        return max(work.nbytes / self.read, work.flops / self.products[work.kind])

    def __str__(self) -> str:
        products = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in self.products.items())
        return (
            f"limits: read {self.read / 1e9:.1f} GB/s, from cache {self.read_cache / 1e9:.1f} GB/s; "
            f"products in G(FL)OP/s: {products}"
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    kernel: str
    microseconds: float
    gb_per_s: float
    gflop_per_s: float
    of_limit: float

    def __str__(self) -> str:
        work = f"{self.gflop_per_s:8.1f} GFLOP/s" if self.gflop_per_s else ""
        return (
            f"{self.kernel:<44}{self.microseconds:11.1f} us {self.gb_per_s:8.1f} GB/s {work:>16} "
            f"{self.of_limit:6.0%} of limit"
        )


def measure(calls: Mapping[str, tuple[Sequence[Call], Work]], limits: Limits, seconds: float) -> Iterator[Figure]:
    timings = interleaved({name: each for name, (each, _) in calls.items()}, seconds=seconds, min_rounds=3)
    for name, (_, work) in calls.items():
        median = timings[name].median
        yield Figure(
            name,
            median * 1e6,
            work.nbytes / median / 1e9,
            work.flops / median / 1e9,
            limits.seconds(work) / median,
        )


def copies(weight: kernels.PackedWeight, nbytes: int = WEIGHT_BYTES) -> list[kernels.PackedWeight]:
    """As many copies of the weight as products cycle through."""
    all_of_them = [weight]
    for _ in range(nbytes // weight.nbytes):
        another = kernels.PackedWeight.empty(weight.format, weight.outputs, weight.inputs)
        another.packed.copy_(weight.packed)
        all_of_them.append(another)
    return all_of_them


def measure_limits(count: int, seconds: float) -> Limits:
    limits = Limits.measure(count, max(0.2, seconds))
    print(limits)
    return limits


def products(count: int, seconds: float) -> Iterator[Figure]:
    for inputs, outputs in MODEL_SHAPES:
        limits = measure_limits(count, seconds)
        plain = torch.randn(outputs, inputs).bfloat16()
        reordered = torch.ops.mkldnn._reorder_linear_weight
        theirs = [reordered(plain) for _ in range(1 + WEIGHT_BYTES // (2 * plain.numel()))]
        ours: dict[str, list[kernels.PackedWeight]] = {"bf16": copies(kernels.PackedWeight.pack(plain))}
        for name in QUANTISED:
            raw = torch.from_numpy(gguf.quantize(plain.float().numpy(), gguf.GGMLQuantizationType[name]))
            ours[name] = copies(kernels.PackedWeight.pack_quantised(name, raw, inputs))
        for rows in ROWS:
            if outputs > 10 * inputs and rows > MOST_LOGITS:
                continue
            x, out = torch.randn(rows, inputs).bfloat16(), torch.empty(rows, outputs).bfloat16()
            flops, shape = 2 * inputs * outputs * rows, f"{rows} x {inputs} -> {outputs}"
            onednn = torch.ops.mkldnn._linear_pointwise
            calls: dict[str, tuple[Sequence[Call], Work]] = {
                f"oneDNN bf16 {shape}": (
                    [partial(onednn, x, weight, None, "none", [], "") for weight in theirs],
                    Work(2 * plain.numel(), flops),
                )
            }
            for label, weights in ours.items():
                calls[f"{label} {shape}"] = (
                    [partial(weight.linear, x, out=out, exact=False) for weight in weights],
                    Work(weights[0].nbytes, flops, "bfloat16" if label == "bf16" else "int8"),
                )
            yield from measure(calls, limits, seconds)


def call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def from_memory(count: int, seconds: float) -> Iterator[Figure]:
    inputs, outputs = MEMORY_SHAPE
    plain = torch.randn(outputs // 64, inputs)
    packed = {"bf16": kernels.PackedWeight.pack(plain.bfloat16().repeat(64, 1))}
    for quantised in QUANTISED:
        raw = torch.from_numpy(gguf.quantize(plain.numpy(), gguf.GGMLQuantizationType[quantised]))
        packed[quantised] = kernels.PackedWeight.pack_quantised(quantised, raw.repeat(64, 1), inputs)
    for name, weight in packed.items():
        weights = copies(weight, MEMORY_BYTES)
        reads = [each.packed.view(torch.float32).sum for each in weights]
        for rows in (1, 2, 4):
            x, out = torch.randn(rows, inputs).bfloat16(), torch.empty(rows, outputs).bfloat16()
            products = [partial(each.linear, x, out=out, exact=False) for each in weights]
            # All weights in one call: torch's threads go on spinning for a while after theirs.
            calls = {"read": [partial(call_all, reads)], "product": [partial(call_all, products)]}
            timings = interleaved(calls, seconds=seconds)
            median = timings["product"].median / len(weights)
            yield Figure(
                f"{name} {rows} x {inputs} -> {outputs} from memory",
                median * 1e6,
                weight.nbytes / median / 1e9,
                2 * inputs * outputs * rows / median / 1e9,
                paired_ratio(timings["read"], timings["product"]),
            )


def rowwise(count: int, seconds: float) -> Iterator[Figure]:
    limits = measure_limits(count, seconds)
    for rows in (1, 64, 2048):
        x, residual = torch.randn(2, rows, 576).bfloat16()
        weight, out = torch.ones(576).bfloat16(), torch.empty_like(x)
        gate_up, half = torch.randn(rows, 3072).bfloat16(), torch.empty(rows, 1536).bfloat16()
        qkv = torch.randn(rows, 15 * 64).bfloat16()
        kv = KVArena(KVCacheSpec.build([LayerKVSpec(3, 64, 64)], 16, "bfloat16"), rows // 16 + 2).float_layers[0]
        cos, sin = torch.rand(2, 4096, 32)
        places = torch.arange(rows)
        logits = torch.randn(min(rows, MOST_LOGITS), 49152)
        calls: dict[str, tuple[Sequence[Call], Work]] = {
            f"add_rms_norm {rows} x 576": (
                [partial(kernels.add_rms_norm, x, residual, weight, 1e-5, out)],
                Work(4 * x.nbytes),
            ),
            f"silu_mul {rows} x 3072": ([partial(kernels.gate, gate_up, "silu", half)], Work(gate_up.nbytes * 3 // 2)),
            f"rope_write {rows} x 9/3 heads of 64": (
                [partial(kernels.rope_write, qkv, *kv.for_kernels, cos, sin, places, places)],
                Work(2 * qkv.nbytes),
            ),
            f"torch.argmax {len(logits)} x 49152": ([partial(logits.argmax, -1)], Work(logits.nbytes)),
            f"argmax {len(logits)} x 49152": ([partial(kernels.argmax, logits)], Work(logits.nbytes)),
        }
        yield from measure(calls, limits, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=kernels.num_threads())
    parser.add_argument("--seconds", type=float, default=0.1, help="per row of the report (0.1), or three calls")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--only", choices=["products", "from_memory", "rowwise"])
    options = parser.parse_args()
    begin = time.perf_counter()
    figures = []
    with threads(options.num_threads):
        print(f"{kernels.isa()}, {options.num_threads} threads")
        for part in (products, from_memory, rowwise):
            if options.only in (None, part.__name__):
                for figure in part(options.num_threads, options.seconds):
                    figures.append(figure)
                    print(figure, flush=True)
    print(f"{time.perf_counter() - begin:.0f} s")
    if options.json:
        report = {
            "isa": kernels.isa(),
            "threads": options.num_threads,
            "figures": [asdict(figure) for figure in figures],
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()
