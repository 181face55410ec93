"""Versions of what runs on this node, read from metadata and files: nothing is imported."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from services.files import read_text
from stagemesh.version import __version__

# What decides what a rank computes, or how two nodes talk.
DISTRIBUTIONS = ("torch", "torch-npu", "grpcio", "protobuf", "safetensors", "tokenizers", "ray")
_ASCEND_ROOT = Path("/usr/local/Ascend")


@dataclass(frozen=True, slots=True)
class Version:
    """One piece of software of a node."""

    name: str
    """A Python distribution, or "python", "cann", "npu driver", "nvidia driver", "kernel"."""
    version: str


def installed_versions(root: Path = Path("/")) -> Iterator[Version]:
    """Every version that is known without importing anything."""
    yield Version("stagemesh", __version__)
    yield Version("python", platform.python_version())
    for name in DISTRIBUTIONS:
        try:
            yield Version(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    yield from _vendor_versions(root)
    yield Version("kernel", platform.release())


def _vendor_versions(root: Path) -> Iterator[Version]:
    """CANN and the NPU's driver from the files of their installers, NVIDIA's from its module."""
    ascend = root / _ASCEND_ROOT.relative_to("/")
    named = os.environ.get("ASCEND_TOOLKIT_HOME")
    homes = [Path(named)] if named else []
    homes += [ascend / "ascend-toolkit/latest", ascend / "cann"]
    # CANN's "File Paths" table: <arch>-linux below the toolkit.
    infos = (info for home in homes for info in home.glob("*-linux/ascend_toolkit_install.info"))
    cann = next(filter(None, (_assigned(info, "version") for info in infos)), None)
    if cann is not None:
        yield Version("cann", cann)
    if (found := _assigned(ascend / "driver/version.info", "Version")) is not None:
        yield Version("npu driver", found)
    module = read_text(root / "proc/driver/nvidia/version")
    if (kernel_module := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", module)) is not None:
        yield Version("nvidia driver", kernel_module[1])


def _assigned(path: Path, name: str) -> str | None:
    """VALUE of a line "NAME=VALUE"."""
    found = re.search(rf"^{name}=(\S+)\s*$", read_text(path), re.MULTILINE)
    return None if found is None else found[1].strip('"')
