"""The options of `octavo calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from octavo.option import Options, option

_calibration = partial(option, group="calibration options")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions(Options):
    """What is chosen, and over which text."""

    data: str | None = _calibration(None, "text to calibrate with; default: Python's own documentation", metavar="FILE")
    output: str | None = _calibration(
        None, "file to write; default: next to the model; with --search: kv_cache_table.toml", metavar="FILE"
    )
    windows: int | None = _calibration(None, "pieces of text (default: 8; with --search: 2)", least=1)
    window: int | None = _calibration(
        None, "tokens of each piece (default: 512; with --search: 256; with --entropy: 2048)", least=1
    )
    method: Literal["max", "percentile", "mse"] = _calibration(
        "mse",
        "how scales are chosen; max: no value is clipped; percentile: --percentile of each head's values are not "
        "clipped; mse: the smallest squared error",
    )
    percentile: float = _calibration(99.99, "percentile for --method percentile", above=0, most=100, metavar="P")
    search: bool = _calibration(False, "search for a codec per layer, for --kv-cache-dtype FILE")
    entropy: bool = _calibration(
        False, "divide the --kv-budget given by the entropy of attention in each layer, for --kv-budget FILE"
    )
    bits: float = _calibration(6.0, "with --search: mean bits per value, without scales", metavar="B")
    candidates: str = _calibration("int8,int4", "with --search: codecs to choose from", metavar="NAME,…")
    exchanges: int = _calibration(12, "with --search: number of measured attempts to improve the table", least=0)
