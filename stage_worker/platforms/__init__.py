"""The only place that asks "which device?"."""

from __future__ import annotations

from services.errors import ConfigError
from stage_worker.platforms.base import Platform
from stage_worker.platforms.cpu import CpuPlatform
from stage_worker.platforms.cuda import CudaPlatform, cuda_is_available
from stage_worker.platforms.npu import NpuPlatform, npu_is_available, npu_is_installed
from stage_worker.platforms.sim import SimulatedPlatform

DEVICES = ("auto", "cpu", "npu", "cuda", "sim")

__all__ = ["DEVICES", "Platform", "select_platform"]


def select_platform(device: str) -> Platform:
    """The platform for `--device`: "auto" takes an NPU, else a GPU, else the CPU.

    Raises `ConfigError` for an unknown name or a device that is not there.
    """
    if device not in DEVICES:
        raise ConfigError(
            f'device "{device}" is not known; use one of {", ".join(DEVICES)}', param="device"
        )
    if device == "sim":
        return SimulatedPlatform()
    if device in ("auto", "npu") and npu_is_available():
        return NpuPlatform()
    if device in ("auto", "cuda") and cuda_is_available():
        return CudaPlatform()
    if device == "npu":
        cause = (
            "torch_npu is installed but sees no NPU: check `npu-smi info` and that CANN's "
            "set_env.sh is sourced"
            if npu_is_installed()
            else "torch_npu is not installed: install the extra [npu]"
        )
        raise ConfigError(f"device npu was asked for, but {cause}; or use cpu", param="device")
    if device == "cuda":
        raise ConfigError(
            "device cuda was asked for, but this torch build sees no CUDA device; "
            "install a CUDA build of torch and check `nvidia-smi`, or use cpu",
            param="device",
        )
    return CpuPlatform()
