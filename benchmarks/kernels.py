"""Speeds of the C++ kernels: matrix products and row-wise operations, beside torch's.

    python benchmarks/kernels.py [--threads N] [--only products] [--json]

For attention see `octavo bench attention`, for the machine's limits `octavo bench limits`.

Every figure is the median of repeated calls. GB/s counts each byte of weights or KV once; GFLOP/s counts a multiply-add
as two. Products go round more weights than the caches hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import gguf
import torch

from octavo import kernels
from octavo.bench.limits import DRAM_BYTES
from octavo.bench.timing import Call, interleaved, threads
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.storage.arena import KVArena

QUANTISED: tuple[kernels.WeightFormat, ...] = ("Q4_0", "Q4_1", "Q8_0")
# SmolLM2-135M's qkv, output, gate-up, down and logits, and one of a wider model's.
MODEL_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152), (4096, 4096))
ROWS = (1, 4, 8, 16, 64, 256, 2048)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    kernel: str
    microseconds: float
    gb_per_s: float | None = None
    gflop_per_s: float | None = None

    def __str__(self) -> str:
        rate = "" if self.gb_per_s is None else f"{self.gb_per_s:8.1f} GB/s"
        work = "" if self.gflop_per_s is None else f"{self.gflop_per_s:8.1f} GFLOP/s"
        return f"{self.kernel:<72}{self.microseconds:11.1f} us {rate:>13} {work:>16}"


def measure(name: str, calls: Sequence[Call], *, nbytes: int = 0, flops: int = 0) -> Figure:
    """Median time of one call, going round `calls` for about half a second."""
    median = interleaved({name: calls})[name].median
    return Figure(
        name, median * 1e6, nbytes / median / 1e9 if nbytes else None, flops / median / 1e9 if flops else None
    )


def products(inputs: int, outputs: int, rows: int) -> Iterator[Figure]:
    copies = max(1, DRAM_BYTES // (inputs * outputs * 2))
    plain = [torch.randn(outputs, inputs).bfloat16() for _ in range(copies)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain]
    x, out = torch.randn(rows, inputs).bfloat16(), torch.empty(rows, outputs).bfloat16()
    size, flops = inputs * outputs, 2 * inputs * outputs * rows
    shape = f"{rows} x {inputs} -> {outputs}"

    def onednn(weight: torch.Tensor) -> object:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    calls = [partial(torch.nn.functional.linear, x, weight) for weight in plain]
    yield measure(f"F.linear bf16 {shape}", calls, nbytes=2 * size, flops=flops)
    yield measure(f"oneDNN packed bf16 {shape}", [partial(onednn, w) for w in packed], nbytes=2 * size, flops=flops)
    ours = [kernels.PackedWeight.pack(weight) for weight in plain]
    calls = [partial(weight.linear, x, out=out) for weight in ours]
    yield measure(f"packed bf16 {shape}", calls, nbytes=2 * size, flops=flops)
    for name in QUANTISED:
        raw = torch.from_numpy(gguf.quantize(plain[0].float().numpy(), gguf.GGMLQuantizationType[name]))
        weights = [kernels.PackedWeight.pack_quantised(name, raw, inputs) for _ in range(copies * 2)]
        calls = [partial(weight.linear, x, out=out) for weight in weights]
        yield measure(f"{name} {shape}", calls, nbytes=weights[0].nbytes, flops=flops)


def rowwise(rows: int) -> Iterator[Figure]:
    x, residual = torch.randn(2, rows, 576).bfloat16()
    weight, out = torch.ones(576).bfloat16(), torch.empty_like(x)
    norm = partial(kernels.add_rms_norm, x, residual, weight, 1e-5, out)
    yield measure(f"add_rms_norm {rows} x 576", [norm], nbytes=4 * x.nbytes)
    gate_up, half = torch.randn(rows, 3072).bfloat16(), torch.empty(rows, 1536).bfloat16()
    yield measure(f"silu_mul {rows} x 3072", [partial(kernels.silu_mul, gate_up, half)], nbytes=gate_up.nbytes * 3 // 2)
    qkv = torch.randn(rows, 15 * 64).bfloat16()
    kv = KVArena(KVCacheSpec.build([LayerKVSpec(3, 64, 64)], 16, "bfloat16"), rows // 16 + 2).layers[0]
    cos, sin = torch.rand(2, 4096, 32)
    places = torch.arange(rows)
    write = partial(kernels.rope_write, qkv, kv.key, kv.value, cos, sin, places, places)
    yield measure(f"rope_write {rows} x 9/3 heads of 64", [write])
    logits = torch.randn(min(rows, 64), 49152)
    yield measure(f"torch.argmax {len(logits)} x 49152", [partial(logits.argmax, -1)], nbytes=logits.nbytes)
    yield measure(f"argmax {len(logits)} x 49152", [partial(kernels.argmax, logits)], nbytes=logits.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=kernels.num_threads())
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--only", choices=["products", "rowwise"])
    options = parser.parse_args()
    parts: dict[str, Iterator[Figure]] = {
        "products": (
            figure
            for rows, (inputs, outputs) in itertools.product(ROWS, MODEL_SHAPES)
            for figure in products(inputs, outputs, rows)
        ),
        "rowwise": (figure for rows in (1, 64, 2048) for figure in rowwise(rows)),
    }
    print(f"{kernels.isa()}, {options.threads} threads")
    figures = []
    with threads(options.threads):
        for name, part in parts.items():
            if options.only in (None, name):
                for figure in part:
                    figures.append(figure)
                    print(figure, flush=True)
    if options.json:
        report = {"isa": kernels.isa(), "threads": options.threads, "figures": [asdict(f) for f in figures]}
        print(json.dumps(report))


if __name__ == "__main__":
    main()
