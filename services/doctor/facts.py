"""What a doctor knows of a node: plain data, gathered by `services.doctor.gather`.

Field names are the keys of `facts` in `stagemesh doctor --json`. None means "not known here".
"""

from __future__ import annotations

from dataclasses import dataclass

from services.software import Version


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Room on the file system of one directory."""

    path: str
    purpose: str
    """What the directory is for, in words."""
    free_bytes: int


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Resource limits of this process (setrlimit(2)). None is unlimited."""

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as the process that serves on it would see it."""

    host: str
    cores: int
    memory_bytes: int | None
    available_memory_bytes: int | None
    """Also within the limit of a container."""
    shared_memory_bytes: int | None
    """Size of /dev/shm, through which ranks of one node exchange tensors."""
    limits: LimitFacts
    disks: tuple[DiskFacts, ...]
    versions: tuple[Version, ...]

    def version(self, name: str) -> str | None:
        """The version of one piece of software; None where it is not installed."""
        return next((v.version for v in self.versions if v.name == name), None)


@dataclass(frozen=True, slots=True)
class PortFacts:
    """One port that `serve` would listen on."""

    flag: str
    """What chooses it: "--port"."""
    host: str
    port: int
    error: int | None
    """errno of the attempt to bind it; None where it can be had."""
