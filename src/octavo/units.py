"""Units of numbers: seconds, counts such as 4k, and bytes such as 2GiB."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError

# A bare number below this is in GiB, as in vLLM, and not in bytes.
_SMALLEST_SWAP = 1024


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of an option's number.

    Attributes:
        metavar: name of the value in `--help`.
        words: what an error calls a value, such as "a number of seconds".
        read: converts a number, or a text such as "2GiB", to the unit; None if only numbers are accepted. The option's
            type is that of the number, which a checked instance holds.
    """

    metavar: str
    words: str
    read: Callable[[Any], int | float] | None = None


SECONDS = Unit("SECONDS", "a number of seconds")
MILLISECONDS = Unit("MS", "a number of milliseconds")


_COUNT_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def parse_count(text: str) -> int:
    """Parse a count as in vLLM: '4096' -> 4096, '4k' -> 4000, '4K' -> 4096, '25.6k' -> 25600.

    Raises:
        ValueError: the text is not such a number, or not a whole one.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)([kKmMgG])\s*", text)
    if match is None:
        return int(text)
    whole, rest = divmod(round(float(match[1]) * _COUNT_UNITS[match[2]], 6), 1)
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return int(whole)


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = _UNITS[_letter] = 1024**_power


def parse_bytes(text: str) -> int:
    """Parse a size: '2GiB' -> 2147483648, '2GB' -> 2000000000, '2G' -> 2147483648, '123' -> 123.

    Raises:
        ConfigError: the text is not a number with an optional unit of B, K, M, G, T, KB … TB, KiB … TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ConfigError(f"cannot read {text!r} as a number of bytes: write 2147483648, 2GiB or 2GB")
    return int(float(match[1]) * unit)


def counted(count: int, noun: str) -> str:
    """Format a number of things: (1, "CPU") -> '1 CPU', (2, "CPU") -> '2 CPUs'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Format a size: 2147483648 -> '2.00 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def exact_bytes(count: int) -> str:
    """Format a size for a command line, without rounding: 2147483648 -> '2GiB', 2147483649 -> '2147483649'."""
    for unit in ("GiB", "MiB"):
        whole, rest = divmod(count, _UNITS[unit.upper()])
        if whole and not rest:
            return f"{whole}{unit}"
    return str(count)


def _read_bytes(size: int | str) -> int:
    return parse_bytes(size) if isinstance(size, str) else size


def _read_swap(size: int | str) -> int:
    """Read swap space: '4' -> 4 GiB, as in vLLM; with a unit, or 1024 and above, a number of bytes."""
    if isinstance(size, str) and not re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", size):
        return parse_bytes(size)
    number = float(size)
    return int(number * 2**30) if 0 < number < _SMALLEST_SWAP else int(number)


_MOST_CPUS = 1 << 16


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of CPUs as of Linux: '0-3,8' -> {0, 1, 2, 3, 8}.

    Raises:
        ValueError: the text is not such a list, or has a CPU of 65536 or above.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last if dash else first)
        if not 0 <= begin <= end < _MOST_CPUS:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(begin, end + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Format a list of CPUs as Linux does: {0, 1, 2, 3, 8} -> '0-3,8'."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1] = [runs[-1][0], cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


BYTES = Unit("SIZE", "a number of bytes, such as 2GiB", _read_bytes)
SWAP_BYTES = Unit("SIZE", "a number of bytes, such as 2GiB", _read_swap)
