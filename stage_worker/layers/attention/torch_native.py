"""Attention with plain torch operators: the reference on every device.

Decode rows: blocks are gathered into [rows, length, kv_heads, head_dim], and
the query heads that share a KV head stand in the query dimension of
`scaled_dot_product_attention`, so nothing is expanded for grouped queries.
Prompt chunks: one causal call each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata, DecodeGroup, PromptChunk
from stage_worker.layers.rotary import RotaryRows


class TorchNativeAttention:
    """See `AttentionBackend`."""

    __slots__ = ("_num_heads", "_num_kv_heads")

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads

    def __call__(
        self, qkv: Tensor, rotary: RotaryRows, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        num_rotated = self._num_heads + self._num_kv_heads
        rotated = rotary.apply(qkv[:, :num_rotated])  # queries and keys at once
        queries, keys = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        values = qkv[:, num_rotated:]
        cache.write(metadata.slot_mapping, keys, values)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        output = output.view(queries.shape[0], -1)
        for group in metadata.decode_groups:
            if group.is_whole_step:
                return _decode(queries, cache, group)
            picked = queries.index_select(0, group.token_indices)
            output.index_copy_(0, group.token_indices, _decode(picked, cache, group))
        for chunk in metadata.prompt_chunks:
            span = slice(chunk.token_start, chunk.token_end)
            output[span] = attend_prompt(queries[span], keys[span], values[span], cache, chunk)
        return output


def _decode(queries: Tensor, cache: LayerKVCache, group: DecodeGroup) -> Tensor:
    """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
    keys, values = cache.read(group.block_ids)
    kv_heads, head_dim = keys.shape[-2:]
    # [rows, kv_heads, length, head_dim]
    keys = keys.view(group.num_rows, -1, kv_heads, head_dim)[:, : group.max_length].transpose(1, 2)
    values = values.view(group.num_rows, -1, kv_heads, head_dim)
    values = values[:, : group.max_length].transpose(1, 2)
    grouped = queries.reshape(group.num_rows, kv_heads, -1, head_dim)
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=group.mask(grouped.dtype)
    )
    return attended.reshape(group.num_rows, -1)


def attend_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, cache: LayerKVCache, chunk: PromptChunk
) -> Tensor:
    """Several queries of one sequence: [n, heads, head_dim] -> [n, heads * head_dim]."""
    mask = chunk.mask()
    if chunk.position > 0:
        keys, values = cache.read(chunk.block_ids)
        keys, values = keys[: chunk.length], values[: chunk.length]
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return attended.squeeze(0).transpose(0, 1).reshape(queries.shape[0], -1)
