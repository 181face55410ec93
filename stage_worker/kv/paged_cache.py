"""The paged KV cache of one layer on one rank.

Keys and values are [num_blocks, block_size, kv_heads, head_dim]. Which block
belongs to whom is decided at the gateway; here a slot mapping says where a
step's tokens go, and block ids say what to read.
"""

from __future__ import annotations

from torch import Tensor

MAX_BLOCKS = 2**31 - 1
"""Block tables are int32."""


class LayerKVCache:
    """Owns one layer's blocks."""

    __slots__ = ("_key_rows", "_value_rows", "keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Takes two zeroed tensors [num_blocks, block_size, kv_heads, head_dim].

        Zeroed, not empty: a masked position still multiplies its value by 0, and
        0 x NaN of uninitialized memory would reach the output.
        """
        self.keys = keys
        self.values = values
        num_kv_heads, head_dim = keys.shape[2:]
        self._key_rows = self.keys.view(-1, num_kv_heads, head_dim)
        self._value_rows = self.values.view(-1, num_kv_heads, head_dim)

    def write(self, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [n, kv_heads, head_dim] at flat rows `slot_mapping`
        [n], each block_id * block_size + offset."""
        self._key_rows.index_copy_(0, slot_mapping, keys)
        self._value_rows.index_copy_(0, slot_mapping, values)

    def read(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copies blocks `block_ids` [m] out: two of [m * block_size, kv_heads, head_dim]."""
        tail = self.keys.shape[2:]
        return (
            self.keys.index_select(0, block_ids).view(-1, *tail),
            self.values.index_select(0, block_ids).view(-1, *tail),
        )


def kv_block_bytes(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> int:
    """Bytes of one block over a rank's layers, keys and values."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * element_bytes
