"""No block is lost, none is shared wrongly, none comes back before its fence opens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.engine.block_manager import BlockManager

NUM_BLOCKS = 12
BLOCK_SIZE = 3


@dataclass
class Table:
    """One owner's blocks."""

    blocks: list[int] = field(default_factory=list)
    num_named: int = 0
    """Leading blocks that have been registered, or were shared."""
    chain: bytes = b""
    """Name of the last of them."""


class Ownership(RuleBasedStateMachine):
    """The manager against a model that writes down who has what, and what is in it.

    The model's cache holds a name in every block: that of the contents which were written
    last. Allocation is followed by writing, so a named block that is handed to a writer while
    somebody may still read it is noticed at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[Table] = []
        self.contents: dict[int, bytes] = {}
        self.filled_by: dict[int, int] = {}
        self.fences: dict[int, int] = {}
        """Block -> last step that touches it."""
        self.last_sent = 0
        self.last_done = 0

    @property
    def draft(self) -> int:
        return self.last_sent + 1

    def owned(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table.blocks)

    @rule()
    def open_table(self) -> None:
        self.tables.append(Table())

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def extend(self, data: st.DataObject, num_tokens: int) -> None:
        table = data.draw(st.sampled_from(self.tables)).blocks
        before, owned = list(table), self.owned()
        missing = -(-num_tokens // BLOCK_SIZE) - len(table)
        if missing > self.blocks.num_free:
            with pytest.raises(ValueError, match="are free"):
                self.blocks.extend(table, num_tokens)
            assert table == before
            return
        new_blocks = self.blocks.extend(table, num_tokens)
        assert len(new_blocks) == max(missing, 0)
        assert table == before + new_blocks
        for block in new_blocks:
            assert owned[block] == 0
            assert self.fences.get(block, 0) <= self.last_done
            self.contents[block] = b"overwritten"

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.sampled_from([b"x", b"y"]))
    def fill(self, data: st.DataObject, token: bytes) -> None:
        """The step in the making fills the first block that has no name yet."""
        table = data.draw(st.sampled_from(self.tables))
        if table.num_named == len(table.blocks):
            return
        block = table.blocks[table.num_named]
        table.chain += token
        table.num_named += 1
        self.contents[block] = table.chain
        self.filled_by[block] = self.draft
        self.blocks.register(block, table.chain, self.draft)

    @rule(tokens=st.lists(st.sampled_from([b"x", b"y"]), max_size=4))
    def share(self, tokens: list[bytes]) -> None:
        hashes = [b"".join(tokens[: index + 1]) for index in range(len(tokens))]
        found = self.blocks.find_prefix(hashes, self.draft)
        for block, block_hash in zip(found.blocks, hashes, strict=False):
            assert self.contents[block] == block_hash
            assert self.filled_by[block] < self.draft
        free = self.blocks.num_free
        taken = self.blocks.count_free(found.blocks)
        self.blocks.share(found.blocks)
        assert self.blocks.num_free == free - taken
        chain = hashes[len(found.blocks) - 1] if found.blocks else b""
        self.tables.append(Table(list(found.blocks), len(found.blocks), chain))

    @rule()
    def send_step(self) -> None:
        self.last_sent += 1

    @precondition(lambda self: self.last_done < self.last_sent)
    @rule()
    def finish_step(self) -> None:
        self.last_done += 1
        self.blocks.step_done(self.last_done)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        fence = data.draw(st.integers(0, self.last_sent))
        self.blocks.free(table.blocks, fence)
        for block in table.blocks:
            self.fences[block] = max(self.fences.get(block, 0), fence)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        owned = set(self.owned())
        fenced = {b for b, fence in self.fences.items() if fence > self.last_done} - owned
        assert self.blocks.num_fenced == len(fenced)
        assert self.blocks.num_free == NUM_BLOCKS - len(owned) - len(fenced)

    @invariant()
    def what_tables_share_is_still_there(self) -> None:
        for table in self.tables:
            for index in range(table.num_named):
                assert self.contents[table.blocks[index]] == table.chain[: index + 1]

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.free(table.blocks)
        self.blocks.step_done(self.last_sent)
        assert sorted(self.blocks.allocate(NUM_BLOCKS)) == list(range(NUM_BLOCKS))
        for name in set(self.contents.values()):
            assert self.blocks.find_prefix([name], self.draft).blocks == []


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def cached_chain(manager: BlockManager, names: list[bytes], step_id: int = 1) -> list[int]:
    """A table whose blocks carry these names, given back."""
    table = manager.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        manager.register(block, name, step_id)
    manager.free(table)
    return table


def test_a_prefix_is_found_after_its_owner_has_left() -> None:
    manager = BlockManager(8, 4)
    table = cached_chain(manager, [b"a", b"ab", b"abc"])
    assert manager.num_free == 8
    assert manager.find_prefix([b"a", b"ab", b"abX"], 2).blocks == table[:2]
    assert manager.find_prefix([b"X", b"ab"], 2).blocks == []


def test_blocks_without_a_name_are_used_up_first_and_then_the_longest_free() -> None:
    manager = BlockManager(6, 4)
    old = cached_chain(manager, [b"a", b"ab"])
    new = cached_chain(manager, [b"z", b"zy"])
    manager.allocate(2)
    assert manager.find_prefix([b"a", b"ab"], 2).blocks == old
    assert manager.find_prefix([b"z", b"zy"], 2).blocks == new
    # Of one sequence, its end goes first: the beginning can serve others.
    assert manager.allocate(1) == [old[1]]
    assert manager.find_prefix([b"a", b"ab"], 2).blocks == old[:1]
    assert manager.allocate(2) == [old[0], new[1]]


def test_sharing_makes_a_block_recent_again() -> None:
    manager = BlockManager(2, 4)
    (old,) = cached_chain(manager, [b"a"])
    (new,) = cached_chain(manager, [b"z"])
    manager.share([old])
    manager.free([old])
    assert manager.allocate(1) == [new]


def test_a_block_is_not_read_by_the_step_that_fills_it() -> None:
    manager = BlockManager(4, 4)
    table = manager.allocate(2)
    manager.register(table[0], b"a", 4)
    manager.register(table[1], b"ab", 5)
    found = manager.find_prefix([b"a", b"ab"], 5)
    assert (found.blocks, found.grows) == (table[:1], True)
    found = manager.find_prefix([b"a", b"ab"], 6)
    assert (found.blocks, found.grows) == (table, False)


def test_a_fenced_block_is_read_again_but_not_handed_out() -> None:
    """F16: a step in flight still reads it, and the new owner's step comes behind."""
    manager = BlockManager(1, 4)
    (block,) = manager.allocate(1)
    manager.register(block, b"a", 1)
    manager.free([block], last_step_id=3)
    assert (manager.num_free, manager.num_fenced) == (0, 1)
    manager.share([block])
    manager.step_done(3)
    assert (manager.num_free, manager.num_fenced) == (0, 0)
    manager.free([block], last_step_id=2)
    assert manager.num_free == 1


def test_the_fence_is_that_of_the_last_step_of_any_owner() -> None:
    manager = BlockManager(1, 4)
    (block,) = manager.allocate(1)
    manager.register(block, b"a", 1)
    manager.share([block])
    manager.free([block], last_step_id=9)
    manager.free([block], last_step_id=5)
    manager.step_done(8)
    assert manager.num_free == 0
    manager.step_done(9)
    assert manager.num_free == 1


def test_equal_blocks_computed_twice_keep_apart() -> None:
    manager = BlockManager(4, 4)
    first, second = manager.allocate(2)
    manager.register(first, b"a", 1)
    manager.register(second, b"a", 1)
    assert manager.find_prefix([b"a"], 2).blocks == [first]
    manager.free([second])
    manager.free([first])
    # The copy has no name, so it goes first.
    assert manager.allocate(3)[-1] == second
    assert manager.find_prefix([b"a"], 2).blocks == [first]


@given(num_tokens=st.integers(0, 100))
def test_blocks_for_is_the_least_that_holds_the_tokens(num_tokens: int) -> None:
    needed = BlockManager(1, BLOCK_SIZE).blocks_for(num_tokens)
    assert (needed - 1) * BLOCK_SIZE < num_tokens <= needed * BLOCK_SIZE


@pytest.mark.parametrize("blocks", [[0, 0], [0, 5], [7]])
def test_blocks_nobody_owns_cannot_be_freed(blocks: list[int]) -> None:
    manager = BlockManager(8, 4)
    manager.allocate(2)
    with pytest.raises(ValueError, match="not all in use"):
        manager.free(blocks)
    assert (manager.num_free, manager.num_fenced) == (6, 0)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_cache_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(num_blocks, block_size)
