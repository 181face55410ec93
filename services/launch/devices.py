"""Which devices this node has, told without importing torch.

The stage worker and the launcher need only kinds and counts; the rank process
asks its platform for the rest.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from services.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """How a kind of device shows itself on a Linux node."""

    name: str
    visible_env: str
    """Comma-separated indices, as the vendor's runtime reads it."""
    node_pattern: str
    """Files in /dev, one for each device."""


KINDS = (
    DeviceKind("npu", "ASCEND_RT_VISIBLE_DEVICES", r"davinci\d+"),
    DeviceKind("cuda", "CUDA_VISIBLE_DEVICES", r"nvidia\d+"),
)


SIMULATED = "sim"
SIMULATED_DEVICES = 64
"""Of a node: enough for any layout. They cost a process each."""


def present_devices(kind: DeviceKind, dev: Path = Path("/dev")) -> int:
    """Devices of a kind that this node has, also those that the environment hides."""
    return sum(1 for entry in dev.iterdir() if re.fullmatch(kind.node_pattern, entry.name))


def count_devices(kind: DeviceKind, dev: Path = Path("/dev")) -> int:
    """Devices of a kind that this process may use."""
    present = present_devices(kind, dev)
    visible = os.environ.get(kind.visible_env)
    if visible is None:
        return present
    return min(present, len([index for index in visible.split(",") if index.strip()]))


def resolve_device(
    asked: str, cpu_devices: int | None = None, dev: Path = Path("/dev")
) -> tuple[str, int]:
    """The kind to use and how many there are. A CPU counts as many devices as it has cores,
    or `cpu_devices` where that is given: there a device is only a process.

    "auto" takes an accelerator when one is there. Raises `ConfigError` when a
    kind is asked for that this node does not have.
    """
    if asked == SIMULATED:
        return SIMULATED, cpu_devices or SIMULATED_DEVICES
    for kind in KINDS:
        if asked not in ("auto", kind.name):
            continue
        count = count_devices(kind, dev)
        if count:
            return kind.name, count
        if asked == kind.name:
            raise ConfigError(
                f"--device {asked}: no {asked} device is visible on this node "
                f"(/dev has none, or {kind.visible_env} hides them). Use --device cpu, or check "
                "the driver",
                param="--device",
            )
    return "cpu", cpu_devices or os.cpu_count() or 1


def threads_per_rank(num_ranks_on_node: int) -> int:
    """Threads for each rank's operators, so that ranks do not fight for cores."""
    return max(1, (os.cpu_count() or 1) // num_ranks_on_node)
