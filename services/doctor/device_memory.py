"""Free memory of accelerators, told without torch: by the vendor's own command, where there is one.

The two output formats are taken from the vendors' documentation and tried on recorded
output; where a command is missing or says something else, the memory is simply not known.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable

from services.launch.devices import KINDS
from services.topology.fit import DeviceMemory

COMMAND_TIMEOUT_SECONDS = 10.0
_MIB = 1 << 20
Run = Callable[[tuple[str, ...]], str | None]
"""Runs a command and returns its output; None where it is missing or fails."""


def run_command(command: tuple[str, ...]) -> str | None:
    """See `Run`."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def device_memory(
    kind: str, num_devices: int, run: Run = run_command
) -> tuple[DeviceMemory, ...] | None:
    """Memory of every visible device, in the order in which ranks count them."""
    numbers = _visible(kind, num_devices)
    if numbers is None:
        return None
    if kind == "cuda":
        found = [_nvidia(number, run) for number in numbers]
    elif kind == "npu":
        found = [_ascend(number, run) for number in numbers]
    else:
        return None
    known = tuple(memory for memory in found if memory is not None)
    return known if len(known) == len(numbers) else None


def _visible(kind: str, num_devices: int) -> list[int] | None:
    """The vendor's numbers of the visible devices; None where the list has names (UUIDs)."""
    variable = next((k.visible_env for k in KINDS if k.name == kind), None)
    value = os.environ.get(variable) if variable else None
    if value is None:
        return list(range(num_devices))
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    if not all(entry.isdecimal() for entry in entries):
        return None
    return [int(entry) for entry in entries][:num_devices]


def _nvidia(number: int, run: Run) -> DeviceMemory | None:
    """nvidia-smi's CSV: "81559, 80994", in MiB."""
    query = ("--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
    output = run(("nvidia-smi", f"--id={number}", *query))
    found = re.fullmatch(r"\s*(\d+),\s*(\d+)\s*", output or "")
    return None if found is None else DeviceMemory(int(found[1]) * _MIB, int(found[2]) * _MIB)


def _ascend(number: int, run: Run) -> DeviceMemory | None:
    """npu-smi's "usages" of one card: capacity in MB and share in use in per cent."""
    output = run(("npu-smi", "info", "-t", "usages", "-i", str(number))) or ""
    capacity = re.search(r"HBM Capacity\(MB\)\s*:\s*(\d+)", output)
    used = re.search(r"HBM Usage Rate\(%\)\s*:\s*(\d+)", output)
    if capacity is None or used is None:
        return None
    total = int(capacity[1]) * _MIB
    return DeviceMemory(total, total * (100 - int(used[1])) // 100)
