"""The comparisons of `octavo bench memory`, apart from its options so that `--help` imports little."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS
from octavo.planner.roofline import without_overlap
from octavo.planner.sources import find_shape
from octavo.workloads import memory_report, report, traces, workload
from octavo.workloads.memory_block_sizes import (
    CONTIGUOUS,
    BenchEngine,
    BlockSize,
    CacheBudget,
    Played,
    play,
    real_engine,
    simulated_engine,
)
from octavo.workloads.memory_options import MemoryOptions
from octavo.workloads.plots import require_plot
from octavo.workloads.workload import BenchRequest

_SIMULATED_SIZES: Sequence[BlockSize] = (1, 2, 4, 8, 16, 32, 64, 128, 256, CONTIGUOUS)
_PAGED = EngineConfig().block_size


@dataclass(frozen=True, slots=True)
class _Work:
    """A workload, truncated to the model's limit; `scale` is the factor on a trace's lengths."""

    name: str
    requests: list[BenchRequest]
    clipped: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class _Bench:
    """One comparison: the budget, and a factory of engines by block size."""

    budget: CacheBudget
    options: dict[str, Any]
    speeds: tuple[float, float] | None  # GB/s and GFLOP/s of a simulated device

    def engine(self, block_size: BlockSize) -> AbstractContextManager[BenchEngine]:
        if self.speeds is None:
            return real_engine(self.budget, block_size, self.options)
        config = EngineConfig.from_options(self.options)
        return nullcontext(simulated_engine(self.budget, block_size, config, *self.speeds))

    def with_codec(self, name: str) -> _Bench:
        """Return the same comparison with another codec of the KV cache."""
        sizing = self.budget.sizing
        coded = replace(sizing, config=sizing.config.replace(kv_cache_dtype=name))
        options = {**self.options, "kv_cache_dtype": name}
        return replace(self, budget=replace(self.budget, sizing=coded), options=options)

    def play(self, block_size: BlockSize, work: _Work) -> Played:
        with self.engine(block_size) as engine:
            return play(engine, work.requests, self.budget)


def run(asked: MemoryOptions, options: dict[str, Any], as_json: bool) -> int:
    for name, instead in (("block_size", "--block-sizes"), ("num_blocks", "--kv-cache-memory")):
        if name in options:
            raise ConfigError(f"{name} is what this benchmark compares: use {instead}")
    codecs = _codecs(asked, options)
    if asked.output:
        require_plot(memory_report.with_suffix(Path(asked.output), ".png"))
    config = EngineConfig.from_options(options)
    shape = find_shape(config.model)
    budget = CacheBudget.build(shape, config, asked.contiguous_seqs)
    speeds = (asked.gb_s, asked.gflop_s) if asked.simulate else None
    cost = None if speeds is None else _step_cost(budget, speeds)
    # No prefix caching, because nothing of one block size may help the next.
    bench = _Bench(budget, {"enable_prefix_caching": False, **options}, speeds)
    sizes = asked.block_sizes or (_SIMULATED_SIZES if asked.simulate else (16, CONTIGUOUS))
    candidates = [(bench.with_codec(name), _PAGED) for name in codecs] or [(bench, size) for size in sizes]
    baseline = 0 if codecs else sizes.index(CONTIGUOUS) if CONTIGUOUS in sizes else None
    works = list(_works(asked, budget, shape.config.vocab_size))

    from octavo import __version__

    result: dict[str, Any] = {
        "bench": "memory",
        "version": __version__,
        "mode": "simulate" if asked.simulate else "real",
        "model": shape.name,
        "options": bench.options,
        "kv_dtype": budget.sizing.kv_dtype,
        "kv_bytes": budget.num_bytes,
        "max_model_len": budget.max_model_len,
        "contiguous_seqs": budget.contiguous_seqs,
        "step_cost": cost,
        "axis": "codec" if codecs else "block size",
        "workloads": [_compare(candidates, baseline, work, asked.runs) for work in works],
        "machine": report.machine(),
    }
    line = report.as_json_line(result)
    if asked.output:
        memory_report.write(result, line, Path(asked.output))
    print(line if as_json else memory_report.markdown(result))
    return 0


def _step_cost(budget: CacheBudget, speeds: tuple[float, float]) -> dict[str, float]:
    """Return the costs of a simulated step for the report: seconds per step, per new token and per byte of context."""
    sizing = budget.sized(_PAGED)
    times = without_overlap(sizing.shape, sizing.spec, sizing.dtype, *speeds)
    return {"step_s": times.base, "token_s": times.product_seconds(1), "context_byte_s": 1 / speeds[0] / 1e9}


def _compare(
    candidates: Sequence[tuple[_Bench, BlockSize]], baseline: int | None, work: _Work, runs: int
) -> dict[str, Any]:
    """Play a workload with each cache, in turn; `baseline` is the place of the one that ratios refer to."""
    played: list[list[Played]] = [[] for _ in candidates]
    for _ in range(runs):
        for (bench, size), times in zip(candidates, played, strict=True):
            times.append(bench.play(size, work))
            name = f"{bench.budget.sizing.kv_dtype} in blocks of {size}"
            print(f"{work.name}, {name}: {times[-1].seconds:.1f} s", file=sys.stderr)
    rows = [
        memory_report.row(bench.budget, size, bench.budget.pool(size).usable_blocks, times)
        for (bench, size), times in zip(candidates, played, strict=True)
    ]
    return {
        "name": work.name,
        "requests": len(work.requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in work.requests),
        "output_tokens": sum(request.max_tokens for request in work.requests),
        "scale": work.scale,
        "clipped": work.clipped,
        "rows": memory_report.with_ratios(rows, None if baseline is None else rows[baseline]),
    }


def _codecs(asked: MemoryOptions, options: dict[str, Any]) -> list[str]:
    """Return the codecs to compare, the model's own dtype first; empty if block sizes are compared."""
    if asked.codecs is None:
        return []
    for name, given in (
        ("--block-sizes", asked.block_sizes),
        ("--kv-cache-dtype", options.get("kv_cache_dtype")),
    ):
        if given:
            raise ConfigError(f"--codecs compares codecs at blocks of {_PAGED} tokens: leave out {name}")
    coded = [name for name, format in KV_FORMATS.items() if not format.plain]
    return ["auto", *(coded if asked.codecs == "all" else asked.codecs.split(","))]


def _works(asked: MemoryOptions, budget: CacheBudget, vocab_size: int) -> Iterator[_Work]:
    count = asked.num_prompts or (512 if asked.simulate else 64)
    default = "" if asked.trace else f"mixed{count},sharegpt{count}"
    names = default if asked.workload is None else asked.workload
    for name in filter(None, names.split(",")):
        yield _named(name, asked.workload_seed, budget, vocab_size)
    for path in asked.trace:
        trace = traces.read_trace(path)[:count]
        totals = [request.prompt_tokens + request.output_tokens for request in trace]
        scale = min(1.0, budget.max_model_len / report.percentile(totals, 99))
        end = min(workload.END_TOKEN_ID, vocab_size)
        requests = traces.as_requests(trace, scale_lengths=scale, seed=asked.workload_seed, end=end)
        yield _clipped(Path(path).stem, requests, budget, scale)


def _named(name: str, seed: int, budget: CacheBudget, vocab_size: int) -> _Work:
    end = min(workload.END_TOKEN_ID, vocab_size)
    return _clipped(name, workload.named_workload(name, seed, end), budget)


def _clipped(name: str, requests: list[BenchRequest], budget: CacheBudget, scale: float = 1.0) -> _Work:
    requests, num_clipped = workload.clip(requests, max_model_len=budget.max_model_len)
    return _Work(name, requests, num_clipped, scale)
