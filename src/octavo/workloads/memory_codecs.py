"""Reports the comparison of codecs at one budget, as rows, cells of a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.workloads.memory_block_sizes import CacheBudget, Played
from octavo.workloads.plots import new_figure
from octavo.workloads.report import show

HEADING = (
    ("KV cache", "bytes a token", "sequences at once (max)"),
    ("× unquantised", "preemptions", "output tok/s", "× unquantised"),
)
"""The left columns, and the other columns."""


def row(budget: CacheBudget, usable_blocks: int, block_size: int, runs: Sequence[Played]) -> dict[str, Any]:
    """Return the row of a codec and a workload: medians of times over the runs, memory figures of the median run."""
    run = sorted(runs, key=lambda each: each.seconds)[len(runs) // 2]
    return {
        "kv_cache_dtype": budget.kv_dtype,
        "bytes_per_token": budget.spec(block_size).bytes_per_token,
        "usable_blocks": usable_blocks,
        "running_mean": round(run.usage.running_mean, 3),
        "running_max": run.usage.running_max,
        "seconds": round(statistics.median(each.seconds for each in runs), 4),
        "seconds_of_runs": [round(each.seconds, 4) for each in runs],
        "output_tok_s": round(statistics.median(each.output_tok_s for each in runs), 2),
        "steps": run.steps,
        "preemptions": run.preemptions,
        "recomputed_tokens": run.recomputed_tokens,
    }


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the ratios of their sequences and throughput to those of the first row."""
    first = rows[0]
    return [
        {
            **each,
            "running_ratio": round(each["running_mean"] / first["running_mean"], 3),
            "throughput_ratio": round(each["output_tok_s"] / first["output_tok_s"], 3),
        }
        for each in rows
    ]


def cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            *(each["kv_cache_dtype"], f"{each['bytes_per_token']:,}"),
            *(f"{each['running_mean']:.1f} ({each['running_max']})", f"{each['running_ratio']:.2f}"),
            *(f"{each['preemptions']:,}", show(each["output_tok_s"]), f"{each['throughput_ratio']:.2f}"),
        )
        for each in rows
    ]


def figure(result: Mapping[str, Any], bars: Callable[..., None]) -> Any:
    """Draw one row of plots per workload, each with `bars`: bytes per token, sequences at once, and throughput."""
    workloads = result["workloads"]
    drawn = new_figure(13, 0.9 + 3.3 * len(workloads))
    axes = drawn.subplots(len(workloads), 3, squeeze=False)
    for line, workload in zip(axes, workloads, strict=True):
        rows = workload["rows"]
        names = [each["kv_cache_dtype"] for each in rows]
        sizes = [each["bytes_per_token"] for each in rows]
        bars(line[0], names, sizes, [f"{size:,}" for size in sizes], f"{workload['name']}: bytes a token", "#0f766e")
        for axis, key, ratio, title in (
            (line[1], "running_mean", "running_ratio", "sequences at once (× unquantised)"),
            (line[2], "output_tok_s", "throughput_ratio", "output tokens per second (× unquantised)"),
        ):
            bars(axis, names, [r[key] for r in rows], [f"{r[ratio]:.2f}×" for r in rows], title, "#c2410c")
        for axis in line:
            axis.tick_params(labelsize=7, axis="x", rotation=30)
            axis.tick_params(labelsize=8, axis="y")
            axis.spines[["top", "right"]].set_visible(False)
    return drawn
