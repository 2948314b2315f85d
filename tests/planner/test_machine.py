"""What containers allow a process: cgroups of both versions, as trees of files."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import MOST_THREADS, EngineConfig
from octavo.errors import ConfigError
from octavo.planner import machine
from octavo.planner.machine import (
    FollowedCores,
    UsableCores,
    cgroup_cores,
    cgroup_memory,
    chosen_cpus,
    computes_bf16,
    default_num_threads,
    numa_nodes,
    rank_cpus,
    usable_cores,
)
from octavo.units import format_cpus, parse_cpus

EIGHT = frozenset(range(8))
GIB = 1 << 30
NODES = {"has_memory": "0-1", "node0/cpulist": "0-1,4-5", "node1/cpulist": "2-3,6-7"}


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def v2(root: Path, own: str, files: Mapping[str, object]) -> Path:
    """A tree of version 2 alone, this process in `own`."""
    write(root, {"proc/self/cgroup": f"0::{own}"})
    (root / f"sys/fs/cgroup{own}").mkdir(parents=True, exist_ok=True)
    return write(root, {f"sys/fs/cgroup/{name}": content for name, content in files.items()})


def v1(root: Path, own: str, files: Mapping[str, object]) -> Path:
    """A tree of version 1, with "cpu" and "cpuacct" in one hierarchy as usual, this process in `own` of each."""
    lines = [f"4:memory:{own}", f"3:cpuset:{own}", f"2:cpu,cpuacct:{own}", "1:name=systemd:/", "0::/"]
    write(root, {"proc/self/cgroup": "\n".join(lines)})
    return write(root, {f"sys/fs/cgroup/{name}": content for name, content in files.items()})


def num_cores(root: Path, allowed: frozenset[int]) -> int:
    return cgroup_cores(root, allowed).count


def test_without_cgroups_everything_is_allowed(tmp_path: Path) -> None:
    assert num_cores(tmp_path, EIGHT) == 8
    assert cgroup_memory(tmp_path, 5 * GIB) == 5 * GIB


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("", 8)]
)
def test_a_quota_of_version_2_limits_the_cpus(tmp_path: Path, quota: str, cpus: int) -> None:
    assert num_cores(v2(tmp_path, "/", {"cpu.max": quota}), EIGHT) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [(-1, 8), (300000, 3), (20000, 1)])
def test_a_quota_of_version_1_limits_the_cpus(tmp_path: Path, quota: int, cpus: int) -> None:
    files = {"cpu,cpuacct/box/cpu.cfs_quota_us": quota, "cpu,cpuacct/box/cpu.cfs_period_us": 100000}
    assert num_cores(v1(tmp_path, "/box", files), EIGHT) == cpus


def test_the_least_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "600000 100000"}
    assert num_cores(v2(tmp_path, "/a/b/c", files), EIGHT) == 3
    limits: dict[str, object] = {
        "a/memory.max": 4 * GIB,
        "a/memory.current": 3 * GIB,
        "a/b/memory.max": "max",
        "a/b/memory.current": 0,
        "a/b/c/memory.max": 2 * GIB,
        "a/b/c/memory.current": 0,
    }
    assert cgroup_memory(v2(tmp_path, "/a/b/c", limits), 16 * GIB) == GIB


def test_cpusets_of_both_versions_limit_the_cpus(tmp_path: Path) -> None:
    second = v2(tmp_path / "v2", "/box", {"cpuset.cpus.effective": "0-7", "box/cpuset.cpus.effective": "0-1,5"})
    assert num_cores(second, EIGHT) == 3
    first = v1(tmp_path / "v1", "/box", {"cpuset/cpuset.cpus": "0-15", "cpuset/box/cpuset.cpus": "2-3"})
    assert num_cores(first, EIGHT) == 2
    assert num_cores(first, frozenset({3, 4})) == 1, "and the affinity"


def test_numa_nodes_are_those_with_memory_and_allowed_cpus(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path, EIGHT) == [EIGHT], "nothing is known"
    lists = {"has_memory": "0-1,3-4", "node0/cpulist": "0-1", "node1/cpulist": "2-3", "node2/cpulist": "4-5"}
    lists |= {"node3/cpulist": "", "node4/cpulist": "6-9"}  # node 2 has no memory, node 3 no CPUs
    write(tmp_path, {f"sys/devices/system/node/{name}": content for name, content in lists.items()})
    assert numa_nodes(tmp_path, EIGHT) == [{0, 1}, {2, 3}, {6, 7}]
    assert numa_nodes(v2(tmp_path, "/", {"cpuset.cpus.effective": "2-7"}), EIGHT) == [{2, 3}, {6, 7}]


@pytest.mark.parametrize(
    ("num_nodes", "cpus"),
    [(1, ["01234567"] * 2), (2, ["0123", "4567"]), (4, ["0123", "4567"]), (3, ["01234567"] * 2)],
)
def test_ranks_run_on_their_nodes(num_nodes: int, cpus: list[str]) -> None:
    nodes = [frozenset(range(node * 8 // num_nodes, (node + 1) * 8 // num_nodes)) for node in range(num_nodes)]
    assert rank_cpus(nodes, 2) == [set(map(int, each)) for each in cpus]
    assert rank_cpus(nodes, 2 * num_nodes) == [node for node in nodes for _ in range(2)]


def test_cpu_list_chooses_among_the_cpus_of_a_cpuset_whose_nodes_and_quota_still_count(tmp_path: Path) -> None:
    root = v2(with_siblings(tmp_path, "0,4", "1,5", "2,6", "3,7"), "/", {"cpuset.cpus.effective": "0-6"})
    write(root, {f"sys/devices/system/node/{name}": at for name, at in NODES.items()})
    cpus = chosen_cpus("0,4,2-3", root, EIGHT)
    assert cgroup_cores(root, cpus) == UsableCores(frozenset({0, 2, 3, 4}), 3, None)
    assert numa_nodes(root, cpus) == [{0, 4}, {2, 3}]
    v2(root, "/", {"cpu.max": "150000 100000"})
    assert cgroup_cores(root, cpus).count == 2
    assert chosen_cpus(None, root, EIGHT) == EIGHT
    with pytest.raises(ConfigError, match=r"CPU 7 of cpu_list is not among the 7 that this process may use: 0-6"):
        chosen_cpus("0-3,7", root, EIGHT)
    with pytest.raises(ConfigError, match=r"CPUs 7-8,70 of cpu_list are not among the 6 that .* use: 0-2,4-6"):
        chosen_cpus("7-8,70", root, EIGHT - {3})


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "-1", "1,,2", "0-65536", "0-99999999999"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cpu_list must be numbers of CPUs and ranges, such as 0-15,32-47, got"):
        EngineConfig(cpu_list=text)


@given(cpus=st.frozensets(st.integers(0, 300), min_size=1))
def test_a_list_of_cpus_is_read_as_it_is_written(cpus: frozenset[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize(("limit", "available"), [(3 * GIB, GIB), (9223372036854771712, 16 * GIB), (GIB, 0)])
def test_limits_of_version_1_are_seen(tmp_path: Path, limit: int, available: int) -> None:
    files = {"memory/box/memory.limit_in_bytes": limit, "memory/box/memory.usage_in_bytes": 2 * GIB}
    assert cgroup_memory(v1(tmp_path, "/box", files), 16 * GIB) == available


def test_idle_cached_files_count_as_available(tmp_path: Path) -> None:
    files = {"memory.max": 4 * GIB, "memory.current": 4 * GIB, "memory.stat": f"anon 5\ninactive_file {3 * GIB}"}
    assert cgroup_memory(v2(tmp_path, "/", files), 16 * GIB) == 3 * GIB


def test_a_path_of_the_host_that_the_container_does_not_see_leads_to_its_root(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/kubepods/pod7/box", "sys/fs/cgroup/cpu.max": "250000 100000"})
    assert num_cores(tmp_path, EIGHT) == 3


def test_damaged_files_limit_nothing(tmp_path: Path) -> None:
    files = {"cpu.max": "lots of", "cpuset.cpus.effective": "0-", "memory.max": "much", "memory.current": "little"}
    root = v2(tmp_path, "/", files)
    assert (num_cores(root, EIGHT), cgroup_memory(root, GIB)) == (8, GIB)


def test_bf16_is_computed_where_torch_does_not_emulate_it(tmp_path: Path) -> None:
    assert computes_bf16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    (cpuinfo := tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f avx512bw\n")
    assert computes_bf16(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags : fpu avx2\n")
    assert not computes_bf16(cpuinfo)


def with_siblings(root: Path, *cores: str) -> Path:
    """Adds the topology of CPUs, each core given as the list of its CPUs: "0,4"."""
    topology = {cpu: core for core in cores for cpu in core.split(",")}
    return write(
        root, {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": at for n, at in topology.items()}
    )


def test_cpus_of_one_core_count_once(tmp_path: Path) -> None:
    root = with_siblings(tmp_path, "0,4", "1,5", "2,6", "3,7")
    assert num_cores(root, EIGHT) == 4
    assert num_cores(root, frozenset({0, 1, 4, 5})) == 2
    assert num_cores(root, frozenset({4, 5, 6})) == 3
    assert num_cores(v2(root, "/", {"cpu.max": "800000 100000"}), EIGHT) == 4
    assert num_cores(v2(root, "/", {"cpu.max": "300000 100000"}), EIGHT) == 3
    assert num_cores(v2(root, "/", {"cpu.max": "max 1", "cpuset.cpus.effective": "0,4-5"}), EIGHT) == 2


def test_a_cpu_whose_core_is_not_known_counts_as_one(tmp_path: Path) -> None:
    root = with_siblings(tmp_path, "0,4", "1,5")
    assert num_cores(root, EIGHT) == 6
    write(root, {"sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "-"})
    assert num_cores(root, frozenset({0, 1, 5})) == 2


def test_cpus_that_are_offline_do_not_count(tmp_path: Path) -> None:
    """A cpuset of version 1 may name CPUs that are offline, which no affinity mask has, and which have no topology."""
    root = with_siblings(tmp_path, "0,4", "1", "2,6")
    v1(root, "/box", {"cpuset/box/cpuset.cpus": "0-7"})
    assert cgroup_cores(root, EIGHT - {3, 5, 7}) == UsableCores(EIGHT - {3, 5, 7}, 3, None)


def test_a_cpuset_of_odd_cores_and_a_quota_are_said_together(tmp_path: Path) -> None:
    root = v2(with_siblings(tmp_path, "0,4", "1,5", "2,6", "3,7"), "/", {"cpuset.cpus.effective": "1,3,5,7"})
    assert str(cgroup_cores(root, EIGHT)) == "4 CPUs on 2 cores"
    v2(root, "/", {"cpu.max": "150000 100000"})
    assert str(cgroup_cores(root, EIGHT)) == "4 CPUs on 2 cores, a quota of 1.5 CPUs"


def test_limits_that_change_are_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    caplog.set_level(logging.INFO)
    root, now = v2(tmp_path, "/", {"cpu.max": "600000 100000"}), [0.0]
    cores = FollowedCores(lambda: cgroup_cores(root, EIGHT), lambda: now[0])
    assert cores.num_threads() == 6
    v2(root, "/", {"cpu.max": "150000 100000"})
    assert cores.num_threads() == 6, "not looked at yet"
    now[0] = 10.0
    assert cores.num_threads() == 2
    assert "8 CPUs on 8 cores, a quota of 1.5 CPUs; computing with 2 threads" in caplog.text
    v2(root, "/", {"cpu.max": "max 100000", "cpuset.cpus.effective": "0-2"})
    now[0] = 20.0
    assert cores.num_threads() == 3


@pytest.mark.parametrize(("stated", "threads"), [("1", 1), ("3,2", 3), ("64", 8), ("", 8), ("0", 8), ("all", 8)])
def test_omp_num_threads_is_respected(monkeypatch: pytest.MonkeyPatch, stated: str, threads: int) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: UsableCores(EIGHT, 8, None))
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert default_num_threads() == threads


def test_no_more_threads_than_the_kernels_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: UsableCores(EIGHT, 1536, None))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert EngineConfig(num_threads=default_num_threads()).num_threads == MOST_THREADS


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores().count <= (os.cpu_count() or 1)
