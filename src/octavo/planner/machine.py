"""The resources of this machine."""

from __future__ import annotations

import functools
import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.config import ALLOWED_CPUS, MOST_THREADS
from octavo.errors import ConfigError
from octavo.units import counted, format_cpus, parse_bytes, parse_cpus

logger = logging.getLogger(__name__)

# Most of the RAM that the weights leave which the KV cache takes by itself. Pages are taken only as blocks are first
# written.
CPU_MEMORY_SHARE = 0.4

# Makes this process act as if no more memory were available: for a share of a machine, and for tests.
MEMORY_LIMIT_VARIABLE = "OCTAVO_MEMORY_LIMIT"

# Threads of the libraries that a process was started with: OpenMP's own variable, which torch obeys too.
THREADS_VARIABLE = "OMP_NUM_THREADS"

# A cgroup v1 without a memory limit reports the largest number of pages that it can count.
_NO_LIMIT = 1 << 62


def available_memory() -> int:
    """Return the bytes that a new allocation can use without swapping, within this process's containers."""
    return cgroup_memory(Path("/"), _meminfo_available())


def gpu_memory() -> int | None:
    """Return the memory of the first NVIDIA GPU in bytes, as nvidia-smi reports it; None without a GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return int(done.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether torch computes bfloat16 on this CPU without emulating it; True if the CPU's features are unknown.

    That is oneDNN's condition: AVX-512, AVX-NE-CONVERT, or bf16 instructions on Arm.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    features = next((line.split() for line in lines if line.startswith(("flags", "Features"))), None)
    return features is None or not {"avx512bw", "avx_ne_convert", "bf16"}.isdisjoint(features)


@dataclass(frozen=True, slots=True)
class UsableCores:
    """What a process may compute with.

    Attributes:
        cpus: the CPUs it may run on.
        num_cores: the cores that these belong to.
        quota: the CPUs' time that its containers allow it, in CPUs; None for no limit.
    """

    cpus: frozenset[int]
    num_cores: int
    quota: float | None

    @property
    def count(self) -> int:
        """The number of cores it can keep busy; a quota of 1.5 CPUs counts as two: one thread would leave a third."""
        return max(1, math.ceil(min(self.num_cores, math.inf if self.quota is None else self.quota)))

    def __str__(self) -> str:
        quota = "" if self.quota is None else f", a quota of {self.quota:g} CPUs"
        return f"{counted(len(self.cpus), 'CPU')} on {counted(self.num_cores, 'core')}{quota}"


def usable_cores(cpus: frozenset[int] = ALLOWED_CPUS) -> UsableCores:
    """Return which of these CPUs this process may use now, limited by its containers' cpusets and quotas."""
    return cgroup_cores(Path("/"), cpus)


def chosen_cpus(cpu_list: str | None, root: Path = Path("/"), allowed: frozenset[int] = ALLOWED_CPUS) -> frozenset[int]:
    """Return the CPUs of `--cpu-list`, or all that are allowed.

    Args:
        root: folder that holds /proc and /sys.

    Raises:
        ConfigError: the process may not use one of them, or its system does not let it choose.
    """
    if cpu_list is None:
        return allowed
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cpu_list needs Linux: no other system lets a process choose its CPUs")
    chosen, usable = parse_cpus(cpu_list), _cpus_of_cgroups(root, allowed)
    if others := chosen - usable:
        many = f"CPUs {format_cpus(others)} of cpu_list are" if len(others) > 1 else f"CPU {min(others)} of cpu_list is"
        raise ConfigError(f"{many} not among the {len(usable)} that this process may use: {format_cpus(usable)}")
    return chosen


def bind_threads(cpus: frozenset[int]) -> None:
    """Let the threads of this process run on these CPUs only; threads and processes that they start inherit it."""
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cpus)


def default_num_threads(cores: UsableCores | None = None) -> int:
    """`usable_cores`, but no more than the environment variable OMP_NUM_THREADS allows, and the kernels can use."""
    stated = os.environ.get(THREADS_VARIABLE, "").split(",")[0].strip()
    count = min((cores or usable_cores()).count, MOST_THREADS)
    return min(count, int(stated)) if stated.isdecimal() and int(stated) > 0 else count


