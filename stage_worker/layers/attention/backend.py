"""The seam between a model and the device's attention kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.rotary import RotaryRows


class AttentionBackend(Protocol):
    """Rotary embedding and causal attention over a paged cache."""

    def __call__(
        self, qkv: Tensor, rotary: RotaryRows, cache: LayerKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Rotates queries and keys, writes keys and values to the cache and attends.

        `qkv` is [n, heads + 2 * kv_heads, head_dim]: queries, keys, values; it may be
        changed in place. The result is [n, heads * head_dim].
        """
        ...
