"""Attention by the compiled kernels."""

from __future__ import annotations

import math

from torch import Tensor

from services.errors import StageFailed
from stage_worker.kernels.library import Library
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.rotary import RotaryRows

NO_MEMORY = "no memory for the attention of a prompt"


class NativeAttention:
    """See `AttentionBackend`. Reads the paged cache where it lies."""

    __slots__ = ("_library", "_num_threads", "head_dim", "num_heads", "num_kv_heads", "scale")

    def __init__(
        self, library: Library, num_heads: int, num_kv_heads: int, head_dim: int, num_threads: int
    ) -> None:
        self._library = library
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._num_threads = num_threads
        self.scale = 1.0 / math.sqrt(head_dim)

    def __call__(
        self, qkv: Tensor, rotary: RotaryRows, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
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
                *(self.scale, output.data_ptr(), self._num_threads),
            )
        for chunk in metadata.prompt_chunks:
            failed = self._library.prompt_attention(
                *(qkv[chunk.token_start :].data_ptr(), (heads + 2 * kv_heads) * head_dim),
                *(chunk.num_tokens, chunk.position, heads, kv_heads, head_dim),
                *(keys, values, cache.keys.shape[1], chunk.block_ids.data_ptr()),
                *(self.scale, output[chunk.token_start :].data_ptr(), self._num_threads),
            )
            if failed:
                raise StageFailed(NO_MEMORY)
        return output
