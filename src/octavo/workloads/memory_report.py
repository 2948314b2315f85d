"""Reports the comparison of block sizes or codecs, as rows, Markdown tables and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.text_file import write_text
from octavo.units import format_bytes
from octavo.workloads.memory_block_sizes import CONTIGUOUS, BlockSize, CacheBudget, Played
from octavo.workloads.plots import new_figure, save
from octavo.workloads.report import show

_Cell = Callable[[Mapping[str, Any]], object]

_COLOURS = {
    "tokens": "#0f766e",
    "reserved": "#fbbf24",
    "internal": "#c2410c",
    "cached": "#7dd3fc",
    "external": "#7f1d1d",
    "idle": "#e2e8f0",
}


def row(budget: CacheBudget, block_size: BlockSize, usable_blocks: int, runs: Sequence[Played]) -> dict[str, Any]:
    """Return the row of a cache and a workload: medians of times over the runs, memory of the median run."""
    run, spec = sorted(runs, key=lambda each: each.seconds)[len(runs) // 2], budget.sized(block_size).spec
    usage = {
        key: {state: round(share, 5) for state, share in value.items()} if key == "shares" else round(value, 5)
        for key, value in run.usage.items()
    }
    return {
        "kv_cache_dtype": budget.sizing.kv_dtype,
        "bytes_per_token": spec.bytes_per_token,
        "block_size": block_size,
        "block_tokens": spec.block_size,
        "usable_blocks": usable_blocks,
        **usage,
        "seconds": round(statistics.median(each.seconds for each in runs), 4),
        "seconds_of_runs": [round(each.seconds, 4) for each in runs],
        "output_tok_s": round(statistics.median(each.output_tok_s for each in runs), 2),
        "steps": run.steps,
        "cached_tokens": run.cached_tokens,
        "preemptions": run.preemptions,
        "recomputed_tokens": run.recomputed_tokens,
    }


def with_ratios(rows: Sequence[dict[str, Any]], baseline: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows with their ratios to the baseline's sequences and throughput; None if that was not measured."""

    def ratio(row: Mapping[str, Any], name: str) -> float | None:
        return round(row[name] / baseline[name], 3) if baseline else None

    return [
        {**each, "running_ratio": ratio(each, "running_mean"), "throughput_ratio": ratio(each, "output_tok_s")}
        for each in rows
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """Return all tables, below a line that says what was measured."""
    return "\n".join(_lines(result))


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{result['model']}, {format_bytes(result['kv_bytes'])} for keys and values: {result['contiguous_seqs']} "
        f"contiguous sequences of {result['max_model_len']:,} tokens. {_how(result)}"
    )
    for workload in result["workloads"]:
        yield ""
        yield (
            f"**{workload['name']}**: {workload['requests']} requests, {workload['prompt_tokens']:,} tokens in, "
            f"{workload['output_tokens']:,} out{_scaled(workload)}"
        )
        yield ""
        yield from _table(_COLUMNS[result["axis"]], workload["rows"])


def _how(result: Mapping[str, Any]) -> str:
    if result["mode"] == "real":
        return "Measured on the engine."
    cost = result["step_cost"]
    return (
        f"Simulated: a step takes {1e3 * cost['step_s']:.3g} ms, {1e6 * cost['token_s']:.3g} µs a new token and "
        f"{1e12 * cost['context_byte_s']:.3g} ps a byte of context."
    )


def _scaled(workload: Mapping[str, Any]) -> str:
    parts = [f", lengths × {workload['scale']:.3g}"] if workload["scale"] != 1 else []
    return "".join([*parts, f", {workload['clipped']} cut" if workload["clipped"] else ""])


