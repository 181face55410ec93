"""The compiled kernels as operators on tensors: float32, on the CPU.

Measured on one core of an AVX2 server, milliseconds at batch 1 / 4 / 8 / 16 /
128, against the better of `F.linear` and oneDNN's packed weight, in one run of
`python -m benchmarks cpu-linear`: see docs/performance.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.errors import StageFailed
from stage_worker.kernels.library import Library
from stage_worker.kernels.native_linear import NativeLinear, pack
from stage_worker.kernels.self_check import check_kernels
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.backend import AttentionBackend
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.linear import Linear
from stage_worker.layers.norm import Norm
from stage_worker.layers.operators import TorchOperators
from stage_worker.layers.rotary import RotaryRows


class NativeOperators:
    """See `layers.operators.Operators`. What the kernels do not take goes to torch."""

    def __init__(self, num_threads: int, otherwise: TorchOperators) -> None:
        """Raises `KernelsUnavailable`, also where the kernels give wrong results."""
        self._library = Library()
        self._num_threads = num_threads
        self._otherwise = otherwise
        check_kernels(self, TorchOperators())

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


class NativeRMSNorm:
    """See `layers.norm.RMSNorm`; torch's takes ten times as long for a few rows."""

    __slots__ = ("_eps", "_function", "_weight")

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        self._function = library.rms_norm
        self._weight = weight.contiguous()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        rows, width = x.shape
        self._function(x.data_ptr(), rows, width, self._weight.data_ptr(), self._eps, y.data_ptr())
        return y

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes


class NativeAttention:
    """See `AttentionBackend`. Reads the paged cache where it lies."""

    __slots__ = ("_head_dim", "_library", "_num_heads", "_num_kv_heads", "_num_threads", "_scale")

    def __init__(
        self, library: Library, num_heads: int, num_kv_heads: int, head_dim: int, num_threads: int
    ) -> None:
        self._library = library
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._num_threads = num_threads
        self._scale = 1.0 / math.sqrt(head_dim)

    def __call__(
        self, qkv: Tensor, rotary: RotaryRows, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        heads, kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        rows = qkv.shape[0]
        keys, values = cache.keys.data_ptr(), cache.values.data_ptr()
        self._library.rotate_and_store(
            qkv.data_ptr(),
            *(rows, heads, kv_heads, head_dim),
            *(rotary.cos.data_ptr(), rotary.signed_sin.data_ptr()),
            *(metadata.slot_mapping.data_ptr(), keys, values),
        )
        output = qkv.new_empty((rows, heads * head_dim))
        for group in metadata.decode_groups:
            self._library.decode_attention(
                *(qkv.data_ptr(), (heads + 2 * kv_heads) * head_dim),
                *(group.token_indices.data_ptr(), group.num_rows, heads, kv_heads, head_dim),
                *(keys, values, cache.keys.shape[1]),
                *(group.block_ids.data_ptr(), group.num_blocks, group.lengths.data_ptr()),
                *(self._scale, output.data_ptr(), self._num_threads),
            )
        for chunk in metadata.prompt_chunks:
            failed = self._library.prompt_attention(
                *(qkv[chunk.token_start :].data_ptr(), (heads + 2 * kv_heads) * head_dim),
                *(chunk.num_tokens, chunk.position, heads, kv_heads, head_dim),
                *(keys, values, cache.keys.shape[1], chunk.block_ids.data_ptr()),
                *(self._scale, output[chunk.token_start :].data_ptr(), self._num_threads),
            )
            if failed:
                raise StageFailed("no memory for the attention of a prompt")
        return output
