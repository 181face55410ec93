"""Blocks of compiled kernels in one call: what Python and torch cost a step is then the same for
one layer and for many. See docs/decisions/018-blocks-in-one-call.md.

The structures are those of kernels/blocks.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from services.errors import StageFailed
from stage_worker.kernels.library import Library
from stage_worker.kernels.native_attention import NO_MEMORY, NativeAttention
from stage_worker.kernels.native_linear import NativeLinear
from stage_worker.kernels.native_norm import NativeRMSNorm
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.block import PreNormBlock
from stage_worker.layers.rotary import RotaryRows


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))

    @classmethod
    def of(cls, norm: NativeRMSNorm) -> _Norm:
        return cls(norm.weight.data_ptr(), norm.eps)


class _Product(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("panels", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, linear: NativeLinear) -> _Product:
        packed, bias = linear.packed, linear.bias
        return cls(
            packed.form,
            packed.panels.data_ptr(),
            packed.num_inputs,
            packed.num_outputs,
            None if bias is None else bias.data_ptr(),
        )


class _Block(ctypes.Structure):
    _fields_ = (
        ("input_norm", _Norm),
        ("qkv", _Product),
        ("output", _Product),
        ("mlp_norm", _Norm),
        ("gate_up", _Product),
        ("down", _Product),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("mlp_width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _DecodeGroup(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("token_indices", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
    )


class _PromptChunk(ctypes.Structure):
    _fields_ = (
        ("token_start", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("block_ids", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("signed_sines", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
        ("groups", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
    )


class NativeBlocks:
    """See `FusedBlocks`. Keeps what lies between two kernels, as large as the largest step so far
    needed it."""

    __slots__ = (
        "_blocks",
        "_kept",
        "_library",
        "_num_threads",
        "_room",
        "_room_for_a_row",
        "_sizes",
    )

    def __init__(
        self,
        library: Library,
        structures: Sequence[_Block],
        sizes: _Sizes,
        num_threads: int,
        kept: object,
    ) -> None:
        """`kept` is what the structures point into."""
        self._library = library
        self._blocks = (_Block * len(structures))(*structures)
        self._sizes = sizes
        self._num_threads = num_threads
        self._kept = kept
        self._room_for_a_row: int = library.room_for_a_row(ctypes.byref(sizes))
        self._room = torch.empty(0)

    def __call__(
        self, hidden_states: Tensor, rotary: RotaryRows, metadata: AttentionMetadata
    ) -> Tensor:
        """See `FusedBlocks`."""
        num_rows = hidden_states.shape[0]
        if len(self._room) < num_rows * self._room_for_a_row:
            self._room = torch.empty(num_rows * self._room_for_a_row)
        output = hidden_states.clone(memory_format=torch.contiguous_format)
        groups, chunks = _groups(metadata), _chunks(metadata)
        step = _Step(
            num_rows,
            rotary.cos.data_ptr(),
            rotary.signed_sin.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            len(groups),
            len(chunks),
            ctypes.addressof(groups),
            ctypes.addressof(chunks),
        )
        failed = self._library.blocks(
            *(ctypes.byref(self._sizes), ctypes.byref(self._blocks), len(self._blocks)),
            *(ctypes.byref(step), output.data_ptr(), self._room.data_ptr(), self._num_threads),
        )
        if failed:
            raise StageFailed(NO_MEMORY)
        return output


def fuse_blocks(
    library: Library,
    blocks: Sequence[PreNormBlock],
    caches: Sequence[LayerKVCache],
    num_threads: int,
) -> NativeBlocks | None:
    """None where one of them is not made of kernels alone, or they are not all of one size."""
    structures: list[_Block] = []
    sizes: list[_Sizes] = []
    for block, cache in zip(blocks, caches, strict=True):
        found = _structure(library, block, cache)
        if found is None:
            return None
        structures.append(found[0])
        sizes.append(found[1])
    if len({bytes(one) for one in sizes}) != 1:
        return None
    kept = (tuple(blocks), tuple(caches))
    return NativeBlocks(library, structures, sizes[0], num_threads, kept)


def _structure(
    library: Library, block: PreNormBlock, cache: LayerKVCache
) -> tuple[_Block, _Sizes] | None:
    if not (
        isinstance(block.input_norm, NativeRMSNorm)
        and isinstance(block.qkv, NativeLinear)
        and isinstance(block.attend, NativeAttention)
        and isinstance(block.output, NativeLinear)
        and isinstance(block.mlp_norm, NativeRMSNorm)
        and isinstance(block.gate_up, NativeLinear)
        and isinstance(block.down, NativeLinear)
        and block.down.packed.num_inputs % library.lanes == 0
    ):
        return None
    structure = _Block(
        _Norm.of(block.input_norm),
        _Product.of(block.qkv),
        _Product.of(block.output),
        _Norm.of(block.mlp_norm),
        _Product.of(block.gate_up),
        _Product.of(block.down),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
    )
    sizes = _Sizes(
        block.qkv.packed.num_inputs,
        block.attend.num_heads,
        block.attend.num_kv_heads,
        block.attend.head_dim,
        block.down.packed.num_inputs,
        cache.keys.shape[1],
        block.attend.scale,
    )
    return structure, sizes


def _groups(metadata: AttentionMetadata) -> ctypes.Array[_DecodeGroup]:
    groups = metadata.decode_groups
    return (_DecodeGroup * len(groups))(
        *(
            _DecodeGroup(
                group.num_rows,
                group.token_indices.data_ptr(),
                group.block_ids.data_ptr(),
                group.lengths.data_ptr(),
                group.num_blocks,
            )
            for group in groups
        )
    )


def _chunks(metadata: AttentionMetadata) -> ctypes.Array[_PromptChunk]:
    chunks = metadata.prompt_chunks
    return (_PromptChunk * len(chunks))(
        *(
            _PromptChunk(
                chunk.token_start, chunk.num_tokens, chunk.position, chunk.block_ids.data_ptr()
            )
            for chunk in chunks
        )
    )