def _table(columns: Mapping[str, _Cell], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|---" + "|---:" * (len(columns) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(str(cell(row)) for cell in columns.values()) + " |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(state: str) -> _Cell:
    return lambda r: _percent(r["shares"][state])


def _ratio(name: str) -> _Cell:
    return lambda r: "–" if r[name] is None else f"{r[name]:.2f}"


def _sequences(r: Mapping[str, Any]) -> str:
    return f"{r['running_mean']:.1f} ({r['running_max']})"


_LAST: dict[str, _Cell] = {
    "preemptions": lambda r: f"{r['preemptions']:,}",
    "output tok/s": lambda r: show(r["output_tok_s"]),
}
_COLUMNS: dict[str, dict[str, _Cell]] = {
    "block size": {
        "block size": lambda r: f"max ({r['block_tokens']:,})" if r["block_size"] == CONTIGUOUS else r["block_size"],
        "waste": lambda r: _percent(r["waste"]),
        "sequences at once (max)": _sequences,
        "of the budget: tokens": _share("tokens"),
        **{state: _share(state) for state in ("reserved", "internal", "external")},
        **_LAST,
        "× contiguous": _ratio("throughput_ratio"),
    },
    "codec": {
        "KV cache": lambda r: r["kv_cache_dtype"],
        "bytes a token": lambda r: f"{r['bytes_per_token']:,}",
        "sequences at once (max)": _sequences,
        "× unquantised sequences": _ratio("running_ratio"),
        **_LAST,
        "× unquantised tok/s": _ratio("throughput_ratio"),
    },
}


def write(result: Mapping[str, Any], json_line: str, output: Path) -> None:
    """Write OUTPUT.json, OUTPUT.md and OUTPUT.png."""
    write_text(with_suffix(output, ".json"), json_line + "\n")
    write_text(with_suffix(output, ".md"), markdown(result) + "\n")
    plot(result, with_suffix(output, ".png"))


def with_suffix(output: Path, suffix: str) -> Path:
    """Replace or add a suffix; only one of the three suffixes is replaced, so that `memory-1.5` keeps its name."""
    stem = output.with_suffix("") if output.suffix in (".json", ".md", ".png") else output
    return stem.with_name(stem.name + suffix)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot one row of three plots per workload: memory by state, waste or sequences at once, and throughput."""
    workloads, of_codecs = result["workloads"], result["axis"] == "codec"
    figure = new_figure(13, 0.9 + 3.3 * len(workloads))
    axes = figure.subplots(len(workloads), 3, squeeze=False, width_ratios=(1.5, 1, 1))
    for line, workload in zip(axes, workloads, strict=True):
        rows = workload["rows"]
        names = [str(r["kv_cache_dtype" if of_codecs else "block_size"]) for r in rows]
        _plot_shares(line[0], names, rows, workload["name"])
        if of_codecs:
            title = "sequences at once (× unquantised)"
            _plot_bars(line[1], rows, names, "running_mean", "running_ratio", title, _COLOURS["internal"])
        else:
            bars = line[1].bar(names, [100 * r["waste"] for r in rows], color=_COLOURS["internal"], width=0.75)
            line[1].bar_label(bars, fmt="{:.1f}", padding=2, fontsize=7)
            line[1].set_title("waste, % of the slots held (dashed: 4 %)", fontsize=9)
            line[1].margins(y=0.12)
            line[1].axhline(4, color="#475569", linewidth=0.8, linestyle="--", zorder=0)
        title = f"output tokens per second (× {'unquantised' if of_codecs else 'contiguous'})"
        _plot_bars(line[2], rows, names, "output_tok_s", "throughput_ratio", title, _COLOURS["tokens"])
        for axis in line:
            axis.set_xlabel("" if of_codecs else "tokens per block", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.tick_params(axis="x", rotation=30 if of_codecs else 0)
            axis.spines[["top", "right"]].set_visible(False)
    handles, states = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, states, loc="outside lower center", ncols=len(states), fontsize=8, frameon=False)
    figure.suptitle(
        f"{result['model']}, {format_bytes(result['kv_bytes'])} of keys and values, contexts up to "
        f"{result['max_model_len']:,} tokens ({'measured' if result['mode'] == 'real' else 'simulated'})",
        fontsize=10,
    )
    save(figure, path)


def _plot_shares(axis: Any, names: Sequence[str], rows: Sequence[Mapping[str, Any]], workload: str) -> None:
    bottom = [0.0] * len(rows)
    for state, colour in _COLOURS.items():
        heights = [100 * r["shares"][state] for r in rows]
        axis.bar(names, heights, bottom=bottom, color=colour, label=state, width=0.75)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for x, r in enumerate(rows):
        axis.text(x, 101, f"{r['running_mean']:.0f}", ha="center", va="bottom", fontsize=7)
    axis.set_ylim(0, 112)
    axis.set_yticks(range(0, 101, 25))
    axis.set_title(f"{workload}: the budget, % (above: sequences at once)", fontsize=9)


def _plot_bars(
    axis: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str], figure: str, ratio: str, title: str, colour: str
) -> None:
    """Plot a figure of each row, labelled with its ratio to the baseline's."""
    bars = axis.bar(names, [r[figure] for r in rows], color=colour, width=0.75)
    axis.bar_label(bars, ["" if r[ratio] is None else f"{r[ratio]:.2f}×" for r in rows], padding=2, fontsize=7)
    axis.margins(y=0.12)
    axis.set_title(title, fontsize=9)
