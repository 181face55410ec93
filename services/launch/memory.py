"""How much memory this host can still give, told without torch.

A process in a control group (a container, a systemd service) gets no more than its group's limit,
whatever the machine has, so the limits of all groups above it count.
Sources: proc(5); https://docs.kernel.org/admin-guide/cgroup-v2.html (memory interface files) and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from services.files import read_text


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine, within the limits of this process."""

    total_bytes: int
    available_bytes: int
    """What can be taken without swapping; page cache that can be dropped counts."""


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a version of control groups keeps what."""

    mount: str
    limit: str
    usage: str
    droppable: str
    """Name in `memory.stat` of page cache that can be dropped first."""


_V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """From /proc/meminfo and the control groups; None where there is no /proc."""
    kilobytes = _numbers(root / "proc/meminfo")
    if "MemTotal" not in kilobytes:
        return None
    total = kilobytes["MemTotal"] * 1024
    available = kilobytes.get("MemAvailable", kilobytes.get("MemFree", 0)) * 1024
    for limit, used in _group_limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use that cannot be dropped) of this process's groups and those above them."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version = _V1
        elif hierarchy == "0" and not controllers:
            version = _V2
        else:
            continue
        # In a namespace of its own a group's path may lead above what is mounted.
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        mount = root / version.mount
        for depth in range(len(parts) + 1):
            group = mount.joinpath(*parts[:depth])
            limit, usage = _number(group / version.limit), _number(group / version.usage)
            if limit is not None and usage is not None:
                droppable = _numbers(group / "memory.stat").get(version.droppable, 0)
                yield limit, max(0, usage - droppable)


def _numbers(path: Path) -> dict[str, int]:
    """The lines "name number" or "name: number unit" of a file."""
    words = (line.replace(":", " ").split() for line in read_text(path).splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _number(path: Path) -> int | None:
    """What stands in the file, where that is a number (a limit may be "max")."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
