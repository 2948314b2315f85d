"""Plot latency over throughput: a line for each variant, a point for each rate, and the Pareto front of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, how_to_install
from octavo.simulator.speed import require_writable

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_LATENCIES = (("ttft_ms", "time to first token, p99, ms"), ("itl_ms", "inter-token latency, p99, ms"))


def require_plot(path: str | Path) -> None:
    """Raise `ConfigError` if no plot can be drawn or written to `path`; called before anything is computed.

    The folder of `path` is created.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(f"plots need matplotlib: {how_to_install('plot')}") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:
        raise ConfigError(f"cannot plot to {path}: its name must end in .{', .'.join(sorted(formats))}")
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    require_writable(path)


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    lines: dict[str, list[Mapping[str, Any]]] = {}
    for point in result["points"]:
        if point.get("completed"):
            name = ", ".join(f"{key} {value}" for key, value in point["variant"].items()) or result["simulate"]
            lines.setdefault(name, []).append(point)
    if not lines:
        raise ConfigError("nothing to plot: no run completed a request")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    # Answers of one token have no inter-token latency.
    measured = [point for points in lines.values() for point in points]
    latencies = [each for each in _LATENCIES if any(point[each[0]]["p99"] is not None for point in measured)]
    for axes, (latency, title) in zip(figure.subplots(1, len(latencies), squeeze=False)[0], latencies, strict=True):
        every: list[tuple[float, float]] = []
        for number, (name, points) in enumerate(lines.items()):
            pairs = [(p["output_tok_s"], p[latency]["p99"]) for p in points if p[latency]["p99"] is not None]
            every += pairs
            throughputs, latest = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            axes.plot(throughputs, latest, "o-", color=_COLOURS[number % len(_COLOURS)], label=name, ms=4)
        axes.step(*zip(*best(every), strict=True), color="grey", lw=6, alpha=0.25, where="post", label="best")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("output tokens per second")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"{result['simulate']}, simulated: {result['speed']['origin'][:110]}", fontsize=9)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
