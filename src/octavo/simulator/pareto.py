"""Plot latency over throughput: a line for each variant, a point for each rate, and the Pareto front of all."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ConfigError
from octavo.workloads.plots import COLOURS, new_figure, save

_LATENCIES = (("ttft_ms", "time to first token"), ("itl_ms", "inter-token latency"))
_PERCENTILES = (50, 90, 95, 99)  # those that results have
_TITLE_WIDTH = 150  # characters in a line


def best(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (throughput, latency) points that no other point beats in both, by rising throughput."""
    front: list[tuple[float, float]] = []
    for throughput, latency in sorted(points, key=lambda point: (-point[0], point[1])):
        if not front or latency < front[-1][1]:
            front.append((throughput, latency))
    return front[::-1]


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write the plot of a result of `octavo simulate`.

    Raises:
        ConfigError: no run completed a request, or the file cannot be written.
    """
    targets = result["targets"] or {}
    percentile = targets.get("percentile", 99)
    if percentile not in _PERCENTILES:
        percentile = min(p for p in _PERCENTILES if p >= percentile or p == _PERCENTILES[-1])
    key = f"p{percentile:g}"
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for point in result["points"]:
        if point.get("completed"):
            name = ", ".join(f"{key} {value}" for key, value in point["variant"].items()) or result["simulate"]
            lines.setdefault(name, []).append(point)
    if not lines:
        raise ConfigError("nothing to plot: no run completed a request")
    figure = new_figure(11, 5)
    # Answers of one token have no inter-token latency.
    measured = [point for points in lines.values() for point in points]
    latencies = [each for each in _LATENCIES if any(point[each[0]][key] is not None for point in measured)]
    legend: dict[str, Any] = {}
    for axes, (latency, title) in zip(figure.subplots(1, len(latencies), squeeze=False)[0], latencies, strict=True):
        every: list[tuple[float, float]] = []
        for number, (name, points) in enumerate(lines.items()):
            pairs = [(p["output_tok_s"], p[latency][key]) for p in points if p[latency][key] is not None]
            every += pairs
            throughputs, latest = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            axes.plot(throughputs, latest, "o-", color=COLOURS[number % len(COLOURS)], label=name, ms=4)
        front = "best: no other point has more tokens and less latency"
        axes.step(*zip(*best(every), strict=True), color="grey", lw=6, alpha=0.25, where="post", label=front)
        values = [value for _, value in every]
        if (target := targets.get(latency)) is not None:
            axes.axhline(target, color="black", ls="--", lw=1, label="target")
            axes.annotate(f"{target:g} ms", (0.01, target), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
            values.append(target)
        _scale(axes, min(values), max(values))
        axes.set_xlabel("output tokens per second")
        axes.set_ylabel(f"{title}, {key}, ms")
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=3, fontsize=8)
    title = f"{result['simulate']}, simulated: {result['speed']['origin']}"
    figure.suptitle(textwrap.fill(title, _TITLE_WIDTH), fontsize=9)
    save(figure, path)


def _scale(axes: Any, least: float, most: float) -> None:
    """Scale the latencies of `axes` by their logarithm, with ticks at round numbers, four or more."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(least / 1.15, most * 1.15)
    narrow = most < 10 * least
    axes.yaxis.set_major_locator(
        MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], min_n_ticks=4) if narrow else LogLocator(subs=(1, 2, 5))
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
