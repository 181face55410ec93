"""The compiled kernels as operators on tensors: float32, on the CPU.

Measured on one core of an AVX2 server, milliseconds at batch 1 / 4 / 8 / 16 /
128, against the better of `F.linear` and oneDNN's packed weight, in one run of
`python -m benchmarks cpu-linear`: see docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from stage_worker.kernels.library import Library
from stage_worker.kernels.native_attention import NativeAttention
from stage_worker.kernels.native_blocks import fuse_blocks
from stage_worker.kernels.native_linear import NativeLinear, pack
from stage_worker.kernels.native_norm import NativeRMSNorm
from stage_worker.kernels.self_check import check_kernels
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.backend import AttentionBackend
from stage_worker.layers.block import FusedBlocks, PreNormBlock
from stage_worker.layers.linear import Linear
from stage_worker.layers.norm import Norm
from stage_worker.layers.operators import TorchOperators


class NativeOperators:
    """See `layers.operators.Operators`. What the kernels do not take goes to torch."""

    def __init__(self, num_threads: int, otherwise: TorchOperators) -> None:
        """Raises `KernelsUnavailable`, also where the kernels give wrong results."""
        self._library = Library()
        self._num_threads = num_threads
        self._otherwise = otherwise
        alone = copy(self)
        alone._num_threads = 1
        check_kernels(self, alone, TorchOperators())

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `Operators.linear`."""
        if weight.dtype != torch.float32:
            return self._otherwise.linear(weight, bias)
        return NativeLinear(self._library, pack(self._library, weight), bias, self._num_threads)

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        """See `Operators.rms_norm`."""
        if weight.dtype != torch.float32 or weight.shape[0] % self._library.lanes:
            return self._otherwise.rms_norm(weight, eps)
        return NativeRMSNorm(self._library, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operators.silu_mul`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if gate_up.dtype != torch.float32 or width % self._library.lanes:
            return self._otherwise.silu_mul(gate_up)
        y = gate_up.new_empty((rows, width))
        self._library.silu_mul(gate_up.data_ptr(), rows, width, y.data_ptr())
        return y

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> AttentionBackend:
        """See `Operators.attention`."""
        fits = (
            dtype == torch.float32
            and head_dim % (2 * self._library.lanes) == 0
            and head_dim <= self._library.max_dim
            and num_heads // num_kv_heads <= self._library.max_group
        )
        if not fits:
            return self._otherwise.attention(num_heads, num_kv_heads, head_dim, dtype)
        return NativeAttention(self._library, num_heads, num_kv_heads, head_dim, self._num_threads)

    def fuse(
        self, blocks: Sequence[PreNormBlock], caches: Sequence[LayerKVCache]
    ) -> FusedBlocks | None:
        """See `Operators.fuse`."""
        return fuse_blocks(self._library, blocks, caches, self._num_threads)
