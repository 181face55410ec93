"""NVIDIA GPUs."""

from __future__ import annotations

import torch

from stage_worker.platforms.accelerator import AcceleratorPlatform


class CudaPlatform(AcceleratorPlatform):
    """CUDA with NCCL."""

    name = "cuda"
    collective_backend = "nccl"


def cuda_is_available() -> bool:
    """Whether this torch build sees a CUDA device."""
    return torch.cuda.is_available()
