"""What a model's layers are made of, and the plain torch version of it.

A platform chooses the operators once; layers ask for what they need and never
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.backend import AttentionBackend
from stage_worker.layers.attention.torch_native import TorchNativeAttention
from stage_worker.layers.block import FusedBlocks, PreNormBlock
from stage_worker.layers.linear import Linear, make_linear
from stage_worker.layers.norm import Norm, RMSNorm


class Operators(Protocol):
    """Makes and runs a layer's parts."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """`y = x W^T + b` for weight [out, in] and bias [out]."""
        ...

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> AttentionBackend:
        """Attention of this rank's heads."""
        ...

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        """Root mean square normalization by weight [hidden]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * width], gate and up, -> silu(gate) * up [n, width]."""
        ...

    def fuse(
        self, blocks: Sequence[PreNormBlock], caches: Sequence[LayerKVCache]
    ) -> FusedBlocks | None:
        """These blocks, made of these operators, one after the other in one call; None where they
        must be called one by one. Both ways give the same, bit by bit."""
        ...


class TorchOperators:
    """Right on every device."""

    def __init__(self, *, packed_linear: bool = False) -> None:
        """`packed_linear` says that oneDNN's packed weights work; see `layers.linear`."""
        self._packed_linear = packed_linear

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `Operators.linear`."""
        return make_linear(weight, bias, allow_packed=self._packed_linear)

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> AttentionBackend:
        """See `Operators.attention`."""
        return TorchNativeAttention(num_heads, num_kv_heads)

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        """See `Operators.rms_norm`."""
        return RMSNorm(weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operators.silu_mul`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def fuse(
        self, blocks: Sequence[PreNormBlock], caches: Sequence[LayerKVCache]
    ) -> FusedBlocks | None:
        """See `Operators.fuse`."""
        return None