class FollowedCores:
    """The number of threads to compute with while the limits of running containers change.

    Args:
        read: returns the cores that can be used.
        clock: returns seconds.

    Attributes:
        cores: what was read last.
    """

    INTERVAL = 10.0  # seconds between looks at the limits

    def __init__(
        self, read: Callable[[], UsableCores] = usable_cores, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self.cores, self._read_at = read(), clock()
        self._num_threads = default_num_threads(self.cores)

    def num_threads(self) -> int:
        """Return the number of threads."""
        if (now := self._clock()) - self._read_at >= self.INTERVAL:
            self._read_at = now
            if (cores := self._read()) != self.cores:
                self.cores, self._num_threads = cores, default_num_threads(cores)
                logger.info("limits have changed: %s; computing with %s", cores, counted(self._num_threads, "thread"))
        return self._num_threads


def cgroup_memory(root: Path, available: int) -> int:
    """Return `available` bytes, limited by what is left to each cgroup from this process's up to the root.

    Args:
        root: folder that holds /proc and /sys.
    """
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                # Inactive file pages are reclaimed before an allocation fails.
                used -= min(used, _read_entry(folder / "memory.stat", cache_name))
                available = min(available, max(0, limit - used))
    return available


def cgroup_cores(root: Path, allowed: frozenset[int]) -> UsableCores:
    """Return which of the `allowed` CPUs the cgroups from this process's up to the root let it use, and how much.

    CPUs of one core (SMT, hyper-threading) share its arithmetic units, caches and path to memory: one thread uses them
    up.

    Args:
        root: folder that holds /proc and /sys.
    """
    cpus = _cpus_of_cgroups(root, allowed)
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return UsableCores(cpus, num_cores(cpus, root), min(quotas, default=None))


def numa_nodes(root: Path = Path("/"), allowed: frozenset[int] = ALLOWED_CPUS) -> list[frozenset[int]]:
    """Return the CPUs of each NUMA node that this process may use, of those with memory; one node if none is known."""
    cpus, folder = _cpus_of_cgroups(root, allowed), root / "sys/devices/system/node"
    nodes = [cpus & _read_cpus(folder / f"node{node}/cpulist") for node in sorted(_read_cpus(folder / "has_memory"))]
    return [node for node in nodes if node] or [cpus]


def rank_cpus(nodes: list[frozenset[int]], num_ranks: int) -> list[frozenset[int]]:
    """Return the CPUs of each rank, so that its memory is near: equally many ranks a node, or nodes a rank.

    If neither divides the other, or there is one node, each rank may use all CPUs.
    """
    count = len(nodes)
    if num_ranks % count == 0:
        return [nodes[rank * count // num_ranks] for rank in range(num_ranks)]
    share = count // num_ranks if count % num_ranks == 0 else 0
    return [frozenset().union(*(nodes[rank * share : (rank + 1) * share] or nodes)) for rank in range(num_ranks)]


def _cpus_of_cgroups(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    cpus = allowed
    for folder in _cgroup_folders(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if found := _read_cpus(folder / name):
                cpus = cpus & found or cpus
                break
    return cpus


@functools.lru_cache(maxsize=80)  # a large machine has hundreds of files to read
def num_cores(cpus: frozenset[int], root: Path = Path("/")) -> int:
    """Return how many cores the CPUs belong to; one whose core is not known counts as a core."""
    folder = root / "sys/devices/system/cpu"
    return len({_read_cpus(folder / f"cpu{cpu}/topology/thread_siblings_list") or frozenset({cpu}) for cpu in cpus})


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Return the folders of the cgroups that may limit this process, its own first and the outermost last.

    /proc/self/cgroup has a line for each hierarchy, `number:controllers:path`; that of version 2 is "0::path". Inside a
    container the path may be the host's, while /sys/fs/cgroup has the container's own cgroup as its root: missing
    folders are skipped.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            top = mounted / controllers if (mounted / controllers).is_dir() else mounted / controller
        elif number == "0" and not controllers:
            top = mounted / "unified" if (mounted / "unified").is_dir() else mounted
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for length in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:length])
            if folder.is_dir():
                yield folder


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPU quota of a cgroup, or None: `cpu.max` of version 2, the cfs quota of version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        v1_quota, v1_period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
        return v1_quota / v1_period if v1_quota and v1_period else None


def _read_cpus(path: Path) -> frozenset[int]:
    """Parse a list of CPUs such as "0-3,8" from a file; empty if the file is missing or empty."""
    try:
        return parse_cpus(path.read_text())
    except (OSError, ValueError):
        return frozenset()


def _read_entry(path: Path, name: str) -> int:
    """Return the number after a name in a file of "name number" lines; 0 if there is none."""
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        return int(entries.get(name, 0))
    except (OSError, ValueError):
        return 0


def limited_memory(available: int) -> int:
    """Return `available`, limited by the environment variable OCTAVO_MEMORY_LIMIT ("2GiB").

    Raises:
        ConfigError: the variable is not a number of bytes.
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


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file, or no limit ("max" or -1)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
