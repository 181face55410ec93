"""Facts of nodes that no test has to run on."""

from __future__ import annotations

from services.doctor.facts import DiskFacts, LimitFacts, NodeFacts
from services.software import Version

GIB = 1 << 30
INSTALLED = (
    Version("stagemesh", "0.1.0"),
    Version("python", "3.11.9"),
    Version("torch", "2.13.0+cpu"),
    Version("safetensors", "0.8.0"),
    Version("tokenizers", "0.23.3"),
)


def node(
    versions: tuple[Version, ...] = INSTALLED,
    limits: LimitFacts | None = None,
    shared_memory_bytes: int | None = 24 * GIB,
    disk_free_bytes: int = 74 * GIB,
) -> NodeFacts:
    """A node where nothing is wrong, but for what is given."""
    return NodeFacts(
        host="node-a",
        cores=16,
        memory_bytes=64 * GIB,
        available_memory_bytes=48 * GIB,
        shared_memory_bytes=shared_memory_bytes,
        limits=limits or LimitFacts(65_536, 1_048_576, None),
        disks=(DiskFacts("/tmp", "temporary files", disk_free_bytes),),
        versions=versions,
    )
