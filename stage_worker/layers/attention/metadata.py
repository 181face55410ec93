"""What attention needs to know about a step, built once and shared by all layers.

Rows with one query token are decode rows: they are batched, in groups of like
length so that one long sequence does not make the others pay for its padding.
Rows with more are prompt chunks, each handled by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHORT_LENGTH = 256
"""Rows up to this length share a group whatever their length; above, lengths
of a group differ by at most a factor of two."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that are attended together."""

    token_indices: Tensor | None
    """[rows] int64 into the step's tokens; None where the group is the whole step."""
    block_ids: Tensor
    """[rows * blocks] int64, rows padded with a block of their own."""
    num_rows: int
    max_length: int
    """Longest sequence of the group, in tokens, this step's included."""
    mask: Tensor | None
    """[rows, 1, 1, max_length], 0 or -inf, in the model's dtype; None where all are
    max_length long."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One row with several query tokens."""

    token_start: int
    token_end: int
    block_ids: Tensor | None
    """[blocks] int64; None for a chunk that starts its sequence: it needs no cache."""
    length: int
    """Tokens of the sequence up to the end of the chunk."""
    mask: Tensor | None
    """[query tokens, length] bool, true where attended; None as above."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step as attention sees it."""

    num_tokens: int
    slot_mapping: Tensor
    """[num_tokens] int64: flat cache row of each token."""
    decode_groups: tuple[DecodeGroup, ...]
    prompt_chunks: tuple[PromptChunk, ...]


@dataclass(frozen=True, slots=True)
class RowSpan:
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
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionMetadata:
    """Builds a step's metadata.

    `positions` [num_tokens] int64 in row order, `block_tables` [slots, blocks] int32.
    """
    counts = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
    slots = np.fromiter((row.slot for row in rows), np.int64, len(rows))
    starts = np.cumsum(counts) - counts
    token_slots = np.repeat(slots, counts)
    mapping = (
        block_tables[token_slots, positions // block_size].astype(np.int64) * block_size
        + positions % block_size
    )
    decode_rows = [i for i, row in enumerate(rows) if row.num_tokens == 1]
    groups = tuple(
        _decode_group(
            [rows[i] for i in members],
            starts[members],
            len(positions),
            block_tables,
            block_size,
            dtype,
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
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    lengths = np.fromiter((row.length for row in rows), np.int64, len(rows))
    max_length = int(lengths.max())
    num_blocks = -(-max_length // block_size)
    tables = block_tables[[row.slot for row in rows], :num_blocks].astype(np.int64)
    used = -(-lengths // block_size)
    # Padding reads the row's own first block: never another sequence's data.
    tables = np.where(np.arange(num_blocks) < used[:, None], tables, tables[:, :1])
    mask = None
    if int(lengths.min()) != max_length:
        hidden = torch.from_numpy(np.arange(max_length) >= lengths[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None, :].to(device)
    whole_step = len(rows) == num_step_tokens
    return DecodeGroup(
        None if whole_step else torch.from_numpy(token_indices).to(device),
        torch.from_numpy(tables.reshape(-1)).to(device),
        len(rows),
        max_length,
        mask,
    )


def _prompt_chunk(
    row: RowSpan, start: int, block_tables: np.ndarray, block_size: int, device: torch.device
) -> PromptChunk:
    end = start + row.num_tokens
    if row.position == 0:
        return PromptChunk(start, end, None, row.length, None)
    blocks = block_tables[row.slot, : -(-row.length // block_size)].astype(np.int64)
    query_positions = torch.arange(row.position, row.length, device=device)
    mask = torch.arange(row.length, device=device) <= query_positions[:, None]
    return PromptChunk(start, end, torch.from_numpy(blocks).to(device), row.length, mask)
