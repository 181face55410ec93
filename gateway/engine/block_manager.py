"""Who owns which KV block: the paged cache's bookkeeping, without the cache.

Blocks are numbers from 0; the same number means the same block on every
stage. Every block is in one of three places:

* *in use*: in the block tables of one or more sequences, counted;
* *fenced*: in no table, but a step that reads or writes it is in flight. It is
  given to nobody who would write into it until that step is done;
* *free*: the next owner may overwrite it.

A full block can be registered under the hash of its contents (`block_hash`).
It keeps that name while it is fenced or free, so a later sequence with the same
prefix takes it back by reference, until somebody needs the space: blocks
without a name go first, then those that were given back longest ago.

**When a registered block may be read.** It is registered with the step that
fills it, and given to sequences in later steps only. Every stage applies step N
before step N + 1 and computes them in that order, so the keys and values are
there when a later step reads them, on every stage, whether or not the gateway
has seen the result. A step that fails ends its epoch, and with it everything
that is registered. Who computes the same block at the same time keeps a copy of
its own; the name stays with the first.

**Who may write.** Only a block that was allocated, never one that was shared: a
sequence that shares n full blocks writes from position n * block_size on, which
is in the first block of its own.

Pure: knows nothing about sequences, only about numbers, hashes and steps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NEVER = 0
"""Steps count from 1."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest prefix that is cached, of what was asked for."""

    blocks: list[int]
    grows: bool
    """The step in the making fills the block after these: the next one will find more."""


class BlockManager:
    """Hands out and takes back block numbers."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, not {num_blocks}x{block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        """Tokens in one block."""
        self._num_owners = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._filled_by = [NEVER] * num_blocks
        """The step that fills a registered block."""
        self._last_used_by = [NEVER] * num_blocks
        """The last step that touches a block which nobody owns."""
        self._registered: dict[bytes, int] = {}
        self._free_unnamed: deque[int] = deque(range(num_blocks))
        # Ordered sets: longest free first, and any block can be taken out.
        self._free_named: OrderedDict[int, None] = OrderedDict()
        self._fenced: dict[int, dict[int, None]] = {}
        self._num_fenced = 0
        self._last_done_step = NEVER

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free_unnamed) + len(self._free_named)

    @property
    def num_fenced(self) -> int:
        """Blocks that become free when the steps in flight are done."""
        return self._num_fenced

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # Blocks of one's own.

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks off the free list; what was cached in them is forgotten.

        Raises ValueError when there are fewer; the caller asks `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        return [self._take_free() for _ in range(count)]

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

    def free(self, blocks: Sequence[int], last_step_id: int = NEVER) -> None:
        """Gives up one ownership of each block of a table, in the table's order.

        `last_step_id` is the last step of this owner that touches any of them (0: none).
        Raises ValueError for a block that nobody owns, before anything is changed.
        """
        if len(set(blocks)) != len(blocks) or not all(self._num_owners[b] for b in blocks):
            raise ValueError(f"blocks {list(blocks)} are not all in use")
        # The end first: of a cached prefix, it is the beginning that others can use.
        for block in reversed(blocks):
            self._last_used_by[block] = max(self._last_used_by[block], last_step_id)
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                self._lay_down(block)

    def step_done(self, step_id: int) -> None:
        """Opens the fence of every step up to `step_id`. Steps end in order."""
        self._last_done_step = max(self._last_done_step, step_id)
        for fence in sorted(fence for fence in self._fenced if fence <= step_id):
            blocks = self._fenced.pop(fence)
            self._num_fenced -= len(blocks)
            for block in blocks:
                self._add_free(block)

    # Blocks that are shared.

    def register(self, block: int, block_hash: bytes, step_id: int) -> None:
        """Gives a name to a block that `step_id`, not sent yet or in flight, fills up.

        Without effect where another block has the name already.
        """
        if block_hash in self._registered:
            return
        self._registered[block_hash] = block
        self._hash_of[block] = block_hash
        self._filled_by[block] = step_id

    def find_prefix(self, hashes: Iterable[bytes], step_id: int) -> CachedPrefix:
        """The blocks of the longest run of `hashes` from their beginning which a row of step
        `step_id` may read. They are nobody's until they are shared."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._registered.get(block_hash)
            if block is None:
                return CachedPrefix(blocks, grows=False)
            if self._filled_by[block] >= step_id:
                return CachedPrefix(blocks, grows=True)
            blocks.append(block)
        return CachedPrefix(blocks, grows=False)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks sharing takes off the free list."""
        return sum(1 for block in blocks if block in self._free_named)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to each block that `find_prefix` has found."""
        for block in blocks:
            if self._num_owners[block] == 0:
                self._take_up(block)
            self._num_owners[block] += 1

    # Between the places.

    def _take_free(self) -> int:
        if self._free_unnamed:
            block = self._free_unnamed.popleft()
        else:
            block, _ = self._free_named.popitem(last=False)
            self._forget(block)
        self._num_owners[block] = 1
        self._last_used_by[block] = NEVER
        return block

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._registered[block_hash]
            self._hash_of[block] = None

    def _lay_down(self, block: int) -> None:
        """A block has lost its last owner."""
        fence = self._last_used_by[block]
        if fence <= self._last_done_step:
            self._add_free(block)
        else:
            self._fenced.setdefault(fence, {})[block] = None
            self._num_fenced += 1

    def _take_up(self, block: int) -> None:
        """A named block without an owner is about to get one, for reading."""
        if block in self._free_named:
            del self._free_named[block]
            return
        fence = self._last_used_by[block]
        del self._fenced[fence][block]
        if not self._fenced[fence]:
            del self._fenced[fence]
        self._num_fenced -= 1

    def _add_free(self, block: int) -> None:
        if self._hash_of[block] is None:
            self._free_unnamed.append(block)
        else:
            self._free_named[block] = None
