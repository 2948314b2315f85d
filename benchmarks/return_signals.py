"""Estimate what each fact known about a block would gain for an eviction policy, on a recorded hour of chat.

    python benchmarks/return_signals.py TRACE.jsonl [--out benchmarks/results]

A signal puts each use of a block into a class. For each class, past uses show how many blocks return within any given
time, and how long they are kept until then. A policy that knows only the class keeps each block for a time that depends
on its class; the best times for a pool of a given size follow from the upper hulls of returns over time kept, steepest
parts first. No such policy can find more, if blocks of a class are alike and prefixes cost nothing extra: this gives a
bound for each signal, from a table of numbers instead of a policy for each.

Every figure is fitted on one part of the trace and evaluated on another: halves by time, and halves by conversation.
What helps only on the part that it was fitted on is overfitted. The last rows fit one model of several signals
(logistic regression: does the block return within ten minutes?) and divide its scores into sixteen classes.

Three rows know something of the future, which no policy can: whether a block returns at all, whether the conversation
goes on, and how soon the block returns, to a factor of four. They show what the rest of the way to Belady's optimum is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import this_machine
from octavo.bench.traces import TraceRequest, read_trace

POOLS = [1_000, 4_000, 16_000, 40_000]
HORIZON_S = 600.0
NUM_SCORES = 16
RIDGE = 3.0

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Uses:
    """Every use of a block: its time, the time until the next use (infinity: never), conversation, signals, future."""

    time: Floats
    until_next: Floats
    conversation: Ints
    signals: dict[str, Ints]
    foreseen: dict[str, Ints]


def read_uses(requests: Sequence[TraceRequest]) -> Uses:
    rows: list[tuple[float, ...]] = []
    block_ids: list[int] = []
    hits: dict[int, int] = {}
    last: dict[int, tuple[float, int]] = {}  # for each block: when it was last used, and by which request
    turns: list[int] = []
    for index, request in enumerate(requests):
        ids, now = request.hash_ids or (), request.arrival_s or 0.0
        found = next((k for k, block in enumerate(ids) if block not in last), len(ids))
        # Almost all requests share the first block: it says nothing about the conversation.
        before = last[ids[found - 1]] if found > 1 else None
        turns.append(0 if before is None else turns[before[1]] + 1)
        think = -1.0 if before is None else now - before[0]
        conversation = ids[1] if len(ids) > 1 else ids[0]
        for depth, block in enumerate(ids):
            past = hits.get(block, 0) if depth else -1  # a class of its own
            at_end = depth == len(ids) - 1
            new = len(ids) - found
            rows.append(
                (now, conversation, past, turns[-1], think, depth, len(ids), new, request.output_tokens, at_end)
            )
            block_ids.append(block)
            hits[block] = hits.get(block, 0) + 1
            last[block] = (now, index)
    columns = np.array(rows).T
    until_next, following = np.full(len(rows), np.inf), dict[int, float]()
    for use in range(len(rows) - 1, -1, -1):
        until_next[use] = following.get(block_ids[use], np.inf) - columns[0, use]
        following[block_ids[use]] = columns[0, use]
    past = columns[2]
    signals = {
        "past hits": np.where(past < 0, 9, np.minimum(past, 8)),
        "turn number": np.minimum(columns[3], 10),
        "think time": np.digitize(columns[4], [0, 20, 30, 45, 60, 90, 130, 200, 400]),
        "depth in the prefix": np.digitize(columns[5], [1, 2, 4, 8, 16, 32, 64, 128]),
        "length of the prompt": np.digitize(columns[6], [2, 4, 8, 14, 20, 31, 45, 80, 120, 160]),
        "new part of the prompt": np.digitize(columns[7], [1, 2, 3, 4, 6, 10, 20, 50]),
        "length of the answer": np.digitize(columns[8], [30, 60, 120, 250, 350, 500, 800]),
        "last, partial block": columns[9],
    }
    integers = {name: values.astype(np.int64) for name, values in signals.items()}
    conversation = columns[1].astype(np.int64)
    latest = np.zeros(int(conversation.max()) + 1)
    np.maximum.at(latest, conversation, columns[0])
    foreseen = {
        "whether it returns at all": np.isfinite(until_next),
        "whether the conversation goes on": columns[0] < latest[conversation],
        "how soon it returns, to a factor of four": np.digitize(until_next, [4.0, 16.0, 64.0, 256.0, 1024.0, np.inf]),
    }
    future = {name: values.astype(np.int64) for name, values in foreseen.items()}
    return Uses(columns[0], until_next, conversation, integers, future)


def joined(uses: Uses, names: Sequence[str]) -> Ints:
    """Combine the classes of several signals; without signals there is one class."""
    classes: Ints = np.zeros(len(uses.time), np.int64)
    for name in names:
        signal = uses.signals[name]
        classes = classes * (int(signal.max()) + 1) + signal
    found: Ints = np.unique(classes, return_inverse=True)[1].reshape(-1)
    return found


def log_odds(uses: Uses, names: Sequence[str], fitted_on: Mask) -> Floats:
    """The log-odds that each block returns within ten minutes, by a model of several signals fitted on a part."""
    columns = [np.ones((len(uses.time), 1))]
    columns += [np.eye(int(uses.signals[name].max()) + 1)[uses.signals[name]] for name in names]
    features = np.hstack(columns)
    returned = (uses.until_next <= HORIZON_S).astype(float)
    x, y = features[fitted_on], returned[fitted_on]
    weights = np.zeros(features.shape[1])
    for _ in range(25):  # Newton's method
        chance = 1 / (1 + np.exp(-x @ weights))
        slope = x.T @ (chance - y) + RIDGE * weights
        curvature = (x * (chance * (1 - chance) + 1e-6)[:, None]).T @ x + RIDGE * np.eye(len(weights))
        step = np.linalg.solve(curvature, slope)
        weights -= step
        if np.abs(step).max() < 1e-4:
            break
    scores: Floats = features @ weights
    return scores


def explained(uses: Uses, names: Sequence[str], fitted_on: Mask, evaluated_on: Mask) -> float:
    """How much of the uncertainty (entropy) whether a block returns within ten minutes these signals take away."""
    returned = uses.until_next <= HORIZON_S

    def loss(chance: Floats | float) -> float:
        likelihoods = np.where(returned, chance, 1 - chance)[evaluated_on]
        return -float(np.log(np.maximum(likelihoods, 1e-9)).mean())

    chances = 1 / (1 + np.exp(-log_odds(uses, names, fitted_on)))
    return 1 - loss(chances) / loss(float(returned[fitted_on].mean()))


def scored(uses: Uses, names: Sequence[str], fitted_on: Mask) -> Ints:
    """Classes by the score of a model of several signals, fitted on a part of the uses."""
    scores = log_odds(uses, names, fitted_on)
    first = uses.signals["past hits"] == 9
    # Finer for high scores.
    edges = np.unique(np.quantile(scores[fitted_on & ~first], np.linspace(0, 1, NUM_SCORES + 1)[1:-1] ** 0.5))
    return np.where(first, len(edges) + 1, np.digitize(scores, edges)).astype(np.int64)


def bounds(uses: Uses, classes: Ints, fitted_on: Mask, evaluated_on: Mask, pools: Sequence[float]) -> list[float]:
    """The share of uses that are hits, for each pool size."""
    lengths = np.concatenate([[0.0], np.geomspace(3, 3700, 60)])
    fitted = _curves(uses, classes, fitted_on, lengths)
    evaluated = _curves(uses, classes, evaluated_on, lengths)
    parts: list[tuple[float, float, float]] = []  # returns by time as fitted; returns and time as evaluated
    for kind in range(int(classes.max()) + 1):
        returns, kept = fitted[0][kind], fitted[1][kind]
        for a, b in _hull(kept, returns):
            slope = (returns[b] - returns[a]) / max(kept[b] - kept[a], 1e-9)
            more, longer = (curve[kind][b] - curve[kind][a] for curve in evaluated)
            parts.append((slope, more, longer))
    parts.sort(key=lambda part: -part[0])
    times = uses.time[evaluated_on]
    results = []
    for pool in pools:
        left, found = pool * float(times.max() - times.min()), 0.0
        for _, more, longer in parts:
            share = min(1.0, left / longer) if longer > 0 else 1.0
            found += share * more
            left -= share * longer
            if left <= 0:
                break
        results.append(found / int(evaluated_on.sum()))
    return results


def _curves(uses: Uses, classes: Ints, chosen: Mask, lengths: Floats) -> tuple[Floats, Floats]:
    """Per class and time that blocks are kept: how many return, and the total time kept. Both begin at zero."""
    kinds, count = classes[chosen], int(classes.max()) + 1
    until, waited = uses.until_next[chosen], float(uses.time.max()) - uses.time[chosen]
    returns, kept = np.zeros((count, len(lengths) + 1)), np.zeros((count, len(lengths) + 1))
    for i, length in enumerate(lengths, start=1):
        returns[:, i] = np.bincount(kinds, weights=until <= length, minlength=count)
        kept[:, i] = np.bincount(kinds, weights=np.minimum(np.minimum(until, waited), length), minlength=count)
    return returns, kept


def _hull(x: Floats, y: Floats) -> list[tuple[int, int]]:
    """The rising segments of the upper hull, from the first point on."""
    parts, at = [], 0
    while at < len(x) - 1:
        slopes = (y[at + 1 :] - y[at]) / np.maximum(x[at + 1 :] - x[at], 1e-9)
        if slopes.max() <= 1e-9:
            break
        following = at + 1 + int(slopes.argmax())
        parts.append((at, following))
        at = following
    return parts


def run(requests: Sequence[TraceRequest]) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the rows of the table, and the share of the uncertainty that signals take away."""
    uses = read_uses(requests)
    early = uses.time < uses.time.max() / 2
    even = uses.conversation % 2 == 0
    # Half of the conversations are half of the load, and get half of the pool.
    splits = [(early, ~early, 1.0), (~early, early, 1.0), (even, ~even, 0.5), (~even, even, 0.5)]
    everything = np.ones(len(early), bool)
    rows: dict[str, dict[str, list[float]]] = {}

    def add(name: str, classes: list[Ints], whole: Ints) -> None:
        found = [
            bounds(uses, each, fitted, evaluated, [share * pool for pool in POOLS])
            for each, (fitted, evaluated, share) in zip(classes, splits, strict=True)
        ]
        rows[name] = {
            "itself": bounds(uses, whole, everything, everything, POOLS),
            "time": [float(np.mean(pair)) for pair in zip(*found[:2], strict=True)],
            "conversations": [float(np.mean(pair)) for pair in zip(*found[2:], strict=True)],
        }
        print(name, {k: [f"{100 * x:.2f}" for x in v] for k, v in rows[name].items()}, flush=True)

    hits, others = "past hits", [name for name in uses.signals if name != "past hits"]
    add("nothing", [joined(uses, [])] * 4, joined(uses, []))
    for name in uses.signals:
        add(name, [joined(uses, [name])] * 4, joined(uses, [name]))
    for name in others:
        add(f"past hits and {name}", [joined(uses, [hits, name])] * 4, joined(uses, [hits, name]))
    for name, known in uses.foreseen.items():
        classes = known * (int(uses.signals[hits].max()) + 1) + uses.signals[hits]
        add(f"past hits and, from the future, {name}", [classes] * 4, classes)
    for names in ([hits], [hits, "think time"], [hits, "new part of the prompt", "think time"], [hits, *others]):
        label = "a model of " + (" and ".join(names) if len(names) < 4 else "all")
        add(label, [scored(uses, names, fitted) for fitted, _, _ in splits], scored(uses, names, everything))
    shares = {
        label: float(np.mean([explained(uses, names, fitted, evaluated) for fitted, evaluated, _ in splits]))
        for label, names in (("past hits", [hits]), ("all signals", [hits, *others]))
    }
    return rows, shares


