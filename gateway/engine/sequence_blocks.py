"""The block tables of sequences: what they share, what they lack, what they leave behind.

Between the scheduler, which thinks in sequences and tokens, and the block
manager, which knows neither.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.engine.block_hash import extend_block_hashes
from gateway.engine.block_manager import BlockManager, CachedPrefix
from gateway.engine.sequence import Sequence

NOTHING_CACHED = CachedPrefix([], grows=False)


class SequenceBlocks:
    """Every block of one epoch, by the sequence that owns it."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self._manager = BlockManager(num_blocks, block_size)
        self._block_size = block_size
        self._caches = enable_prefix_caching

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those included whose contents are cached."""
        return self._manager.num_free

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of this length would fit if it were alone."""
        return self._manager.blocks_for(num_tokens) <= self._manager.num_blocks

    def step_done(self, step_id: int) -> None:
        """Opens the fences of every step up to `step_id`."""
        self._manager.step_done(step_id)

    # Before a sequence runs.

    def find_prefix(self, sequence: Sequence, step_id: int) -> CachedPrefix:
        """What is cached of a sequence that would start in step `step_id`. Its last token is
        always computed: the next one is sampled from it."""
        if not self._caches:
            return NOTHING_CACHED
        most = (len(sequence.token_ids) - 1) // self._block_size
        extend_block_hashes(
            sequence.block_hashes, sequence.token_ids, self._block_size, sequence.cache_salt
        )
        return self._manager.find_prefix(sequence.block_hashes[:most], step_id)

    def free_blocks_taken(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Free blocks that a sequence takes up with all of its log, given what it shares."""
        missing = self._manager.blocks_for(len(sequence.token_ids)) - len(prefix.blocks)
        return missing + self._manager.count_free(prefix.blocks)

    def start(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """A sequence without blocks takes up its cached prefix."""
        self._manager.share(prefix.blocks)
        sequence.block_table = list(prefix.blocks)
        sequence.num_registered_blocks = len(prefix.blocks)
        sequence.num_scheduled_tokens = len(prefix.blocks) * self._block_size

    # While it runs.

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence lacks for its first `num_tokens` tokens."""
        return -(-num_tokens // self._block_size) - len(sequence.block_table)

    def come_free_for(self, count: int) -> bool:
        """Whether the steps in flight will leave `count` blocks."""
        return count <= self._manager.num_free + self._manager.num_fenced

    def room(self, sequence: Sequence) -> int:
        """Tokens that fit into the sequence's blocks and all free ones."""
        return (len(sequence.block_table) + self._manager.num_free) * self._block_size

    def grow(self, sequence: Sequence, end: int, step_id: int) -> list[int]:
        """Makes room for a row of step `step_id` that ends before position `end`, and
        registers the blocks that it fills. Returns what the stages do not know of the table."""
        table = sequence.block_table
        if end > len(table) * self._block_size:
            self._manager.extend(table, end)
        # A block that ends with a token which is still expected gets its name with a later row.
        if self._caches:
            num_full = min(end, len(sequence.token_ids)) // self._block_size
            if num_full > sequence.num_registered_blocks:
                self._register(sequence, num_full, step_id)
        if sequence.num_sent_blocks == len(table):
            return []
        unsent = table[sequence.num_sent_blocks :]
        sequence.num_sent_blocks = len(table)
        return unsent

    def _register(self, sequence: Sequence, num_full: int, step_id: int) -> None:
        hashes, table = sequence.block_hashes, sequence.block_table
        extend_block_hashes(hashes, sequence.token_ids, self._block_size, sequence.cache_salt)
        for index in range(sequence.num_registered_blocks, num_full):
            self._manager.register(table[index], hashes[index], step_id)
        sequence.num_registered_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks away; they are fenced until its last row is done."""
        self._manager.free(sequence.block_table, sequence.last_step_id)
        sequence.block_table = []
        sequence.num_registered_blocks = 0
        sequence.num_sent_blocks = 0
        sequence.num_scheduled_tokens = 0

    def missing_in_all(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that these lack for all of their logs."""
        return sum(self.missing(one, len(one.token_ids)) for one in sequences)
