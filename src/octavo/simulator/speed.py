"""The speed of a server: measured by `octavo calibrate-speed`, fitted to recorded plans, or estimated for a machine.

A speed file is one JSON object: the fields of `StepTimes`, where they come from, and the options of the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.planner.roofline import StepTimes
from octavo.scheduler.plan_log import read_facts, read_plans
from octavo.scheduler.step_time import StepLoad
from octavo.simulator.fitting import MeasuredStep, Spread, fit, outside, periods
from octavo.text_file import read_text, write_text

VERSION = 2
_MOST_AT_ONCE = 2  # requests that come with one step; those of a burst share what they cost
_POSITIVE = (  # facts that are sizes
    "block_size",
    "block_bytes",
    "bytes_per_token",
    "num_blocks",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)
MEASURED = "measured"
ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Speed:
    """The step times of one server, and where they come from.

    Attributes:
        origin: one line for reports: what was measured on which machine, or the data sheet.
        kind: "measured" or "estimated".
        times: from the beginning of a step to the beginning of the next, host work included.
        intake_s: seconds from a client sending a request until the first step that could compute it begins.
        reply_s: seconds from the end of the step that drew a first token until the client receives it.
        spread: how far single steps deviate from `times`.
        facts: the engine's options, as `--record-plans` records them.
        fit: number of steps, error and intervals of the fit.
    """

    origin: str
    kind: str
    times: StepTimes
    intake_s: float = 0.0
    reply_s: float = 0.0
    spread: Spread = field(default_factory=Spread)
    facts: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        """Write a speed file.

        Raises:
            ConfigError: the file cannot be written.
        """
        fields = {**asdict(self), "times": asdict(self.times)}
        write_text(path, json.dumps({"octavo_speed": VERSION, **fields}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Speed:
        """Read a speed file.

        Raises:
            ConfigError: the file cannot be read, or is not a speed file of this version.
        """
        try:
            content = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        version = content.pop("octavo_speed", None) if isinstance(content, dict) else None
        if version != VERSION:
            raise ConfigError(f"{path} is not a speed file of version {VERSION}: `octavo calibrate-speed` writes one")
        try:
            times = content.pop("times")
            times["products"] = tuple((float(rows), float(seconds)) for rows, seconds in times["products"])
            spread = {kind: tuple(map(float, ratios)) for kind, ratios in content.pop("spread", {}).items()}
            speed = cls(times=StepTimes(**times), spread=Spread(**spread), **content)
            _check(speed)
            return speed
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error


def _check(speed: Speed) -> None:
    """Raise `ValueError` or `TypeError` if a speed could not be simulated: times below 0, or steps that take none."""
    times = {**asdict(speed.times), "intake_s": speed.intake_s, "reply_s": speed.reply_s}
    rows, products = zip(*times.pop("products") or [(0.0, 0.0)], strict=True)
    if any(low >= high for low, high in pairwise(rows)):
        raise ValueError(f"products are not by ascending rows: {list(rows)}")
    named = [*times.items(), *(("products", value) for value in (*rows, *products))]
    named += [("spread", ratio) for ratio in (*speed.spread.decodes, *speed.spread.chunks, *speed.spread.resumed)]
    for name, value in named:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number, finite and not below 0, got {value!r}")
    if not speed.times.predict(StepLoad(rows=1, context=1, num_seqs=1)) > 0:
        raise ValueError("a step takes no time")
    if not isinstance(speed.facts, dict):
        raise TypeError(f"facts must be an object, got {speed.facts!r}")
    for name in _POSITIVE:
        if name in speed.facts and (type(speed.facts[name]) is not int or speed.facts[name] < 1):
            raise ValueError(f"{name} must be a positive integer, got {speed.facts[name]!r}")


def speed_of_plans(
    paths: Sequence[str],
    *,
    origin: str | None = None,
    since: float = 0.0,
    left_out: Sequence[tuple[float, float]] = (),
) -> Speed:
    """Fit a speed to recorded plans of one engine.

    Args:
        since: leave out steps that began earlier, by `RecordedStep.at`.
        left_out: leave out steps that touch one of these spans of time, given by beginning and end.

    Raises:
        ConfigError: a file is not a recording, the recordings are of different engines, or they have too few steps.
    """
    facts = read_facts(paths[0])
    measured: list[MeasuredStep] = []
    for path in paths:
        if read_facts(path) != facts:
            raise ConfigError(
                f"{path} and {paths[0]} are recordings of different engines: {read_facts(path)} and {facts}"
            )
        steps = [step for step in read_plans(path) if step.at >= since]
        measured += outside(_one_by_one(periods(steps)), left_out)
    fitted = fit(measured)
    return Speed(
        origin=origin or f"fitted to {len(measured)} steps of {facts.get('model')} in {', '.join(paths)}",
        kind=MEASURED,
        times=fitted.times,
        spread=Spread.of(fitted.times, measured),
        facts=facts,
        fit={
            "steps": fitted.num_steps,
            "mean_abs_error": fitted.mean_abs_error,
            "intervals_5_95": fitted.intervals,
        },
    )


def _one_by_one(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the steps during which requests came one by one."""
    return [step for step in steps if step.num_arrived <= _MOST_AT_ONCE]
