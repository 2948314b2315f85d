"""This machine: its name in tables, and the folder of its results, so that no machine's figures replace another's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from octavo import kernels
from octavo.workloads import report

RESULTS = Path(__file__).parent / "results"


class _Kind(NamedTuple):
    """A kind of processor, by what /proc/cpuinfo says of it."""

    vendor: str
    family: int
    models: range
    name: str
    folder: str


_KINDS = (
    _Kind("AuthenticAMD", 26, range(256), "Zen 5", "amd_zen5"),
    _Kind("AuthenticAMD", 25, range(0x10, 0x20), "Zen 4", "amd_zen4"),
    _Kind("AuthenticAMD", 25, range(0x10), "Zen 3", "amd_zen3"),
    _Kind("GenuineIntel", 6, range(143, 144), "Sapphire Rapids", "intel_spr"),
    _Kind("GenuineIntel", 6, range(207, 208), "Emerald Rapids", "intel_emr"),
)


def name() -> str:
    """Name the processor, its kind if it is a known one, and the instructions that the kernels use."""
    told, kind = report.machine(), _kind()
    details = [kind.name] if kind else []
    if kernels.available():
        details.append(kernels.isa())
    return f"{told['cores']} cores of an {told['cpu']}" + (f" ({', '.join(details)})" if details else "")


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3


def output_folder(path: str) -> Path:
    """Return a folder to write to, made if it is missing: before a measurement, not after it. For `argparse`."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def output_file(path: str) -> Path:
    """Return a file to write, whose folder is made if it is missing. For `argparse`."""
    return output_folder(str(Path(path).parent)) / Path(path).name


def results_folder() -> Path:
    """Return the folder of this machine's results, which may not exist yet."""
    kind = _kind()
    return RESULTS / (kind.folder if kind else re.sub(r"\W+", "_", report.machine()["cpu"].lower()).strip("_"))


def _kind() -> _Kind | None:
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return None  # not Linux
    told = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (.+)$", first, re.MULTILINE))
    if len(told) < 3:
        return None  # not x86
    vendor, family, model = told["vendor_id"], int(told["cpu family"]), int(told["model"])
    return next((k for k in _KINDS if (k.vendor, k.family) == (vendor, family) and model in k.models), None)
