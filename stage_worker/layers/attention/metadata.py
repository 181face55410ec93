"""What attention needs to know about a step, built once and shared by all layers.

Rows with one query token are decode rows: they are batched, in groups of like
length so that one long sequence does not make the others pay for its padding.
Rows with more are prompt chunks, each handled by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SHORT_LENGTH = 256
"""Rows up to this length share a group whatever their length; above, lengths
of a group differ by at most a factor of two."""


class DecodeGroup:
    """Decode rows that are attended together."""

    __slots__ = (
        "_mask",
        "block_ids",
        "is_whole_step",
        "lengths",
        "max_length",
        "num_blocks",
        "num_rows",
        "token_indices",
    )

    def __init__(
        self,
        token_indices: Tensor,
        block_ids: Tensor,
        lengths: Tensor,
        max_length: int,
        *,
        is_whole_step: bool,
    ) -> None:
        """`block_ids` is [rows, blocks] int64, rows padded with a block of their own."""
        self.token_indices = token_indices
        """[rows] int64 into the step's tokens."""
        self.lengths = lengths
        """[rows] int64: tokens of each sequence, this step's included."""
        self.block_ids = block_ids.reshape(-1)
        """[rows * num_blocks] int64."""
        self.num_rows, self.num_blocks = block_ids.shape
        self.max_length = max_length
        self.is_whole_step = is_whole_step
        """Whether there is nothing else in the step."""
        self._mask: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[rows, 1, 1, max_length], 0 or -inf; None where all are max_length long.

        Made once, for all layers, where an operator that pads asks for it.
        """
        if self._mask is None and int(self.lengths.min()) != self.max_length:
            positions = torch.arange(self.max_length, device=self.lengths.device)
            hidden = positions >= self.lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._mask


class PromptChunk:
    """One row with several query tokens."""

    __slots__ = ("_mask", "block_ids", "length", "position", "token_end", "token_start")

    def __init__(self, token_start: int, token_end: int, position: int, block_ids: Tensor) -> None:
        self.token_start, self.token_end = token_start, token_end
        self.position = position
        """Of the first query in its sequence; at 0 the chunk needs no cache."""
        self.length = position + token_end - token_start
        """Tokens of the sequence up to the end of the chunk."""
        self.block_ids = block_ids
        """[blocks] int64."""
        self._mask: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return self.token_end - self.token_start

    def mask(self) -> Tensor | None:
        """[query tokens, length] bool, true where attended; None for a chunk that starts its
        sequence, which is plainly causal. Made once, where an operator asks for it."""
        if self._mask is None and self.position > 0:
            device = self.block_ids.device
            query_positions = torch.arange(self.position, self.length, device=device)
            self._mask = torch.arange(self.length, device=device) <= query_positions[:, None]
        return self._mask


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step as attention sees it."""

    num_tokens: int
    slot_mapping: Tensor
    """[num_tokens] int64: flat cache row of each token."""
    decode_groups: tuple[DecodeGroup, ...]
    prompt_chunks: tuple[PromptChunk, ...]


class RowSpan(NamedTuple):
    """One row of a step, as the slot table reports it."""

    slot: int
    position: int
    num_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the sequence after this row."""
        return self.position + self.num_tokens


def build_metadata(
    rows: Sequence[RowSpan],
    positions: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device,
) -> AttentionMetadata:
    """Builds a step's metadata.

    `positions` [num_tokens] int64 in row order, `block_tables` [slots, blocks] int32.
    """
    counts = np.array([row.num_tokens for row in rows], np.int64)
    slots = np.array([row.slot for row in rows], np.int64)
    starts = np.cumsum(counts) - counts
    blocks, offsets = np.divmod(positions, block_size)
    mapping = block_tables[np.repeat(slots, counts), blocks].astype(np.int64)
    mapping *= block_size
    mapping += offsets
    decode_rows = [i for i, row in enumerate(rows) if row.num_tokens == 1]
    groups = tuple(
        _decode_group(
            [rows[i] for i in members],
            starts[members],
            len(positions),
            block_tables,
            block_size,
            device,
        )
        for members in group_by_length([(i, rows[i].length) for i in decode_rows])
    )
    chunks = tuple(
        _prompt_chunk(row, int(starts[i]), block_tables, block_size, device)
        for i, row in enumerate(rows)
        if row.num_tokens > 1
    )
    return AttentionMetadata(len(positions), torch.from_numpy(mapping).to(device), groups, chunks)


def group_by_length(indexed_lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Groups (index, length) pairs so that padding at most doubles a group's work."""
    groups: dict[int, list[int]] = {}
    for index, length in indexed_lengths:
        key = 0 if length <= SHORT_LENGTH else (length - 1).bit_length()
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _decode_group(
    rows: Sequence[RowSpan],
    token_indices: np.ndarray,
    num_step_tokens: int,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device,
) -> DecodeGroup:
    lengths = np.array([row.length for row in rows], np.int64)
    max_length = int(lengths.max())
    num_blocks = -(-max_length // block_size)
    tables = block_tables[[row.slot for row in rows], :num_blocks].astype(np.int64)
    used = -(-lengths // block_size)
    if used.min() < num_blocks:
        # Padding reads the row's own first block: never another sequence's data.
        tables = np.where(np.arange(num_blocks) < used[:, None], tables, tables[:, :1])
    return DecodeGroup(
        torch.from_numpy(token_indices).to(device),
        torch.from_numpy(tables).to(device),
        torch.from_numpy(lengths).to(device),
        max_length,
        is_whole_step=len(rows) == num_step_tokens,
    )


def _prompt_chunk(
    row: RowSpan, start: int, block_tables: np.ndarray, block_size: int, device: torch.device
) -> PromptChunk:
    blocks = block_tables[row.slot, : -(-row.length // block_size)].astype(np.int64)
    block_ids = torch.from_numpy(blocks).to(device)
    return PromptChunk(start, start + row.num_tokens, row.position, block_ids)