def table(rows: dict[str, dict[str, list[float]]], shares: dict[str, float], trace: str) -> str:
    def cells(rates: list[float]) -> str:
        return " | ".join(f"{rate:.1%}" for rate in rates)

    pools = " | ".join(f"{pool:,}" for pool in POOLS)
    lines = [
        "# What a block's return depends on",
        "",
        f"`python benchmarks/return_signals.py {trace}`. The most that a policy can find which knows of a block only "
        "its age and the named signals, by blocks in the pool: fitted on one half and evaluated on the other, both "
        "ways, mean of the two. The last four columns are fitted and evaluated on the whole trace: what they have "
        "more than the others is learned by heart.",
        "",
        "| signals | halves by time: "
        + pools
        + " | halves by conversation: "
        + pools
        + " | on itself: "
        + pools
        + " |",
        "|---|" + "---:|" * 12,
    ]
    lines += [
        f"| {name} | {cells(row['time'])} | {cells(row['conversations'])} | {cells(row['itself'])} |"
        for name, row in rows.items()
    ]
    taken = ", ".join(f"{label} take away {share:.0%}" for label, share in shares.items())
    lines += [
        "",
        f"Of the uncertainty (entropy) whether a block returns within ten minutes, {taken}, on the part of the trace "
        "that they were not fitted on.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a Mooncake trace (JSON lines with hash_ids)")
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for return_signals.md")
    arguments = parser.parse_args()
    rows, shares = run([request for request in read_trace(arguments.trace) if request.hash_ids])
    text = table(rows, shares, arguments.trace.name)
    print(text)
    if arguments.out:
        (arguments.out / "return_signals.md").write_text(text)
    print(json.dumps({"rows": rows, "explained": shares}))


if __name__ == "__main__":
    main()
