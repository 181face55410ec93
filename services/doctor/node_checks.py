"""Is this node fit to serve? Facts in, findings out; nothing here looks at the node itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from services.config import ServeConfig
from services.doctor.facts import DiskFacts, LimitFacts, NodeFacts, PortFacts
from services.doctor.findings import Check, Finding, failed, ok, warning
from services.rpc.addresses import host_flag, join_host_port
from services.text import shown
from services.units import human_bytes

NEEDED_OPEN_FILES = 4096
"""1024 requests over each front door, each on a connection of its own, and the mesh beside."""
WANTED_OPEN_FILES = 65_536
NEEDED_DISK_BYTES = 1 << 30
"""For the sockets, logs and caches of libraries; models are counted by those who fetch them."""
NEEDED_SHARED_MEMORY_BYTES = 1 << 30
"""What collective libraries take for the ranks of a node; containers have 64 MiB by default."""


def check_versions(node: NodeFacts, config: ServeConfig, device: str) -> Iterator[Finding]:
    """What this node's part of the mesh needs is installed, and fits together."""
    needed = {"torch": "worker", "safetensors": "worker"}
    if not config.headless:
        needed["tokenizers"] = "gateway"
    if device == "npu":
        needed["torch-npu"] = "npu"
    missing = {name: extra for name, extra in needed.items() if node.version(name) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        yield failed(
            Check.VERSIONS,
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here",
            f"pip install 'stagemesh-server[{extras}]'",
        )
    torch, torch_npu = node.version("torch"), node.version("torch-npu")
    if torch is not None and torch_npu is not None and _release(torch) != _release(torch_npu):
        yield failed(
            Check.VERSIONS,
            f"torch is {torch} and torch-npu is {torch_npu}: torch-npu is built for one torch",
            f"pip install torch=={_release(torch_npu)}, or the torch-npu of torch {torch}",
        )
    if device == "npu" and node.version("cann") is None:
        yield warning(
            Check.VERSIONS,
            "CANN's version was not found: neither ASCEND_TOOLKIT_HOME nor /usr/local/Ascend has "
            "a toolkit",
            "source the set_env.sh of CANN in the shell that serves",
        )
    if not missing:
        yield ok(Check.VERSIONS, ", ".join(f"{v.name} {v.version}" for v in node.versions))


def _release(version: str) -> str:
    """ "2.13.0" of "2.13.0+cpu" and of "2.13.0.post1"."""
    return ".".join(version.partition("+")[0].split(".")[:3])


def check_ports(
    ports: Sequence[PortFacts], *, own_mesh_runs: bool, answering: str | None = None
) -> Iterator[Finding]:
    """Every port that `serve` would listen on can be had. Where this node's mesh runs already,
    it is that mesh which has them. `answering` says who answers at --master-port, if anybody:
    who is asked there has it rightly, on whichever node."""
    if not ports:
        yield ok(Check.PORTS, "a headless node takes free ports only")
    free = []
    for port in ports:
        address = join_host_port(port.host, port.port)
        if answering is not None and port.flag == "--master-port":
            yield ok(
                Check.PORTS,
                f"{address} ({port.flag}) is in use by {answering} that answers there",
            )
        elif port.error is None:
            free.append(f"{address} ({port.flag})")
        elif port.error == errno.EADDRINUSE and own_mesh_runs:
            yield ok(Check.PORTS, f"{address} ({port.flag}) is in use; the mesh of this node runs")
        elif port.error == errno.EADDRINUSE:
            yield failed(
                Check.PORTS,
                f"{address} ({port.flag}) is in use by another process",
                f"choose another with {port.flag}, or end what listens there (ss -ltnp names it)",
            )
        elif port.error in (errno.EADDRNOTAVAIL, errno.ENODEV):
            flag = host_flag(port.flag)
            yield failed(
                Check.PORTS,
                f"{shown(port.host)} ({flag}) is no address of this machine",
                f"give {flag} an address that `ip address` shows here",
            )
        else:
            yield failed(
                Check.PORTS,
                f"{address} ({port.flag}) cannot be had: {os.strerror(port.error)}",
                f"choose another with {port.flag}",
            )
    if free:
        yield ok(Check.PORTS, f"{', '.join(free)} can be had")


def check_limits(limits: LimitFacts, *, device: str, config: ServeConfig) -> Iterator[Finding]:
    """Open files for a gateway's connections, locked memory for RDMA."""
    open_files = limits.open_files
    complaints = list(_limit_complaints(limits, device, config))
    yield from complaints
    if not complaints:
        shown = "unlimited" if open_files is None else str(open_files)
        locked = "unlimited" if limits.locked_bytes is None else human_bytes(limits.locked_bytes)
        yield ok(Check.LIMITS, f"open files {shown}, locked memory {locked}")


def _limit_complaints(limits: LimitFacts, device: str, config: ServeConfig) -> Iterator[Finding]:
    soft, hard = limits.open_files, limits.open_files_hard
    if soft is not None and soft < NEEDED_OPEN_FILES:
        if hard is None or hard >= NEEDED_OPEN_FILES:
            how = f"ulimit -n {WANTED_OPEN_FILES if hard is None else min(hard, WANTED_OPEN_FILES)}"
        else:
            how = f"raise the hard limit, which is {hard} (LimitNOFILE= of a systemd unit)"
        yield warning(
            Check.LIMITS,
            f"a process may open {soft} files, and a busy gateway needs {NEEDED_OPEN_FILES}",
            how,
        )
    if device == "npu" and config.nnodes > 1 and limits.locked_bytes is not None:
        yield warning(
            Check.LIMITS,
            f"a process may lock {human_bytes(limits.locked_bytes)} of memory, and RDMA between "
            "nodes locks its buffers",
            "ulimit -l unlimited (LimitMEMLOCK=infinity of a systemd unit)",
        )


def check_disk(disks: Sequence[DiskFacts]) -> Iterator[Finding]:
    """Room for what a mesh writes."""
    full = [disk for disk in disks if disk.free_bytes < NEEDED_DISK_BYTES]
    for disk in full:
        yield warning(
            Check.DISK,
            f"{disk.path} ({disk.purpose}) has {human_bytes(disk.free_bytes)} free",
            f"make room: at least {human_bytes(NEEDED_DISK_BYTES)}",
        )
    if not full:
        yield ok(
            Check.DISK, ", ".join(f"{d.path} has {human_bytes(d.free_bytes)} free" for d in disks)
        )


def check_shared_memory(node: NodeFacts, *, device: str, num_ranks: int) -> Iterator[Finding]:
    """Only collective libraries of accelerators need much of it."""
    size = node.shared_memory_bytes
    if size is None:
        return
    if device != "cpu" and num_ranks > 1 and size < NEEDED_SHARED_MEMORY_BYTES:
        yield warning(
            Check.SHARED_MEMORY,
            f"/dev/shm has {human_bytes(size)}, through which {num_ranks} ranks of this node "
            "exchange tensors",
            f"give the container at least {human_bytes(NEEDED_SHARED_MEMORY_BYTES)} "
            "(--shm-size=1g, or --ipc=host)",
        )
    else:
        yield ok(Check.SHARED_MEMORY, f"/dev/shm has {human_bytes(size)}")
