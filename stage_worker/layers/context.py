"""What every layer of a rank shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stage_worker.layers.operators import Operators
from stage_worker.layers.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Device, element type and group of one rank, and the platform's choices."""

    device: torch.device
    dtype: torch.dtype
    tensor_parallel: TensorParallel
    operators: Operators
    """The device's own, or torch's."""
