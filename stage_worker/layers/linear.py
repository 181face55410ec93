"""`y = x W^T + b`, in the layout that the device is quickest with.

Measured with torch 2.13 on one core of an AVX2 server, float32, milliseconds
for batch 1 / 4 / 8 / 32 / 128 (`F.linear` against oneDNN's packed weight):

    576 -> 3072     0.85 / 1.90 / 1.90 / 3.0 / 9.0    0.75 / 1.1 / 1.1 / 2.3 / 8.0
    576 -> 49152    16 / 35 / 43 / 75 / 196           12 / 15 / 30 / 35 / 112
    576 -> 960      0.33 / 0.48 / 0.54 / 0.88 / 2.0   0.31 / 0.41 / 0.45 / 0.8 / 2.0
    1536 -> 576     0.28 / 0.65 / 0.67 / 1.5 / 4.1    0.33 / 0.62 / 0.81 / 2.1 / 4.1

A transposed copy (`x @ Wt`) is the quickest at batch 1 only and the slowest at
4 and 8. So: pack where the output is wider than the input, else leave plain.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_BATCH_HINT = 8
"""Batch that oneDNN plans the packed layout for; decode batches are around it,
and the same packing stays within 15 % at batch 1 and 128."""


class Linear(Protocol):
    """[n, in] -> [n, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        ...

    @property
    def keeps_weight(self) -> bool:
        """Whether the weight given is held as it is, not copied."""
        ...


class PlainLinear:
    """Weight [out, in] as it stands in the checkpoint. Right on every device."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    @property
    def keeps_weight(self) -> bool:
        return True


class PackedLinear:
    """Weight reordered once into oneDNN's blocked layout. float32 on the CPU only."""

    __slots__ = ("_bias", "_num_bytes", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_BATCH_HINT)
        self._bias = bias
        self._num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def keeps_weight(self) -> bool:
        return False


def make_linear(weight: Tensor, bias: Tensor | None, *, allow_packed: bool) -> Linear:
    """Chooses the layout for weight [out, in] and bias [out].

    `allow_packed` is the platform's word that `packing_works` holds there.
    """
    out_features, in_features = weight.shape
    if allow_packed and weight.dtype == torch.float32 and out_features > in_features:
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def packing_works() -> bool:
    """Tries the private oneDNN operators on a small product.

    They carry no stability promise and need a oneDNN build (not every aarch64
    wheel has one), so the plain path is taken unless they give the right answer.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.arange(96, dtype=torch.float32).view(12, 8) / 96
    x = torch.arange(24, dtype=torch.float32).view(3, 8) / 24
    try:
        packed = PackedLinear(weight, None)(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return bool(torch.allclose(packed, F.linear(x, weight), atol=1e-5))
