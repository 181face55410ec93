"""No block is lost, none is shared, none comes back before its fence opens."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.engine.block_manager import BlockManager

NUM_BLOCKS = 12
BLOCK_SIZE = 3


class Ownership(RuleBasedStateMachine):
    """The manager against a model that writes down where every block is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.fenced: list[tuple[int, list[int]]] = []
        self.last_sent = 0
        self.last_done = 0

    @rule()
    def open_table(self) -> None:
        self.tables.append([])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def extend(self, data: st.DataObject, num_tokens: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        before = list(table)
        missing = -(-num_tokens // BLOCK_SIZE) - len(table)
        if missing > self.blocks.num_free:
            with pytest.raises(ValueError, match="are free"):
                self.blocks.extend(table, num_tokens)
            assert table == before
        else:
            new_blocks = self.blocks.extend(table, num_tokens)
            assert len(new_blocks) == max(missing, 0)
            assert table == before + new_blocks

    @rule()
    def send_step(self) -> None:
        self.last_sent += 1

    @precondition(lambda self: self.last_done < self.last_sent)
    @rule()
    def finish_step(self) -> None:
        self.last_done += 1
        self.blocks.step_done(self.last_done)
        self.fenced = [(fence, blocks) for fence, blocks in self.fenced if fence > self.last_done]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        fence = data.draw(st.integers(0, self.last_sent))
        self.blocks.free(table, fence)
        if fence > self.last_done:
            self.fenced.append((fence, table))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        owned = Counter(block for table in self.tables for block in table)
        fenced = Counter(block for _, blocks in self.fenced for block in blocks)
        assert all(count == 1 for count in (owned + fenced).values())
        assert self.blocks.num_in_use == len(owned)
        assert self.blocks.num_fenced == len(fenced)
        assert self.blocks.num_free == NUM_BLOCKS - len(owned) - len(fenced)

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.free(table)
        self.blocks.step_done(self.last_sent)
        assert sorted(self.blocks.allocate(NUM_BLOCKS)) == list(range(NUM_BLOCKS))


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
    assert (manager.num_in_use, manager.num_free) == (2, 6)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_cache_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(num_blocks, block_size)
