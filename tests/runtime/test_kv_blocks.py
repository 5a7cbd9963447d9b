"""Blocks are free or held, never both, and never lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv_blocks import BlockPool, blocks_for

NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders against a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []

    @property
    def held(self) -> Counter[int]:
        return Counter(block for blocks in self.holders for block in blocks)

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        free, held = self.pool.num_free, self.held
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            assert self.pool.num_free == free
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not set(blocks) & set(held), "a held block was given out again"
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        for block in blocks:
            self.pool.share(block)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def counts_agree(self) -> None:
        held = self.held
        assert [self.pool.ref_count(b) for b in range(NUM_BLOCKS)] == [
            held[b] for b in range(NUM_BLOCKS)
        ]
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.num_blocks == NUM_BLOCKS


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_freed_blocks_are_reused_first() -> None:
    """A lightly loaded server must not walk through its whole pool and make it all resident."""
    pool = BlockPool(100)
    touched = set()
    for _ in range(50):
        blocks = pool.allocate(3)
        assert blocks is not None
        touched |= set(blocks)
        pool.release(blocks)
    assert touched == {0, 1, 2}


def test_misuse_is_a_bug_that_stops() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share(1)
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks
