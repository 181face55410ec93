"""Ascend NPUs. `torch_npu` is imported here, lazily, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from stage_worker.platforms.accelerator import AcceleratorPlatform


class NpuPlatform(AcceleratorPlatform):
    """Ascend with HCCL. Make one only where `npu_is_available`."""

    name = "npu"
    collective_backend = "hccl"


def npu_is_installed() -> bool:
    """Whether `torch_npu` is there, without importing it."""
    return importlib.util.find_spec("torch_npu") is not None


def npu_is_available() -> bool:
    """Imports `torch_npu` where it is installed, and asks it for a device."""
    if not npu_is_installed():
        return False
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError):
        # Installed without the CANN libraries that it loads.
        return False
    return bool(torch.get_device_module("npu").is_available())
