"""Looks at this node. Reads files and asks the kernel; every path can be another in a test."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from services.config import DEFAULT_MASTER_PORT, ServeConfig
from services.doctor.facts import DiskFacts, LimitFacts, NodeFacts, PortFacts
from services.doctor.kv_transfer_check import KV_PORT_FLAG, ports_of_node
from services.errors import UsageError
from services.launch.memory import host_memory
from services.models.cache import models_directory
from services.ranges import MAX_PORT
from services.rpc.addresses import resolve
from services.software import installed_versions
from services.topology.kv_transfer import KvTransferConfig

MASTER_PORT_FLAG = "--master-port"


def gather_node(root: Path = Path("/")) -> NodeFacts:
    """Everything about this node that needs no configuration. `root` is for tests."""
    memory = host_memory(root)
    return NodeFacts(
        host=socket.gethostname(),
        cores=os.cpu_count() or 1,
        memory_bytes=memory.total_bytes if memory else None,
        available_memory_bytes=memory.available_bytes if memory else None,
        shared_memory_bytes=_size_of(root / "dev/shm"),
        limits=limits(),
        disks=disks(root),
        versions=tuple(installed_versions(root)),
    )


def limits() -> LimitFacts:
    """Of this process; `serve` started from the same shell has the same."""

    def known(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LimitFacts(known(soft), known(hard), known(locked))


def disks(root: Path = Path("/")) -> tuple[DiskFacts, ...]:
    """Where models and sockets go."""
    places = ((models_directory(), "models"), (root / "tmp", "temporary files"))
    return tuple(
        DiskFacts(str(path), purpose, shutil.disk_usage(_existing(path)).free)
        for path, purpose in places
    )


def gather_ports(config: ServeConfig) -> tuple[PortFacts, ...]:
    """Tries every port that this node's `serve` would listen on; a headless node has none.

    Without a model somebody may look at a mesh elsewhere: then its address need not be ours.
    """
    if config.headless or config.node_rank > 0:
        return ()
    wanted = [("--port", config.host, config.port), ("--grpc-port", config.host, config.grpc_port)]
    if config.master_port is not None or config.nnodes > 1:
        port = DEFAULT_MASTER_PORT if config.master_port is None else config.master_port
        wanted.append((MASTER_PORT_FLAG, config.master_addr, port))
    found = tuple(PortFacts(*one, bind_error(one[1], one[2])) for one in wanted)
    if config.model:
        return found
    return tuple(
        port for port in found if (port.flag, port.error) != (MASTER_PORT_FLAG, errno.EADDRNOTAVAIL)
    )


def gather_kv_ports(config: ServeConfig, transfer: KvTransferConfig) -> tuple[PortFacts, ...]:
    """Tries the ports on which this node's ranks would wait for the other side."""
    ports = [port for port in ports_of_node(config, transfer) if port <= MAX_PORT]
    return tuple(
        PortFacts(KV_PORT_FLAG, config.host, port, bind_error(config.host, port)) for port in ports
    )


def bind_error(host: str, port: int) -> int | None:
    """errno of binding host:port, as a server of ours would; None where it works.

    Nobody keeps the port: between this look and a start somebody else may take it.
    """
    try:
        family, kind, protocol, address = resolve(host, port, flag="--host", passive=True)[0]
    except UsageError:
        return errno.EADDRNOTAVAIL
    with socket.socket(family, kind, protocol) as probe:
        # As servers do it: connections of the last start that linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EADDRINUSE
    return None


def unreadable(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The files that this user may not read."""
    return tuple(path for path in paths if not os.access(path, os.R_OK))


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _size_of(directory: Path) -> int | None:
    return shutil.disk_usage(directory).total if directory.is_dir() else None
