"""The table of `benchmarks/simulator.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PERCENTILES = ("p50", "p90", "p99")
HIGHEST_SHARE, WITHIN, STEP_ERROR = 0.8, 0.1, 0.05

_SHOWN = {"ttft_ms": "TTFT, ms", "itl_ms": "inter-token, ms"}


def as_markdown(result: dict[str, Any]) -> str:
    rows = result["rows"]
    below = [row for row in rows if row["share"] <= HIGHEST_SHARE + 0.01]
    above = [row for row in rows if row not in below]
    machine = f"{result['machine']['cores']} cores of {result['machine']['cpu']}"
    lines = [
        "# The simulator against the server",
        "",
        f"`python -m benchmarks.simulator`, {machine}; {result['model']}.",
        f"{result['rounds']} rounds, in which each load ran {result['run_seconds']:g} s after a piece of calibration.",
        f"Saturation: {result['saturation']:.2f} requests a second, by simulation.",
        "",
        "## Single steps",
        "",
        f"Wanted: a mean absolute error of {100 * STEP_ERROR:.0f} % at most. Of the time: what the steps' errors, "
        "added up, are of the steps' time. Bias: of all steps together, with the times calibrated beforehand and in "
        "between; all else is with the latter. Others, stolen: processor time of other programs, and that the host "
        "gave to other virtual machines.",
        "",
        "| load | steps | error | bias | of the time | others | stolen | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        biases = ", ".join(f"{100 * bias:+.1f}" for bias in row["biases"])
        errors = [f"{100 * row['step_error']:.1f} %", f"{biases} %"]
        verdict = "met" if row["step_error"] <= STEP_ERROR else "missed"
        shares = [f"{100 * row['error_of_time']:.1f} %", f"{row['others']:.1%}", f"{row['stolen']:.1%}"]
        cells = [row["name"], str(row["steps"]), *errors, *shares, verdict]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"## Up to {HIGHEST_SHARE:.0%} of saturation", ""]
    lines += [f"Real → simulated with times calibrated between the pieces; wanted: within {100 * WITHIN:.0f} %.", ""]
    lines += _latency_table(below, 2)
    lines += ["", "With times calibrated beforehand, as somebody who sizes a service has them:", ""]
    lines += _latency_table(below, 1)
    lines += _limits(below)
    if above:
        lines += ["", "## Near saturation", "", "In milliseconds: a small error of the rate is a large one of the "]
        lines[-1] += "queue. Real → simulated, calibrated beforehand and in between."
        lines += ["", "| load | requests | figure | p50 | p90 | p99 |", "|---|---|---|---|---|---|"]
        for row in above:
            for name in ("ttft_ms", "itl_ms"):
                cells = [_in_ms(figures) for figures in row[name].values()]
                lines.append(f"| {_head(row)} | {_SHOWN[name]} | " + " | ".join(cells) + " |")
            lines.append(f"| {_head(row)} | output tokens / s | {_in_ms(row['output_tok_s'])} | | |")
    once = result["at_once"]
    lines += ["", "## Decisions", ""]
    lines += ["Wanted: exactly equal. All requests at once, in 256 blocks:", ""]
    lines += ["| | real | simulated | |", "|---|---|---|---|"]
    lines += [
        f"| {name.replace('_', ' ')} | {real} | {model} | {'met' if real == model else 'missed'} |"
        for name, real, model in zip(once["names"], once["real"], once["simulated"], strict=True)
    ]
    cached = [f"{row['name']}: {_in_ms(row['cached_tokens'])}" for row in rows]
    lines += ["", "Cached tokens of the runs: " + "; ".join(cached) + "."]
    return "\n".join(lines) + "\n"


def _in_ms(figures: Sequence[float]) -> str:
    real, *models = figures
    return f"{real:.0f} → " + ", ".join(f"{model:.0f}" for model in models)


def _latency_table(rows: Sequence[dict[str, Any]], which: int) -> list[str]:
    lines = ["| load | requests | figure | p50 | p90 | p99 | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        for name in ("ttft_ms", "itl_ms"):
            pairs = [(figures[0], figures[which]) for figures in row[name].values()]
            cells = [f"{real:.1f} → {model:.1f} ({_percent(real, model)})" for real, model in pairs]
            lines.append(f"| {_head(row)} | {_SHOWN[name]} | " + " | ".join(cells) + f" | {_verdict(pairs)} |")
        real, model = row["output_tok_s"][0], row["output_tok_s"][which]
        cells_ = f"{real:.0f} → {model:.0f} ({_percent(real, model)}) | |"
        lines.append(f"| {_head(row)} | output tokens / s | {cells_} | {_verdict([(real, model)])} |")
    return lines


def _limits(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How far the same latencies lie from themselves in a second run."""
    lines = ["", "## How well latencies can be predicted", ""]
    lines += [
        "The second half of the pieces against the first, of the same arrivals and lengths.",
        "",
        "| load | figure | p50 | p90 | p99 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        for name, shown in _SHOWN.items() if "again" in row else ():
            cells = [f"{one:.1f} → {other:.1f} ({_percent(one, other)})" for one, other in row["again"][name].values()]
            lines.append(f"| {row['name']} | {shown} | " + " | ".join(cells) + " |")
    return lines


def _head(row: dict[str, Any]) -> str:
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return f"{row['name']} | {row['requests']}{failed}"


def _percent(real: float, model: float) -> str:
    return f"{100 * (model / real - 1):+.0f} %"


def _verdict(pairs: Sequence[Sequence[float]]) -> str:
    return "met" if all(abs(model / real - 1) <= WITHIN for real, model in pairs) else "missed"
