"""`octavo calibrate-speed`: measure how long a server's steps take here, for `octavo simulate`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

from octavo.commands.common_options import add_json_option
from octavo.commands.options import add_options
from octavo.config import EngineConfig
from octavo.option import Options, option
from octavo.units import SECONDS

DESCRIPTION = """\
Measure `octavo serve` with these engine options for a minute and a half, and write a model of its step times for
`octavo simulate --speed FILE`. Nothing else should run on the machine meanwhile.
"""


OTHERS = 0.05
"""Share of the processor time of others above which a measurement should be repeated."""

_measuring = partial(option, group="measurement options")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions(Options):
    """The options of `octavo calibrate-speed`."""

    output: str = _measuring("speed.json", "file to write", metavar="FILE")
    seconds: float = _measuring(80.0, "how long to measure", unit=SECONDS, above=0)
    keep_plans: str | None = _measuring(None, "also write the recorded plans to this file", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser, "tables")
    add_options(parser, MeasuringOptions)
    add_options(parser, EngineConfig, positional_model=True)


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from octavo.commands.options import engine_argv, given_options
    from octavo.config import DEFAULT_MODEL
    from octavo.errors import ConfigError
    from octavo.planner.sources import find_shape
    from octavo.simulator.calibration import calibrate
    from octavo.workloads import report
    from octavo.workloads.plots import require_writable

    # Steps of all sizes are measured, so a server's default latency target must not limit them.
    asked = MeasuringOptions(**given_options(args, MeasuringOptions))
    options = {"itl_slo_ms": None, **given_options(args, EngineConfig)}
    if "record_plans" in options:
        raise ConfigError("the measurement records plans itself: use --keep-plans FILE instead of --record-plans")
    require_writable(asked.output)
    shape = find_shape(options.get("model", DEFAULT_MODEL))
    speed = calibrate(engine_argv(options), asked.seconds, shape.config.vocab_size, asked.keep_plans)
    speed.write(asked.output)
    if args.json:
        print(report.as_json_line({**asdict(speed), "file": asked.output}))
        return 0
    times, fit = speed.times, speed.fit
    values = {
        "base": times.base,
        **{f"products({rows:g})": seconds for rows, seconds in times.products},
        "per_context_token": times.per_context_token,
        "per_chunk_work": times.per_chunk_work,
        "per_seq": times.per_seq,
        "per_moved_block": times.per_moved_block,
        "per_arrival": times.per_arrival,
    }
    rows = [
        [name, f"{1e6 * value:.5g}", *(f"{1e6 * end:.5g}" for end in fit["intervals_5_95"][name])]
        for name, value in values.items()
    ]
    print("\n".join(report.columns(["coefficient", "µs", "5 %", "95 %"], rows)))
    print(f"{fit['steps']:,} steps, mean absolute error {100 * fit['mean_abs_error']:.1f} %")
    print(f"a request takes {1e3 * speed.intake_s:.2f} ms before its first step, and its first token", end=" ")
    print(f"{1e3 * speed.reply_s:.2f} ms after; written to {asked.output}")
    others, stolen, left_out = (speed.facts[name] for name in ("others", "stolen", "left_out_s"))
    if left_out:
        print(f"left out: {left_out:.0f} s in which others used the processors")
    if others is not None and others > OTHERS:
        print(f"other programs used {100 * others:.0f} % of the processor time: measure again when none runs")
    if stolen is not None and stolen > OTHERS:
        print(
            f"the host gave {100 * stolen:.0f} % of the processor time to other virtual machines: measure again later"
        )
    return 0
