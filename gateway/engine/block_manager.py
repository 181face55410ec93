"""Who owns which KV block: the paged cache's bookkeeping, without the cache.

Blocks are numbers from 0; the same number means the same block on every
stage. A block freed while a step that touches it is in flight is *fenced*: it
returns to the free list only when that step is done, so no later step can
write into it while an earlier one still reads it on some stage.

Pure: knows nothing about sequences, only about numbers and steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockManager:
    """Hands out and takes back block numbers. Every block is free, fenced or in use."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, not {num_blocks}x{block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        """Tokens in one block."""
        self._free: deque[int] = deque(range(num_blocks))
        self._in_use: set[int] = set()
        self._fenced: dict[int, list[int]] = {}
        self._num_fenced = 0
        self._last_done_step = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when the steps in flight are done."""
        return self._num_fenced

    @property
    def num_in_use(self) -> int:
        """Blocks that belong to somebody."""
        return len(self._in_use)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks off the free list, longest free first.

        Raises ValueError when there are fewer; the caller asks `num_free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._in_use.update(blocks)
        return blocks

    def extend(self, table: list[int], num_tokens: int) -> list[int]:
        """Appends to a block table what it lacks for `num_tokens` tokens; returns the new blocks.

        Raises ValueError, and changes nothing, when too few are free.
        """
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return []
        new_blocks = self.allocate(missing)
        table.extend(new_blocks)
        return new_blocks

    def free(self, blocks: Iterable[int], last_step_id: int = 0) -> None:
        """Gives blocks back. `last_step_id` is the last step that touches any of them (0: none).

        Raises ValueError for a block that nobody owns, before anything is changed.
        """
        returned = list(blocks)
        if len(set(returned)) != len(returned) or not self._in_use.issuperset(returned):
            raise ValueError(f"blocks {returned} are not all in use")
        self._in_use.difference_update(returned)
        if last_step_id <= self._last_done_step:
            self._free.extend(returned)
        elif returned:
            self._fenced.setdefault(last_step_id, []).extend(returned)
            self._num_fenced += len(returned)

    def step_done(self, step_id: int) -> None:
        """Opens the fence of every step up to `step_id`. Steps end in order."""
        self._last_done_step = max(self._last_done_step, step_id)
        for fence in sorted(fence for fence in self._fenced if fence <= step_id):
            blocks = self._fenced.pop(fence)
            self._num_fenced -= len(blocks)
            self._free.extend(blocks)
