"""Percentiles, and results as a table or as a line of JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 to 100), interpolated linearly as numpy does by default; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """Return {"mean", "p50", "p90", "p95", "p99", "max"} of `values * scale`, rounded; all None without values."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{q}" for q in PERCENTILES), "max"))
    figures = {"mean": math.fsum(values) / len(values)}
    figures |= {f"p{q}": percentile(values, q) for q in PERCENTILES}
    figures["max"] = max(values)
    return {name: round(value * scale, 3) for name, value in figures.items()}


def machine() -> dict[str, Any]:
    """Return the hardware and software that a figure depends on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux: use the architecture's name
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name, "cores": usable, "python": platform.python_version()}


def as_json_line(result: Mapping[str, Any]) -> str:
    """Return a result as one line of JSON; NaN and infinities become null, because JSON has none."""
    return json.dumps(_finite(result), ensure_ascii=False)


def as_table(result: Mapping[str, Any]) -> str:
    """Return `name  value` lines; summaries (mappings with a mean) are rows under a heading."""
    width = max((len(label(name)) for name in result), default=0) + 2
    lines = []
    heading: list[str] = []
    for name, value in result.items():
        title = f"{label(name):<{width}}"
        if isinstance(value, Mapping) and "mean" in value:
            if list(value) != heading:
                heading = list(value)
                lines.append(" " * width + "".join(f"{column:>10}" for column in heading))
            lines.append(title + "".join(f"{show(figure):>10}" for figure in value.values()))
        elif isinstance(value, Mapping):
            lines.append(title + (", ".join(f"{key} {show(item)}" for key, item in value.items()) or "none"))
        elif isinstance(value, (list, tuple)):
            lines.append(title + ", ".join(map(show, value)))
        else:
            lines.append(title + show(value))
    return "\n".join(lines)


def columns(heading: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns: text to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (heading, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    to_right = [all(row[i][:1] in "+-0123456789" for row in cells[1:]) for i in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        ).rstrip()
        for row in cells
    ]


def label(name: str) -> str:
    """Return a readable name: 'output_tok_s' -> 'output tok/s', 'ttft_ms' -> 'ttft ms'."""
    return name.replace("tok_s", "tok/s").replace("requests_s", "requests/s").replace("_", " ")


def show(value: object) -> str:
    """Format a number for a table, with at most three decimals, and '-' for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
