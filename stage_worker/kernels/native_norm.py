"""RMS norm by the compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from stage_worker.kernels.library import Library


class NativeRMSNorm:
    """See `layers.norm.RMSNorm`; torch's takes ten times as long for a few rows."""

    __slots__ = ("_function", "eps", "weight")

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        self._function = library.rms_norm
        self.weight = weight.contiguous()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        rows, width = x.shape
        self._function(x.data_ptr(), rows, width, self.weight.data_ptr(), self.eps, y.data_ptr())
        return y

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes
