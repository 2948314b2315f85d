"""What this machine has to offer."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_FILES = (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),)


def available_memory() -> int:
    """Bytes that a new allocation can use without swapping, within this process's container."""
    available = _meminfo_available()
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


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
