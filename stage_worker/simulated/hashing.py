"""The arithmetic of a simulated stage on whole steps: `tokens`, as numpy.

What crosses a boundary has the true shape and type. The first 16 bytes of each
token's row are two 64-bit words: its key, and the history that the stage before
has read for it. The rest is zero.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stage_worker.layers.attention.metadata import AttentionMetadata, DecodeGroup, PromptChunk
from stage_worker.splitmix64 import GOLDEN_GAMMA, MULTIPLIER_1, MULTIPLIER_2

WORD_BYTES = 8
ROW_BYTES = 2 * WORD_BYTES
"""Of a token's row that are used: a model's rows must be at least this long."""


def mix(values: np.ndarray) -> np.ndarray:
    """`splitmix64.mix` for uint64 values of any shape; numpy's integers wrap around."""
    z = values + np.uint64(GOLDEN_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return z ^ (z >> np.uint64(31))


def token_keys(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`tokens.token_key` for [n] ids and positions, uint64."""
    return mix(mix(token_ids) + positions)


def next_tokens(histories: np.ndarray, vocab_size: int) -> np.ndarray:
    """`tokens.next_token` for [n] histories, int64."""
    return (mix(histories) % np.uint64(vocab_size)).astype(np.int64)


def checked(given: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The histories [n] that go on: those that were received, where this stage's own cache
    says the same; else something that depends on both, so that every later token is wrong."""
    same = given == read
    return given if same.all() else np.where(same, given, mix(given ^ mix(read)))


def pack(words: np.ndarray, row_size: int, dtype: torch.dtype) -> Tensor:
    """Words [n, 2] uint64 in the rows of an activation [n, row_size]."""
    rows = np.zeros((len(words), row_size * dtype.itemsize), np.uint8)
    rows[:, :ROW_BYTES] = words.view(np.uint8).reshape(len(words), ROW_BYTES)
    return torch.from_numpy(rows).view(dtype)


def unpack(activation: Tensor) -> np.ndarray:
    """The words [n, 2] uint64 that `pack` put there."""
    rows = activation.view(torch.uint8).numpy()
    return np.ascontiguousarray(rows[:, :ROW_BYTES]).view(np.uint64)


def context_tokens(metadata: AttentionMetadata) -> int:
    """Tokens of all sequences in the step, those of the step included."""
    decodes = sum(int(group.lengths.sum()) for group in metadata.decode_groups)
    return decodes + sum(chunk.length for chunk in metadata.prompt_chunks)


class KeyCache:
    """The paged KV cache of a simulated stage: one key for each token."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        # Zeroed pages, which the kernel gives on first touch.
        self._blocks = np.zeros((num_blocks, block_size), np.uint64)
        self._rows = self._blocks.reshape(-1)

    def attend(self, keys: np.ndarray, metadata: AttentionMetadata) -> np.ndarray:
        """Writes the step's keys [n], and reads the history [n] of each of its tokens: the sum
        of all keys of its sequence up to its own, found through the block table."""
        self._rows[metadata.slot_mapping.numpy()] = keys
        histories = np.zeros_like(keys)
        for group in metadata.decode_groups:
            histories[group.token_indices.numpy()] = self._decodes(group)
        for chunk in metadata.prompt_chunks:
            histories[chunk.token_start : chunk.token_end] = self._chunk(chunk)
        return histories

    def _decodes(self, group: DecodeGroup) -> np.ndarray:
        blocks = group.block_ids.numpy().reshape(group.num_rows, group.num_blocks)
        read = self._blocks[blocks].reshape(group.num_rows, -1)
        behind = np.arange(read.shape[1]) >= group.lengths.numpy()[:, None]
        read[behind] = 0
        total: np.ndarray = read.sum(axis=1)
        return total

    def _chunk(self, chunk: PromptChunk) -> np.ndarray:
        read = self._blocks[chunk.block_ids.numpy()].reshape(-1)[: chunk.length]
        return np.cumsum(read)[chunk.token_start - chunk.token_end :]
