"""The resources of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.config import parse_bytes

# Most of the RAM that the weights leave which the KV cache takes by itself. Pages are taken only as blocks are first
# written.
CPU_MEMORY_SHARE = 0.4

# Makes this process act as if no more memory were available: for a share of a machine, and for tests.
MEMORY_LIMIT_VARIABLE = "OCTAVO_MEMORY_LIMIT"

_CGROUP_FILES = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)


def available_memory() -> int:
    """Bytes that a new allocation can use without swapping, within this process's container."""
    available = _meminfo_available()
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def limited_memory(available: int) -> int:
    """`available`, but no more than the environment variable OCTAVO_MEMORY_LIMIT ("2GiB") allows an engine.

    Raises:
        ConfigError: the variable is no number of bytes.
    """
    limit = os.environ.get(MEMORY_LIMIT_VARIABLE)
    return min(available, parse_bytes(limit)) if limit else available


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        # Not Linux: physical memory is the best that the standard library knows.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _read_number(path: str) -> int | None:
    """The number in a file, or None where there is no file or no number ("max": no limit)."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
