"""Root mean square layer normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm(Protocol):
    """[n, hidden] -> [n, hidden]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def num_bytes(self) -> int: ...


class RMSNorm:
    """[n, hidden] -> [n, hidden]; statistics in float32 whatever the dtype."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        # Cast first, then scale: the order of the reference implementation.
        return self._weight * wide.to(x.dtype)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes
