"""The compiled kernels as operators on tensors: float32, on the CPU.

Measured on one core of an AVX2 server, milliseconds at batch 1 / 4 / 8 / 16 /
128, against the better of `F.linear` and oneDNN's packed weight, in one run of
`python -m benchmarks cpu-linear`: see docs/performance.md.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from services.errors import StageFailed
from stage_worker.kernels.build import load_library
from stage_worker.kernels.self_check import check_kernels
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.backend import AttentionBackend
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.linear import Linear
from stage_worker.layers.norm import Norm
from stage_worker.layers.operators import TorchOperators
from stage_worker.layers.rotary import RotaryRows

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_SIGNATURES: dict[str, list[type]] = {
    "stagemesh_prompt_attention": [
        *(_POINTER, *[_SIZE] * 6, _POINTER, _POINTER, _SIZE, _POINTER),
        *(ctypes.c_float, _POINTER, ctypes.c_int),
    ],
    "stagemesh_linear": [_POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, ctypes.c_int],
    "stagemesh_silu_mul": [_POINTER, _SIZE, _SIZE, _POINTER],
    "stagemesh_rms_norm": [_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_float, _POINTER],
    "stagemesh_rotate_and_store": [_POINTER, *[_SIZE] * 4, *[_POINTER] * 5],
    "stagemesh_decode_attention": [
        *(_POINTER, _SIZE, _POINTER, *[_SIZE] * 4, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _SIZE, _POINTER, ctypes.c_float, _POINTER, ctypes.c_int),
    ],
}


class Library:
    """The shared library with its signatures and sizes."""

    def __init__(self) -> None:
        """Raises `KernelsUnavailable`."""
        library = load_library()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.stagemesh_prompt_attention.restype = ctypes.c_int
        for name in ("panel", "lanes", "max_group", "max_dim"):
            getattr(library, f"stagemesh_{name}").restype = _SIZE
        self.linear = library.stagemesh_linear
        self.silu_mul = library.stagemesh_silu_mul
        self.rms_norm = library.stagemesh_rms_norm
        self.rotate_and_store = library.stagemesh_rotate_and_store
        self.decode_attention = library.stagemesh_decode_attention
        self.prompt_attention = library.stagemesh_prompt_attention
        """Returns 0, or -1 where there is no memory for its tiles."""
        self.panel: int = library.stagemesh_panel()
        """Output features that lie together in a packed weight."""
        self.lanes: int = library.stagemesh_lanes()
        self.max_group: int = library.stagemesh_max_group()
        """Most query heads of one KV head."""
        self.max_dim: int = library.stagemesh_max_dim()
        """Largest head."""


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
        return NativeLinear(self._library, weight, bias, self._num_threads)

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


class NativeLinear:
    """Weight in panels of output features, each read once, in order. float32 on the CPU only."""

    __slots__ = (
        "_bias",
        "_function",
        "_in",
        "_num_bytes",
        "_num_threads",
        "_out",
        "_panels",
        "_pointers",
    )

    def __init__(
        self, library: Library, weight: Tensor, bias: Tensor | None, num_threads: int
    ) -> None:
        self._out, self._in = weight.shape
        self._function = library.linear
        self._num_threads = num_threads
        panels = -(-self._out // library.panel)
        padded = weight
        if self._out % library.panel:
            padded = weight.new_zeros((panels * library.panel, self._in))
            padded[: self._out] = weight
        self._panels = padded.view(panels, library.panel, self._in).transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.contiguous()
        # As plain weights; the filling of the last panel is not counted.
        self._num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._pointers = (
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty((rows, self._out))
        panels, bias = self._pointers
        self._function(
            x.data_ptr(),
            rows,
            self._in,
            panels,
            self._out,
            bias,
            y.data_ptr(),
            self._num_threads,
        )
        return y

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def keeps_weight(self) -> bool:
        return False


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
