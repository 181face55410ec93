"""Free memory of a host, within the limits of the control groups that this process is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launch.memory import HostMemory, host_memory

KIB = 1024
MEMINFO = "MemTotal: 16000 kB\nMemFree: 1000 kB\nMemAvailable: 9000 kB\nHugePages_Total: 0\n"
WHOLE = HostMemory(16000 * KIB, 9000 * KIB)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def test_this_host() -> None:
    memory = host_memory()
    assert memory is not None
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_without_limits_it_is_the_machines(root: Path) -> None:
    assert host_memory(root) == WHOLE
    write(root / "proc/self/cgroup", "0::/user.slice")
    assert host_memory(root) == WHOLE
    write(root / "proc/meminfo", "MemTotal: 16000 kB\nMemFree: 1000 kB\n")
    assert host_memory(root) == HostMemory(16000 * KIB, 1000 * KIB)


def test_no_proc_is_not_known(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None


def test_a_limit_counts_and_droppable_cache_does_not(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/")
    group = root / "sys/fs/cgroup"
    write(group / "memory.max", "max")
    write(group / "memory.current", 3000 * KIB)
    assert host_memory(root) == WHOLE
    write(group / "memory.max", 5000 * KIB)
    assert host_memory(root) == HostMemory(5000 * KIB, 2000 * KIB)
    write(group / "memory.stat", f"anon 1\ninactive_file {1000 * KIB}\nactive_file 7")
    assert host_memory(root) == HostMemory(5000 * KIB, 3000 * KIB)
    write(group / "memory.current", 9000 * KIB)
    assert host_memory(root) == HostMemory(5000 * KIB, 0)


def test_the_limits_of_all_groups_above_count(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/../system.slice/stagemesh.service")
    for name, limit, used in (
        ("system.slice", 4000, 3500),
        ("system.slice/stagemesh.service", 2000, 100),
    ):
        write(root / "sys/fs/cgroup" / name / "memory.max", limit * KIB)
        write(root / "sys/fs/cgroup" / name / "memory.current", used * KIB)
    assert host_memory(root) == HostMemory(2000 * KIB, 500 * KIB)


def test_the_first_version_of_control_groups(root: Path) -> None:
    write(root / "proc/self/cgroup", "12:cpuset:/x\n4:memory,oom:/docker/1\n0::/docker/1")
    group = root / "sys/fs/cgroup/memory/docker/1"
    write(group / "memory.limit_in_bytes", 6000 * KIB)
    write(group / "memory.usage_in_bytes", 2000 * KIB)
    write(group / "memory.stat", f"inactive_file 5\ntotal_inactive_file {500 * KIB}")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root / "sys/fs/cgroup/memory/memory.usage_in_bytes", 1)
    assert host_memory(root) == HostMemory(6000 * KIB, 4500 * KIB)
