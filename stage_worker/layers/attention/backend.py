"""The seam between a model and the device's attention kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import AttentionMetadata


class AttentionBackend(Protocol):
    """Causal attention over a paged cache."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Writes the step's keys and values to the cache and attends.

        Queries are [n, heads, head_dim], keys and values [n, kv_heads, head_dim],
        all rotated; the result is [n, heads * head_dim].
        """
        ...
